"""Schedules: what a backend derives from the lengths of a batch, built once and kept.

A builder is a pure function of host lengths and plain arguments. Its result is cached on the
lengths tensor itself, so it lives as long as the layout does and is found again both from the
layout and from inside a custom op, which receives tensors only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

_BUILDERS: dict[str, Callable[..., Any]] = {}
_CACHE = WeakTensorKeyDictionary()

Builder = TypeVar("Builder", bound=Callable[..., Any])


def register(kind: str) -> Callable[[Builder], Builder]:
    """Register `build(lengths, *args)` as the builder of the schedules of this kind.

    Raises:
        ValueError: if the kind is taken.
    """

    def decorate(build: Builder) -> Builder:
        if kind in _BUILDERS:
            raise ValueError(f"a schedule of kind {kind!r} is already registered")
        _BUILDERS[kind] = build
        return build

    return decorate


def schedule(kind: str, lengths: Tensor, *args: Any) -> Any:
    """The schedule of this kind for host lengths `[batch_size]`, built on the first call.

    Args:
        kind: the name of a registered builder.
        lengths: int64 `[batch_size]` on the CPU; not to be changed afterwards.
        *args: what else the builder takes. Hashable values, or another lengths tensor.

    Raises:
        ValueError: if nothing is registered as `kind`.
    """
    if kind not in _BUILDERS:
        raise ValueError(f"no schedule of kind {kind!r}; there are {sorted(_BUILDERS)}")
    cached = _CACHE.get(lengths)
    if cached is None:
        cached = _CACHE[lengths] = {}
    # Only weak references to tensors are kept, or a schedule would keep its own layout alive. An
    # id may be reused once its tensor is gone, so a hit must also point to the very same tensors.
    tensors = [a for a in args if isinstance(a, Tensor)]
    key = (kind, *(id(a) if isinstance(a, Tensor) else a for a in args))
    hit = cached.get(key)
    if hit is None or any(ref() is not a for ref, a in zip(hit[0], tensors, strict=True)):
        built = _BUILDERS[kind](lengths, *args)
        hit = cached[key] = ([TensorWeakRef(a) for a in tensors], built)
    return hit[1]


@register("query_tiles")
def query_tiles(
    k_lengths: Tensor,
    queries: Tensor | int,
    left: int | None,
    right: int | None,
    block: int,
    device: torch.device,
) -> Tensor:
    """Tiles of `block` queries, those with the most keys to see first.

    Args:
        k_lengths: keys of each sample.
        queries: queries of each sample, or of every sample.
        left, right: the window; None is unbounded.

    Returns:
        int32 `[tiles, 2]` of (sample, number of the tile within it) on `device`. Tiles that see no
        key are among them, last: their output is 0 and has to be written.
    """
    if not isinstance(queries, Tensor):
        queries = torch.full_like(k_lengths, queries)
    sample, number = _pieces(queries, block)
    begin, end = _visible(sample, number * block, block, k_lengths, queries, left, right)
    order = (end - begin).argsort(descending=True, stable=True)
    return _table(sample[order], number[order], device=device)


@register("key_tiles")
def key_tiles(
    k_lengths: Tensor,
    queries: Tensor | int,
    left: int | None,
    right: int | None,
    block: int,
    device: torch.device,
) -> Tensor:
    """Blocks of `block` keys, those that the most queries see first; else as `query_tiles`.

    Blocks that no query sees are among them, last: their gradients are 0 and have to be written.
    """
    # Key j sees query i exactly if i sees j, with left and right exchanged.
    if not isinstance(queries, Tensor):
        queries = torch.full_like(k_lengths, queries)
    return query_tiles(queries, k_lengths, right, left, block, device)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of keys for workers that each own a sum over the batch.

    Attributes:
        table: int32 `[turns * workers, 3]` of (sample, first key, end of keys), empty runs last.
            In turn t, worker w takes row `t * workers + w`, or `t * workers + workers - 1 - w` in
            odd turns: longest first and in a zig-zag, so that the sums of their keys are near.
        turns, workers: its shape.
    """

    table: Tensor
    turns: int
    workers: int


SEGMENT_ALIGNMENT = 128  # a multiple of every block of keys


@register("key_segments")
def key_segments(k_lengths: Tensor, workers: int, device: torch.device) -> Segments:
    """Cuts all keys into runs of one sample each and deals them to at most `workers` workers.

    Long samples are cut so that every worker gets about eight runs or more.
    """
    share = int(k_lengths.sum()) // (8 * workers)
    longest = max(4, -(-share // SEGMENT_ALIGNMENT)) * SEGMENT_ALIGNMENT
    sample, number = _pieces(k_lengths, longest)
    begin = number * longest
    end = torch.minimum(begin + longest, k_lengths[sample])
    order = (end - begin).argsort(descending=True, stable=True)
    workers = max(1, min(workers, sample.shape[0]))
    turns = -(-sample.shape[0] // workers)
    empty = turns * workers - sample.shape[0]
    columns = (torch.nn.functional.pad(x[order], (0, empty)) for x in (sample, begin, end))
    return Segments(_table(*columns, device=device), turns, workers)


def _pieces(lengths: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(sample, number within it) of every piece of at most `block` rows."""
    counts = (lengths + block - 1) // block
    sample = torch.repeat_interleave(torch.arange(lengths.shape[0]), counts)
    return sample, torch.arange(sample.shape[0]) - (counts.cumsum(0) - counts)[sample]


def _table(*columns: Tensor, device: torch.device) -> Tensor:
    return _sent(torch.stack(columns, 1).to(torch.int32), device)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from pinned memory, since any other may wait for the work before it."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class DealtTiles:
    """Tiles for the CTAs of a persistent kernel, the longest first.

    Attributes:
        table: int32 `[tiles, 8]` of (first key row, keys of the sample, first and end of the keys
            that the tile sees, first output row, queries of the sample, first query, head). Row
            `turn * ctas + place` belongs to CTA `place`, or `ctas - 1 - place` in odd turns: a
            zig-zag, which evens out the sums of lengths. Without a window the tiles of a sample and
            head are neighbours, so that they run at the same time and share keys in the L2 cache;
            with one side of a window only they are sorted within sections whose keys fit there.
        empty: int32 `[n, 8]`, the same of tiles that see no key.
    """

    table: Tensor
    empty: Tensor


SECTION = 2**15  # rows of keys, each of one head, that stay in the L2 cache together


@register("dealt_tiles")
def dealt_tiles(
    k_lengths: Tensor,
    queries: Tensor | int,
    left: int | None,
    right: int | None,
    heads: int,
    block_q: int,
    block_k: int,
    device: torch.device,
    ctas: int = 1,
) -> DealtTiles:
    """Tiles of `block_q` queries of one head, those with the most blocks of `block_k` keys first.

    Args:
        k_lengths, queries, left, right: as in `query_tiles`.
        ctas: CTAs that take them; where a window has one side only, two turns are sorted at a time.
    """
    if not isinstance(queries, Tensor):
        queries = torch.full_like(k_lengths, queries)
    table = _deal(k_lengths, queries, left, right, heads, block_q, block_k, ctas)
    return _split(table, device)


@dataclasses.dataclass(frozen=True)
class KeyTiles:
    """Tiles of keys in the order in which CTAs take them, one or (of a whole sample) two at a time.

    Attributes:
        table: int32 `[tiles, 10]`: the columns of `DealtTiles` with queries and keys exchanged, the
            sample's first row in `statistic_tiles`, and the tile's order among those that add to
            its queries' gradient: 0 where any may come first, 1 for the first of a whole sample
            and head, 2 for the second.
        single: tiles at the table's beginning that are not of whole samples.
        pairs: whole samples (of one head) with two tiles, which come next; those with one follow.
        units: how often tiles are taken.
        empty: int32 `[n, 10]`, tiles that no query sees.
    """

    table: Tensor
    single: int
    pairs: int
    units: int
    empty: Tensor


@register("dealt_keys")
def dealt_keys(
    k_lengths: Tensor,
    queries: Tensor | int,
    left: int | None,
    right: int | None,
    heads: int,
    block_k: int,
    block_q: int,
    device: torch.device,
    ctas: int = 1,
    whole: bool = False,
) -> KeyTiles:
    """Tiles of `block_k` keys of one key head, those that the most queries see first.

    As `dealt_tiles` with queries and keys exchanged; begin is a multiple of `block_q`. With `whole`
    samples of at most two tiles are whole: they come after all others, and whoever takes one has
    all of its keys of a head. Then no side of the window may be bounded.
    """
    if not isinstance(queries, Tensor):
        queries = torch.full_like(k_lengths, queries)
    padded = (queries + block_q - 1) // block_q * block_q
    stats, none = padded.cumsum(0) - padded, torch.zeros_like(padded)
    # Key j sees query i exactly if i sees j, with left and right exchanged.
    table = _deal(queries, k_lengths, right, left, heads, block_k, block_q, ctas, stats, none)
    tiles = _split(table, torch.device("cpu"), block_q)
    table, pairs = tiles.table, 0
    single = units = table.shape[0]
    if whole:
        keys = table[:, 5]
        two, one = (keys > block_k) & (keys <= 2 * block_k), keys <= block_k
        table[two | one, 9] = torch.where(table[two | one, 6] == 0, 1, 2).to(torch.int32)
        kind = two.int() + 2 * one.int()
        single, pairs = int((kind == 0).sum()), int(two.sum()) // 2
        table, units = table.index_select(0, kind.argsort(stable=True)), units - pairs
    return KeyTiles(_sent(table, device), single, pairs, units, _sent(tiles.empty, device))


@register("statistic_tiles")
def statistic_tiles(
    k_lengths: Tensor, queries: Tensor | int, block: int, device: torch.device, whole: int = 0
) -> Tensor:
    """int32 `[tiles, 3]` of (first row, rows, whether sums of their gradient must begin as 0).

    Queries in blocks, every sample's from a new one. Samples of at most `whole` keys begin with
    what the first tile of their keys writes, if there is one.
    """
    if not isinstance(queries, Tensor):
        queries = torch.full_like(k_lengths, queries)
    sample, number = _pieces(queries, block)
    first = (queries.cumsum(0) - queries)[sample] + number * block
    rows = (queries[sample] - number * block).clamp(max=block)
    is_whole = (k_lengths > 0) & (k_lengths <= whole)
    return _table(first, rows, ~is_whole[sample], device=device)


def _deal(
    k_lengths: Tensor,
    queries: Tensor,
    left: int | None,
    right: int | None,
    heads: int,
    block_q: int,
    block_k: int,
    ctas: int,
    *more: Tensor,
) -> Tensor:
    """The rows of `DealtTiles`, seen or not, with `more` columns of each sample."""
    none = torch.zeros_like(k_lengths)
    k_first, out_first = k_lengths.cumsum(0) - k_lengths, queries.cumsum(0) - queries
    columns = (k_first, k_lengths, none, k_lengths, out_first, queries, none, none, *more)
    # Rows are gathered whole and in int32: a gather and a cast for every column take twice as long.
    of_sample = torch.stack(columns, 1).to(torch.int32)
    if left is not None and right is not None:
        # Tiles are alike but for those at a sample's ends, and share keys with the next ones only.
        sample, number = _pieces(queries, block_q)
        first = number * block_q
        table = of_sample.index_select(0, sample)
        begin, end = _visible(sample, first, block_q, k_lengths, queries, left, right)
        table[:, 2], table[:, 3], table[:, 6] = begin, end, first
        order = _blocks(table, block_k).argsort(descending=True, stable=True)
        table = table.index_select(0, order.repeat_interleave(heads))
        table[:, 7] = torch.arange(heads).repeat(order.shape[0])
        return table
    longest = k_lengths.argsort(descending=True, stable=True)
    of_pair = of_sample[longest].repeat_interleave(heads, 0)  # of a sample and head
    of_pair[:, 7] = torch.arange(heads).repeat(longest.shape[0])
    pair, number = _pieces(of_pair[:, 5], block_q)
    first = number * block_q
    table = of_pair.index_select(0, pair)
    table[:, 6] = first
    if left is None and right is None:  # all tiles of a sample are alike
        return table
    keys, rows = of_pair[:, 1], of_pair[:, 5]
    table[:, 2], table[:, 3] = _visible(pair, first, block_q, keys, rows, left, right)
    blocks, section = _blocks(table, block_k), keys.cumsum(0) // SECTION
    order = ((section[pair] << 32) - blocks).argsort(stable=True)
    # A zig-zag evens out what is sorted, and a section does not end where a turn does. So two turns
    # at a time are sorted.
    turns = torch.arange(order.shape[0]) // (2 * ctas)
    return table.index_select(0, order[((turns << 32) - blocks[order]).argsort(stable=True)])


def _blocks(table: Tensor, block: int) -> Tensor:
    """Blocks of keys that each tile sees."""
    return (table[:, 3] - table[:, 2] + block - 1) // block


def _split(table: Tensor, device: torch.device, block: int = 1) -> DealtTiles:
    """Tiles that see a key, whose begin is then rounded down to a block, and those that do not."""
    begin = table[:, 2]
    seen = begin < table[:, 3]
    if block > 1:
        begin -= begin % block
    parts = (table, table[:0]) if seen.all() else (table[seen], table[~seen])
    return DealtTiles(*(_sent(part, device) for part in parts))


def _visible(
    sample: Tensor,
    first: Tensor,
    block: int,
    keys: Tensor,
    queries: Tensor,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor]:
    """(begin, end) of the keys that some query of a tile sees; end is begin where there is none."""
    last = torch.minimum(first + block, queries[sample]) - 1
    shift = keys[sample] - queries[sample]
    begin = torch.zeros_like(first) if left is None else (first + shift - left).clamp(min=0)
    end = keys[sample]
    if right is not None:
        end = torch.minimum(last + shift + right + 1, end)
    return begin, torch.maximum(begin, end)

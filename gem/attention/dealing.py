"""Schedules for kernels whose CTAs stay on their multiprocessors: who takes which tile, and when.

Tables have a row for each tile; CTAs take rows in turns, or one after the other by a counter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from gem.attention.schedule import register
from gem.attention.tables import most_first, pieces, rows_of, sent, starts, table_of, visible_keys


@dataclasses.dataclass(frozen=True)
class DealtTiles:
    """Tiles for the CTAs of a persistent kernel, the longest first.

    Attributes:
        table: int32 `[tiles, 9]` of (first key row, keys of the sample, first and end of the keys
            that the tile sees, first output row, queries of the sample, first query, head, number
            of its result among those of parts, or -1). Row `turn * ctas + place` belongs to CTA
            `place`, or `ctas - 1 - place` in odd turns: a zig-zag, which evens out the sums of
            lengths, and `even` more so. Without a window the tiles of a sample and head are
            neighbours, so that they run at the same time and share keys in the L2 cache; with one
            side of a window only they are sorted within sections whose keys fit there.
        empty: int32 `[n, 9]`, the same of tiles that see no key.
        merges: int32 `[m, 9]`, the same of tiles that are in parts, but for the first two: the
            number of the first part's result, and how many there are.
        parts: how many there are of all tiles.
    """

    table: Tensor
    empty: Tensor
    merges: Tensor
    parts: int


SECTION = 2**15  # rows of keys, each of one head, that stay in the L2 cache together
EVENED_TURNS = 32  # some 10 us each
EVEN_ENOUGH = 1.005  # the fullest CTA over the mean
SHORTEST_PART = 4  # blocks of keys: what a part costs by itself is about one
WORTH_PARTS = 1024  # keys by which a tile gets shorter: another kernel merges the parts


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
    team: int = 1,
    even: bool = False,
    in_parts: bool = False,
) -> DealtTiles:
    """Tiles of `block_q` queries of one head, those with the most blocks of `block_k` keys first.

    Args:
        k_lengths, queries, left, right: as in `query_tiles`.
        ctas: CTAs that take them; where a window has one side only, two turns are sorted at a time.
        team: so many tiles of one sample, at a multiple of their number, are for so many CTAs at
            one; the number divides `ctas` and the tiles.
        even: whether in tables without a window those who have the fewest blocks by then take a
            turn's longest tiles.
        in_parts: whether tiles without a window that would take far longer than a CTA's share are
            cut into parts, which see some of the keys each. Not with a team.
    """
    keys, rows = rows_of(k_lengths, queries)
    table, empty = _deal(
        keys, rows, left, right, heads, block_q, block_k, ctas, np.full_like(keys, -1)
    )
    merges = table[:0]
    if left is None and right is None and len(table):
        if in_parts:
            table, merges = _parted(table, block_k, ctas)
        if even:
            table = _evened(table, block_k, ctas // team, team)
    parts = int(merges[:, 1].sum())
    return DealtTiles(sent(table, device), sent(empty, device), sent(merges, device), parts)


@dataclasses.dataclass(frozen=True)
class KeyTiles:
    """Tiles of keys in the order in which CTAs take them, one or (of a whole sample) two at a time.

    Attributes:
        table: int32 `[tiles, 10]`: the first eight columns of `DealtTiles` with queries and keys
            exchanged, the sample's first row in `statistic_tiles`, and the tile's order among those
            that add to its queries' gradient: 0 where any may come first; of a whole sample and
            head 1 for the first, 2 for the second, and 3 where there is only one.
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
    keys, rows = rows_of(k_lengths, queries)
    padded = (rows + block_q - 1) // block_q * block_q
    more = starts(padded), np.zeros_like(padded)
    # Key j sees query i exactly if i sees j, with left and right exchanged.
    table, empty = _deal(rows, keys, right, left, heads, block_k, block_q, ctas, *more)
    table[:, 2] -= table[:, 2] % block_q
    single = units = len(table)
    pairs = 0
    if whole:
        of_tile = table[:, 5]
        one, two = of_tile <= block_k, of_tile <= 2 * block_k
        table[:, 9] = np.where(one, 3, np.where(two, np.where(table[:, 6] == 0, 1, 2), 0))
        kind = two.astype(np.int8) + one
        single, pairs = int((kind == 0).sum()), int((kind == 1).sum()) // 2
        table, units = table.take(kind.argsort(kind="stable"), axis=0), units - pairs
    return KeyTiles(sent(table, device), single, pairs, units, sent(empty, device))


@register("statistic_tiles")
def statistic_tiles(
    k_lengths: Tensor, queries: Tensor | int, block: int, device: torch.device, block_k: int = 0
) -> Tensor:
    """int32 `[tiles, 3]` of (first row, rows, what sums of their gradient begin as).

    Queries in blocks, every sample's from a new one. Sums begin as 0 (1) but for whole samples, of
    at most two tiles of `block_k` keys (0: none are whole): with what the first tile writes (0), or
    what the only one does (2). Nobody writes where there are no keys (1). Shared queries have one
    set of sums: those that would be the first sample's begin as 0 (1), the others are none (0).
    """
    keys, rows = rows_of(k_lengths, queries)
    sample, number = pieces(rows, block)
    first = starts(rows)[sample] + number * block
    rest = np.minimum(rows[sample] - number * block, block)
    if isinstance(queries, Tensor):
        begin = np.where((keys == 0) | (keys > 2 * block_k), 1, np.where(keys <= block_k, 2, 0))
    else:
        begin = np.arange(len(keys)) == 0
    return table_of(first, rest, begin[sample], device=device)


def _deal(
    keys: ndarray,
    queries: ndarray,
    left: int | None,
    right: int | None,
    heads: int,
    block_q: int,
    block_k: int,
    ctas: int,
    *more: ndarray,
) -> tuple[ndarray, ndarray]:
    """(table, empty) of `DealtTiles`, with `more` columns of each sample."""
    of_sample = np.zeros((len(keys), 8 + len(more)), np.int32)
    columns = {0: starts(keys), 1: keys, 3: keys, 4: starts(queries), 5: queries}
    for i, column in (columns | dict(enumerate(more, 8))).items():
        of_sample[:, i] = column
    if left is not None and right is not None:
        # Tiles are alike but for those at a sample's ends, and share keys with the next ones only.
        sample, number = pieces(queries, block_q)
        table = of_sample.take(sample, axis=0)
        _see(table, number * block_q, block_q, left, right)
        order = most_first(_blocks(table, block_k))
        table = table.take(order.repeat(heads), axis=0)
        table[:, 7] = np.tile(np.arange(heads, dtype=np.int32), len(order))
        return _split(table)
    longest = most_first(keys)
    of_pair = of_sample.take(longest.repeat(heads), axis=0)  # of a sample and head
    of_pair[:, 7] = np.tile(np.arange(heads, dtype=np.int32), len(longest))
    pair, number = pieces(of_pair[:, 5], block_q)
    table = of_pair.take(pair, axis=0)
    if left is None and right is None:  # all tiles of a sample are alike
        table[:, 6] = number * block_q
        return _split(table)
    _see(table, number * block_q, block_q, left, right)
    blocks = _blocks(table, block_k).astype(np.int64)
    section = of_pair[:, 1].cumsum(dtype=np.int64) // SECTION
    order = ((section[pair] << 32) - blocks).argsort(kind="stable")
    # A zig-zag evens out what is sorted, and a section does not end where a turn does. So two turns
    # at a time are sorted.
    turns = np.arange(len(order)) // (2 * ctas)
    order = order[((turns << 32) - blocks[order]).argsort(kind="stable")]
    return _split(table.take(order, axis=0))


def _parted(table: ndarray, block_k: int, ctas: int) -> tuple[ndarray, ndarray]:
    """(table, merges) of `DealtTiles`: tiles of more than twice a CTA's share of all blocks are in
    parts of half a share.
    """
    blocks = _blocks(table, block_k)
    share = -(-int(blocks.sum()) // ctas)
    part = max(SHORTEST_PART, -(-share // 2))
    long = (blocks > 2 * share) & ((blocks - part) * block_k >= WORTH_PARTS)
    if not long.any():
        return table, table[:0]
    most = np.where(long, part, blocks)
    of, number = pieces(blocks, most)
    parts = table.take(of, axis=0)
    size = most[of] * block_k
    parts[:, 2] += number * size
    parts[:, 3] = np.minimum(parts[:, 2] + size, parts[:, 3])
    split = long[of]
    parts[split, 8] = np.arange(split.sum())
    merges = table[long]
    counts = -(-blocks[long] // most[long])
    merges[:, 0], merges[:, 1] = counts.cumsum() - counts, counts
    return parts[most_first(_blocks(parts, block_k))], merges


def _evened(table: ndarray, block_k: int, teams: int, team: int) -> ndarray:
    """A table of tiles for `teams` teams of CTAs, in which turns hold the same tiles as before.

    A zig-zag leaves some 3% where there are few blocks a tile, or tiles for one turn more of a few
    CTAs: these count from the beginning. Only the last turns are changed.
    """
    cost = 2 * _blocks(table[::team], block_k) + 1  # half a block for what a tile costs by itself
    full, rest = divmod(len(cost), teams)
    turns = cost[: full * teams].reshape(full, teams)
    load = np.zeros(teams, np.int64)
    load[:rest] = cost[full * teams :]
    if full % 2:
        load = load[::-1]
    first = max(0, full - EVENED_TURNS)
    load = load + turns[:first:2].sum(0) + turns[1:first:2].sum(0)[::-1]
    later = turns[first:] if first % 2 == 0 else turns[first:, ::-1]
    dealt = load + later[::2].sum(0) + later[1::2].sum(0)[::-1]
    if full == 0 or dealt.max() <= EVEN_ENOUGH * dealt.mean() or later.min() == later.max():
        return table
    order = np.arange(len(cost))
    for turn in range(first, full):
        least = load.argsort(kind="stable")
        load[least] += turns[turn]
        place = least if turn % 2 == 0 else teams - 1 - least
        order[turn * teams + place] = np.arange(turn * teams, (turn + 1) * teams)
    return table.reshape(-1, team, table.shape[1]).take(order, axis=0).reshape(table.shape)


def _see(table: ndarray, first: ndarray, block: int, left: int | None, right: int | None) -> None:
    """Fills in the tiles' first query and the keys that they see."""
    seen = visible_keys(first, block, table[:, 1], table[:, 5], left, right)
    table[:, 2], table[:, 3], table[:, 6] = *seen, first


def _blocks(table: ndarray, block: int) -> ndarray:
    """Blocks of keys that each tile sees."""
    return (table[:, 3] - table[:, 2] + block - 1) // block


def _split(table: ndarray) -> tuple[ndarray, ndarray]:
    """Tiles that see a key, and those that do not."""
    seen = table[:, 2] < table[:, 3]
    return (table, table[:0]) if seen.all() else (table[seen], table[~seen])

"""Schedules: what a backend derives from the lengths of a batch, built once and kept.

A builder is a pure function of host lengths and plain arguments. Its result is cached on the
lengths tensor itself, so it lives as long as the layout does and is found again both from the
layout and from inside a custom op, which receives tensors only. `dealing` has more builders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from gem.attention.tables import most_first, pieces, rows_of, table_of, visible_keys

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
    return _tiles(*rows_of(k_lengths, queries), left, right, block, device)


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
    keys, rows = rows_of(k_lengths, queries)
    return _tiles(rows, keys, right, left, block, device)


def _tiles(
    keys: ndarray,
    queries: ndarray,
    left: int | None,
    right: int | None,
    block: int,
    device: torch.device,
) -> Tensor:
    sample, number = pieces(queries, block)
    begin, end = visible_keys(number * block, block, keys[sample], queries[sample], left, right)
    order = most_first(end - begin)
    return table_of(sample[order], number[order], device=device)


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
    keys, _ = rows_of(k_lengths, 0)
    share = int(k_lengths.sum()) // (8 * workers)
    longest = max(4, -(-share // SEGMENT_ALIGNMENT)) * SEGMENT_ALIGNMENT
    sample, number = pieces(keys, longest)
    begin = number * longest
    end = np.minimum(begin + longest, keys[sample])
    order = most_first(end - begin)
    workers = max(1, min(workers, len(sample)))
    turns = -(-len(sample) // workers)
    empty = turns * workers - len(sample)
    columns = (np.pad(x[order], (0, empty)) for x in (sample, begin, end))
    return Segments(table_of(*columns, device=device), turns, workers)

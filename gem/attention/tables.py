"""What schedules are made of: NumPy arrays of lengths and pieces, sent to a device as a table.

Builders compute in NumPy: their arrays are small, and a call of it costs a third of torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor


def rows_of(k_lengths: Tensor, queries: Tensor | int) -> tuple[ndarray, ndarray]:
    """int32 (keys, queries) of each sample."""
    keys = k_lengths.numpy().astype(np.int32)
    if isinstance(queries, Tensor):
        return keys, queries.numpy().astype(np.int32)
    return keys, np.full_like(keys, queries)


def starts(lengths: ndarray) -> ndarray:
    """Where each sample begins."""
    return lengths.cumsum(dtype=np.int32) - lengths


def pieces(lengths: ndarray, block: int | ndarray) -> tuple[ndarray, ndarray]:
    """(sample, number within it) of every piece of at most `block` rows.

    Numbers are int64, and with them what is computed from them: sums with a window's size may leave
    int32.
    """
    counts = -(-lengths // block)
    sample = np.arange(len(lengths)).repeat(counts)
    return sample, np.arange(len(sample)) - starts(counts)[sample]


def most_first(x: ndarray) -> ndarray:
    """The order that sorts from high to low and leaves equals as they are."""
    return (-x).argsort(kind="stable")


def table_of(*columns: ndarray, device: torch.device) -> Tensor:
    return sent(np.stack(columns, 1).astype(np.int32), device)


def sent(x: ndarray, device: torch.device) -> Tensor:
    """An int32 array's copy on the device."""
    if not len(x):
        return torch.empty(x.shape, dtype=torch.int32, device=device)
    return to_device(torch.from_numpy(np.ascontiguousarray(x)), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x of the host on the device; from pinned memory, since any other copy may wait for the work
    before it.
    """
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def visible_keys(
    first: ndarray,
    block: int,
    keys: ndarray,
    queries: ndarray,
    left: int | None,
    right: int | None,
) -> tuple[ndarray, ndarray]:
    """(begin, end) of the keys that some query of a tile sees; end is begin where there is none.

    keys, queries: of the tile's sample.
    """
    last = np.minimum(first + block, queries) - 1
    shift = keys - queries
    begin = np.zeros_like(first) if left is None else np.maximum(first + shift - left, 0)
    end = keys
    if right is not None:
        end = np.minimum(last + shift + right + 1, end)
    return begin, np.maximum(begin, end)

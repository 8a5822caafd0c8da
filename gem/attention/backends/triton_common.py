"""Parts that the Triton kernels of forward and backward share.

Names in kernels: `i` counts a sample's queries and `j` its keys, both from 0; query i stands at key
`i + shift`. Tiles have BLOCK_Q queries, BLOCK_K keys and BLOCK_D columns, of which DIM are real.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    base, rows, count, stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL: tl.constexpr
):
    """Rows `[len(rows), BLOCK_D]` from `base`; 0 from row `count` on (unless ALL) and past DIM.

    Zeros, not whatever lies there: a neighbour's NaN times a probability of 0 would be NaN.
    """
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if ALL and DIM == BLOCK_D:
        return tl.load(pointers)
    if ALL:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    mask = rows[:, None] < count
    if DIM != BLOCK_D:
        mask = mask & (columns[None, :] < DIM)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, rows, count, stride, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows before `count` and the columns before DIM of x `[len(rows), BLOCK_D]`."""
    columns = tl.arange(0, BLOCK_D)
    mask = rows[:, None] < count
    if DIM != BLOCK_D:
        mask = mask & (columns[None, :] < DIM)
    pointers = base + rows[:, None] * stride + columns[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def samples_rows(OFFSETS, sample):
    """(first row as int64, number of rows) of a sample."""
    first = tl.load(OFFSETS + sample)
    return first.to(tl.int64), tl.load(OFFSETS + sample + 1) - first


@triton.jit
def key_ranges(
    first_i,
    last_i,
    shift,
    keys,
    left,
    right,
    BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(begin, full_begin, full_end, end): the keys that queries first_i .. last_i see.

    Blocks of BLOCK_K keys start at `begin`. Those from full_begin to full_end lie within the
    sample and are seen by every one of the queries, so that they need no mask.
    """
    begin = 0
    all_from = 0
    end = keys
    all_to = keys
    if HAS_LEFT:
        begin = tl.maximum(first_i + shift - left, 0)
        all_from = tl.maximum(last_i + shift - left, 0)
    if HAS_RIGHT:
        end = tl.minimum(last_i + shift + right + 1, keys)
        all_to = tl.minimum(first_i + shift + right + 1, keys)
    full_begin = begin + (tl.maximum(all_from - begin, 0) + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    full_begin = tl.maximum(tl.minimum(full_begin, end), begin)
    full_end = full_begin + tl.maximum(all_to - full_begin, 0) // BLOCK_K * BLOCK_K
    return begin, full_begin, full_end, end


@triton.jit
def visible(i, j, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether the window lets query i see key j, of whatever shapes broadcast together.

    `j >= 0` is always true; it gives the result its shape where neither side is bounded.
    """
    seen = (j >= 0) & (i >= 0)
    if HAS_LEFT:
        seen = seen & (j >= i + shift - left)
    if HAS_RIGHT:
        seen = seen & (j <= i + shift + right)
    return seen

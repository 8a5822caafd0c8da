"""What `tlx_hopper_forward` leaves: tiles in parts are merged, tiles without keys get zeros."""

from __future__ import annotations

import triton
import triton.language as tl

from gem.attention.backends.tlx_common import rows_of
from gem.attention.backends.tlx_forward_tiles import COLUMNS


@triton.jit
def merge_kernel(
    OUT,
    LSE,
    PARTS,
    PART_LSE,
    MERGES,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out and lse of tiles in parts, 16 queries at a time, from those of their parts in order.

    A part's output counts by its share of the sum of exponentials, which its log-sum-exp tells.
    """
    row = MERGES + tl.program_id(0) * COLUMNS
    first, parts = tl.load(row), tl.load(row + 1)
    out_first, queries, first_i, head = rows_of(row)
    rows = tl.program_id(1) * 16 + tl.arange(0, 16)
    columns = tl.arange(0, BLOCK_D)
    top = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    out = tl.zeros([16, BLOCK_D], tl.float32)
    for part in tl.range(first, first + parts):
        place = part.to(tl.int64) * BLOCK_Q + rows
        part_lse = tl.load(PART_LSE + place)
        part_out = tl.load(PARTS + place[:, None] * BLOCK_D + columns[None, :])
        new_top = tl.maximum(top, part_lse)
        shrink, share = tl.exp(top - new_top), tl.exp(part_lse - new_top)
        out = out * shrink[:, None] + part_out * share[:, None]
        total = total * shrink + share
        top = new_top
    i = first_i + rows
    place = (out_first + i).to(tl.int64) * HEADS + head
    there = i < queries
    mask = there[:, None] & (columns < DIM)[None, :]
    out = (out / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + place[:, None] * DIM + columns[None, :], out, mask=mask)
    tl.store(LSE + place, top + tl.log(total), mask=there)


@triton.jit
def blank_kernel(
    OUT,
    LSE,
    TILES,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = 0 and lse = -inf for the queries of tiles that see no key."""
    row = TILES + tl.program_id(0) * COLUMNS
    out_first, queries, first_i, head = rows_of(row)
    rows = tl.arange(0, BLOCK_Q)
    there = (rows < queries - first_i) & (rows < ROWS)
    place = (out_first + first_i + rows).to(tl.int64) * HEADS + head
    columns = tl.arange(0, BLOCK_D)
    zero = tl.zeros([BLOCK_Q, BLOCK_D], OUT.dtype.element_ty)
    mask = there[:, None] & (columns < DIM)[None, :]
    tl.store(OUT + place[:, None] * DIM + columns[None, :], zero, mask=mask)
    tl.store(LSE + place, tl.full([BLOCK_Q], -float("inf"), tl.float32), mask=there)

"""Around the backward kernels in TLX: the queries' statistics before, dQ's float32 sums after."""

from __future__ import annotations

import triton
import triton.language as tl

from gem.attention.backends.tlx_common import to_base_2


@triton.jit(do_not_specialize=["stats"])
def statistics_kernel(
    OUT,
    DOUT,
    LSE,
    DLSE,
    DELTA,
    LSE2,
    SUMS,
    COUNTER,
    TILES,
    stats,
    out_row,
    out_head,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """DELTA and LSE2 `[HEADS, stats]`, each sample's from a multiple of BLOCK on.

    TILES is that of `dealing.statistic_tiles` for BLOCK rows. delta is
    sum(dout * out) - dlse, and the log-sum-exp is in base 2. It is +inf, so that exp gives 0, where
    a query sees nothing or is not there; of the latter delta is 0. CLEAR: SUMS of `dq_kernel`
    become 0 where TILES asks for it, and always COUNTER, from which CTAs of the next kernel take
    their tiles.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if (tile == 0) & (head == 0):
        tl.store(COUNTER, 0)
    first = tl.load(TILES + 3 * tile).to(tl.int64)
    there = tl.arange(0, BLOCK) < tl.load(TILES + 3 * tile + 1)
    r = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (columns < DIM)[None, :]
    place = (r * out_row + head.to(tl.int64) * out_head)[:, None]
    out = tl.load(OUT + place + columns[None, :], mask=mask, other=0.0)
    place = (r * do_row + head.to(tl.int64) * do_head)[:, None]
    dout = tl.load(DOUT + place + columns[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + r * HEADS + head, mask=there, other=0.0)
    lse = tl.load(LSE + r * HEADS + head, mask=there, other=-float("inf"))
    lse = to_base_2(lse)
    to = head.to(tl.int64) * stats + tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(DELTA + to, delta)
    tl.store(LSE2 + to, lse)
    if CLEAR:
        if tl.load(TILES + 3 * tile + 2) == 1:
            for u in tl.static_range(BLOCK // 64):
                first = ((tile * (BLOCK // 64) + u) * HEADS + head).to(tl.int64) * (64 * BLOCK_D)
                zero = tl.zeros([64 * BLOCK_D], tl.float32)
                tl.store(SUMS + first + tl.arange(0, 64 * BLOCK_D), zero)


@triton.jit
def in_registers_order(dq, BLOCK_D: tl.constexpr):
    """dq `[64, BLOCK_D]` as the sums have it, `[2 * BLOCK_D, 32]`: in the order of a product's
    registers.

    A thread of a product has two rows and, of each eight columns, two: four numbers. So it writes
    16 bytes at once, and a warp to all banks; by rows it would need twice as many writes, of which
    each would meet another in a bank. `dq_kernel` has the order too.
    """
    x = tl.reshape(dq, [4, 2, 8, BLOCK_D // 8, 4, 2])  # warp, half, row, eighth, column, of two
    return tl.reshape(tl.permute(x, [3, 0, 2, 4, 1, 5]), [2 * BLOCK_D, 32])


@triton.jit(do_not_specialize=["queries"])
def dq_kernel(
    SUMS,
    DQ,
    TILES,
    queries,
    natural_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BROADCAST: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """DQ `[rows, HEADS, DIM]` of float32 sums `[tiles, HEADS, 64 * BLOCK_D]`.

    The sums are those that `hopper_backward_kernel` has added, in the order of
    `in_registers_order`.

    Grid: (tiles of 64 queries, HEADS). TILES is as in `statistics_kernel`; where q is shared it is
    not used, and `queries` are DQ's rows. With ALONE some tiles of keys have written DQ themselves.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if BROADCAST:
        first = tile * 64
        rows = queries - first
    else:
        row = TILES + tile * 64 // BLOCK * 3
        first = tl.load(row) + tile * 64 % BLOCK
        rows = tl.load(row + 1) - tile * 64 % BLOCK
        if ALONE:
            rows = tl.where(tl.load(row + 2) == 2, 0, rows)
    place = (tile * HEADS + head).to(tl.int64) * (64 * BLOCK_D)
    x = tl.load(SUMS + place + tl.arange(0, 64 * BLOCK_D), mask=rows > 0)
    # From [eighth, warp, row, column, half, of two] to [warp, half, row, eighth, column, of two].
    x = tl.permute(tl.reshape(x, [BLOCK_D // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [64, BLOCK_D]) * natural_scale
    r = tl.arange(0, 64)
    columns = tl.arange(0, BLOCK_D)
    place = ((first + r).to(tl.int64) * HEADS + head)[:, None] * DIM + columns[None, :]
    mask = (r < rows)[:, None] & (columns < DIM)[None, :]
    tl.store(DQ + place, x.to(DQ.dtype.element_ty), mask=mask)

"""The forward kernel in the stock Triton language: flash attention over packed samples.

Flash attention with an online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1). A program
computes one tile of queries of one sample and head. Tiles are sorted longest first
(`schedule.query_tiles`), and the hardware starts programs in order, so that short tiles fill the
gaps at the end. Blocks of keys that every query of the tile sees are worked off without a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem.attention.backends.triton_common import (
    key_ranges,
    load_rows,
    samples_rows,
    store_rows,
    visible,
)


@triton.jit
def _attend(
    q,
    k_base,
    v_base,
    k_row,
    v_row,
    j,
    keys,
    i,
    shift,
    left,
    right,
    scale,
    out,
    total,
    top,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    FULL: tl.constexpr,
):
    """One block of keys from j on: the softmax statistics and the output are brought up to date."""
    rows = tl.arange(0, BLOCK_K)
    k = load_rows(k_base + tl.cast(j, tl.int64) * k_row, rows, keys - j, k_row, DIM, BLOCK_D, FULL)
    s = tl.dot(q, tl.trans(k))
    if FULL:
        highest = (tl.min(s, 1) if FLIPPED else tl.max(s, 1)) * scale
        new_top = tl.maximum(top, highest)
        p = tl.math.exp2(s * scale - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
    else:
        seen = visible(i[:, None], (j + rows)[None, :], shift, left, right, HAS_LEFT, HAS_RIGHT)
        s = tl.where(seen & ((j + rows)[None, :] < keys), s * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is NaN
        p = tl.math.exp2(s - finite[:, None])
        shrink = tl.math.exp2(top - finite)
    total = total * shrink + tl.sum(p, 1)
    out = out * shrink[:, None]
    v = load_rows(v_base + tl.cast(j, tl.int64) * v_row, rows, keys - j, v_row, DIM, BLOCK_D, FULL)
    out = tl.dot(p.to(v.dtype), v, out)
    return out, total, new_top


@triton.jit(do_not_specialize=["left", "right", "queries"])
def forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    TILES,
    Q_OFFSETS,
    K_OFFSETS,
    scale,
    left,
    right,
    queries,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    FLIPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out and lse of the tile `TILES[program // HEADS]`, head `program % HEADS`.

    `scale` holds log2(e) too; FLIPPED says that it is negative. OUT `[rows, HEADS, DIM]` and LSE
    `[rows, HEADS]` are contiguous; the others have any strides but 1 between columns.
    """
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    sample = tl.load(TILES + 2 * tile)
    first_i = tl.load(TILES + 2 * tile + 1) * BLOCK_Q
    k_first, keys = samples_rows(K_OFFSETS, sample)
    if BROADCAST:
        q_first = tl.zeros([], tl.int64)
        out_first = sample.to(tl.int64) * queries
    else:
        q_first, queries = samples_rows(Q_OFFSETS, sample)
        out_first = q_first
    shift = keys - queries
    rows = tl.arange(0, BLOCK_Q)
    i = first_i + rows
    q_base = Q + (q_first + first_i) * q_row + head * q_head
    q = load_rows(q_base, rows, queries - first_i, q_row, DIM, BLOCK_D, False)
    k_base = K + k_first * k_row + (head // GROUP) * k_head
    v_base = V + k_first * v_row + (head // GROUP) * v_head

    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    last_i = tl.minimum(first_i + BLOCK_Q, queries) - 1
    begin, full_begin, full_end, end = key_ranges(
        first_i, last_i, shift, keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        for j in tl.range(begin, full_begin, BLOCK_K, num_stages=1):
            out, total, top = _attend(
                q, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right, scale, out, total,
                top, DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, FLIPPED, False,
            )  # fmt: skip
    for j in tl.range(full_begin, full_end, BLOCK_K, num_stages=STAGES):
        out, total, top = _attend(
            q, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right, scale, out, total, top,
            DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, FLIPPED, True,
        )  # fmt: skip
    for j in tl.range(full_end, end, BLOCK_K, num_stages=1):
        out, total, top = _attend(
            q, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right, scale, out, total, top,
            DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, FLIPPED, False,
        )  # fmt: skip

    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    out_base = OUT + ((out_first + first_i) * HEADS + head) * DIM
    store_rows(out_base, rows, queries - first_i, HEADS * DIM, out, DIM, BLOCK_D)
    # log2(0) is -inf: the log-sum-exp of a query that sees nothing
    lse = (top + tl.math.log2(total)) * 0.6931471805599453
    lse = tl.where(total == 0.0, -float("inf"), lse)
    tl.store(LSE + (out_first + i) * HEADS + head, lse, mask=rows < queries - first_i)

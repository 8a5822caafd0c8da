"""The backward kernels in the stock Triton language.

FlashAttention-2 (arXiv 2307.08691, algorithm 2) with its two halves as kernels of their own, so
that no gradient is added to by two programs and every result has a fixed order of sums:

- `prepare_kernel`: per query delta = sum(dout * out) - dlse, and the log-sum-exp in base 2;
- `keys_kernel`: dK and dV of a block of keys, a loop over the queries that see it;
- `queries_kernel`: dQ of a tile of queries, a loop over the keys that it sees;
- `shared_queries_kernel`: all three gradients of broadcast attention with few queries, whose tile
  and dQ stay on the chip while a program walks over keys of many samples;
- `sum_kernel`: the float32 partial dQ of broadcast attention, summed in a fixed order.

Scores and their gradients are computed transposed, keys by queries, wherever dK and dV come next:
a product's result can be the left operand of the next product, but not transposed.
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


@triton.jit(do_not_specialize=["rows", "queries"])
def prepare_kernel(
    OUT,
    DOUT,
    LSE,
    DLSE,
    DELTA,
    LSE2,
    rows,
    queries,
    do_sample,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """DELTA and LSE2 `[HEADS, rows]`; LSE2 is +inf where a query sees nothing, so that exp is 0.

    Row r of the output is query `r % queries` of sample `r // queries`.
    """
    head = tl.program_id(1)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = r < rows
    columns = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (columns[None, :] < DIM)
    r64 = r.to(tl.int64)
    out = tl.load(
        OUT + (r64 * HEADS + head)[:, None] * DIM + columns[None, :], mask=mask, other=0.0
    )
    place = (r64 // queries) * do_sample + (r64 % queries) * do_row + head * do_head
    dout = tl.load(DOUT + place[:, None] + columns[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + r64 * HEADS + head, mask=ok, other=0.0)
    lse = tl.load(LSE + r64 * HEADS + head, mask=ok, other=0.0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
    to = head * rows.to(tl.int64) + r64
    tl.store(DELTA + to, delta, mask=ok)
    tl.store(LSE2 + to, lse, mask=ok)


@triton.jit
def _probabilities(s, lse, scale):
    """exp2 of scaled scores minus the log-sum-exp; at most 1, whatever rounding does to them."""
    return tl.math.exp2(tl.minimum(s * scale - lse, 0.0))


@triton.jit(do_not_specialize=["left", "right", "queries", "rows"])
def keys_kernel(
    Q,
    K,
    V,
    DOUT,
    DELTA,
    LSE2,
    DK,
    DV,
    TILES,
    Q_OFFSETS,
    K_OFFSETS,
    scale,
    natural_scale,
    left,
    right,
    queries,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_sample,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of the block `TILES[program // KV_HEADS]`, key head `program % KV_HEADS`.

    The loop runs over the query heads of the key head and, for each, over the tiles of queries that
    see the block. Loads past the last query give 0 and a log-sum-exp of +inf: no probability.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    sample = tl.load(TILES + 2 * tile)
    first_j = tl.load(TILES + 2 * tile + 1) * BLOCK_K
    k_first, keys = samples_rows(K_OFFSETS, sample)
    if BROADCAST:
        q_base = Q
        do_base = DOUT + sample.to(tl.int64) * do_sample
        stats = sample.to(tl.int64) * queries
    else:
        stats, queries = samples_rows(Q_OFFSETS, sample)
        q_base = Q + stats * q_row
        do_base = DOUT + stats * do_row
    shift = keys - queries
    j_rows = tl.arange(0, BLOCK_K)
    i_rows = tl.arange(0, BLOCK_Q)
    j = first_j + j_rows
    k_first += first_j
    k = load_rows(
        K + k_first * k_row + kv_head * k_head, j_rows, keys - first_j, k_row, DIM, BLOCK_D, False
    )
    v = load_rows(
        V + k_first * v_row + kv_head * v_head, j_rows, keys - first_j, v_row, DIM, BLOCK_D, False
    )
    begin = 0
    end = queries
    if HAS_RIGHT:
        begin = tl.maximum(first_j - shift - right, 0)
    if HAS_LEFT:
        end = tl.minimum(tl.minimum(first_j + BLOCK_K, keys) - shift + left, queries)
    per_head = tl.maximum(end - begin + BLOCK_Q - 1, 0) // BLOCK_Q

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for step in tl.range(0, GROUP * per_head, num_stages=STAGES):
        if GROUP == 1:
            head = kv_head
            i = begin + step * BLOCK_Q
        else:
            head = kv_head * GROUP + step // per_head
            i = begin + step % per_head * BLOCK_Q
        i64 = tl.cast(i, tl.int64)
        q = load_rows(
            q_base + i64 * q_row + head * q_head, i_rows, queries - i, q_row, DIM, BLOCK_D, False
        )
        there = i_rows < queries - i
        stat = head * rows.to(tl.int64) + stats + i
        lse = tl.load(LSE2 + stat + i_rows, mask=there, other=float("inf"))
        s = tl.dot(k, tl.trans(q))
        p = _probabilities(s, lse[None, :], scale)
        if HAS_LEFT or HAS_RIGHT:
            seen = visible(
                (i + i_rows)[None, :], j[:, None], shift, left, right, HAS_LEFT, HAS_RIGHT
            )
            p = tl.where(seen, p, 0.0)
        do = load_rows(
            do_base + i64 * do_row + head * do_head,
            i_rows,
            queries - i,
            do_row,
            DIM,
            BLOCK_D,
            False,
        )
        dv = tl.dot(p.to(do.dtype), do, dv)
        delta = tl.load(DELTA + stat + i_rows, mask=there, other=0.0)
        dp = tl.dot(v, tl.trans(do))
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    to = (k_first * KV_HEADS + kv_head) * DIM
    store_rows(DV + to, j_rows, keys - first_j, KV_HEADS * DIM, dv, DIM, BLOCK_D)
    store_rows(DK + to, j_rows, keys - first_j, KV_HEADS * DIM, dk * natural_scale, DIM, BLOCK_D)


@triton.jit
def _add_to_dq(
    dq,
    q,
    do,
    lse,
    delta,
    k_base,
    v_base,
    k_row,
    v_row,
    j,
    end,
    i,
    shift,
    left,
    right,
    scale,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    FULL: tl.constexpr,
):
    """dq with the share of one block of keys; keys from `end` on read as 0 and add nothing."""
    rows = tl.arange(0, BLOCK_K)
    j64 = tl.cast(j, tl.int64)
    k = load_rows(k_base + j64 * k_row, rows, end - j, k_row, DIM, BLOCK_D, FULL)
    v = load_rows(v_base + j64 * v_row, rows, end - j, v_row, DIM, BLOCK_D, FULL)
    p = _probabilities(tl.dot(q, tl.trans(k)), lse[:, None], scale)
    if not FULL and (HAS_LEFT or HAS_RIGHT):
        seen = visible(i[:, None], (j + rows)[None, :], shift, left, right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _load_statistics(LSE2, DELTA, place, rows, count):
    """(log-sum-exp, delta) of queries; +inf and 0 from row `count` on."""
    lse = tl.load(LSE2 + place + rows, mask=rows < count, other=float("inf"))
    return lse, tl.load(DELTA + place + rows, mask=rows < count, other=0.0)


@triton.jit(do_not_specialize=["left", "right", "rows"])
def queries_kernel(
    Q,
    K,
    V,
    DOUT,
    DELTA,
    LSE2,
    DQ,
    TILES,
    Q_OFFSETS,
    K_OFFSETS,
    scale,
    natural_scale,
    left,
    right,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of the tile `TILES[program // HEADS]`, head `program % HEADS`, of jagged attention."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    sample = tl.load(TILES + 2 * tile)
    first_i = tl.load(TILES + 2 * tile + 1) * BLOCK_Q
    k_first, keys = samples_rows(K_OFFSETS, sample)
    q_first, queries = samples_rows(Q_OFFSETS, sample)
    q_first += first_i
    shift = keys - queries
    i_rows = tl.arange(0, BLOCK_Q)
    count = queries - first_i
    i = first_i + i_rows
    q = load_rows(Q + q_first * q_row + head * q_head, i_rows, count, q_row, DIM, BLOCK_D, False)
    do = load_rows(
        DOUT + q_first * do_row + head * do_head, i_rows, count, do_row, DIM, BLOCK_D, False
    )
    place = head * rows.to(tl.int64) + q_first
    lse, delta = _load_statistics(LSE2, DELTA, place, i_rows, count)
    k_base = K + k_first * k_row + (head // GROUP) * k_head
    v_base = V + k_first * v_row + (head // GROUP) * v_head
    last_i = tl.minimum(first_i + BLOCK_Q, queries) - 1
    begin, full_begin, full_end, end = key_ranges(
        first_i, last_i, shift, keys, left, right, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if HAS_LEFT:
        for j in tl.range(begin, full_begin, BLOCK_K, num_stages=1):
            dq = _add_to_dq(
                dq, q, do, lse, delta, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right,
                scale, DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
            )  # fmt: skip
    for j in tl.range(full_begin, full_end, BLOCK_K, num_stages=STAGES):
        dq = _add_to_dq(
            dq, q, do, lse, delta, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right,
            scale, DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, True,
        )  # fmt: skip
    for j in tl.range(full_end, end, BLOCK_K, num_stages=1):
        dq = _add_to_dq(
            dq, q, do, lse, delta, k_base, v_base, k_row, v_row, j, keys, i, shift, left, right,
            scale, DIM, BLOCK_K, BLOCK_D, HAS_LEFT, HAS_RIGHT, False,
        )  # fmt: skip
    to = (q_first * HEADS + head) * DIM
    store_rows(DQ + to, i_rows, count, HEADS * DIM, dq * natural_scale, DIM, BLOCK_D)


@triton.jit
def _segment(SEGMENTS, turn, worker, workers):
    """(sample, first key, end of keys) of a worker's turn: odd rounds deal in reverse order."""
    place = tl.where(turn % 2 == 0, worker, workers - 1 - worker)
    at = SEGMENTS + 3 * (turn * workers + place)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit(do_not_specialize=["queries", "rows", "turns", "workers"])
def partial_queries_kernel(
    Q,
    K,
    V,
    DOUT,
    DELTA,
    LSE2,
    PARTIAL,
    SEGMENTS,
    K_OFFSETS,
    scale,
    queries,
    rows,
    turns,
    workers,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_sample,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The share of a worker's segments of keys in dQ of broadcast attention, one tile and head.

    PARTIAL is float32 `[workers, queries, HEADS, DIM]`, before the scale. Grid: (HEADS, tiles of
    queries, workers).
    """
    head = tl.program_id(0)
    first_i = tl.program_id(1) * BLOCK_Q
    worker = tl.program_id(2)
    i_rows = tl.arange(0, BLOCK_Q)
    count = queries - first_i
    q = load_rows(Q + first_i * q_row + head * q_head, i_rows, count, q_row, DIM, BLOCK_D, False)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for turn in tl.range(0, turns, num_stages=1):
        sample, begin, end = _segment(SEGMENTS, turn, worker, workers)
        sample64 = sample.to(tl.int64)
        k_first = tl.load(K_OFFSETS + sample).to(tl.int64)
        do_base = DOUT + sample64 * do_sample + first_i * do_row + head * do_head
        do = load_rows(do_base, i_rows, count, do_row, DIM, BLOCK_D, False)
        place = head * rows.to(tl.int64) + sample64 * queries + first_i
        lse, delta = _load_statistics(LSE2, DELTA, place, i_rows, count)
        k_base = K + k_first * k_row + (head // GROUP) * k_head
        v_base = V + k_first * v_row + (head // GROUP) * v_head
        for j in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            dq = _add_to_dq(
                dq, q, do, lse, delta, k_base, v_base, k_row, v_row, j, end, i_rows, 0, 0, 0,
                scale, DIM, BLOCK_K, BLOCK_D, False, False, False,
            )  # fmt: skip
    to = ((worker.to(tl.int64) * queries + first_i) * HEADS + head) * DIM
    store_rows(PARTIAL + to, i_rows, count, HEADS * DIM, dq, DIM, BLOCK_D)


@triton.jit(do_not_specialize=["queries", "rows", "turns", "workers"])
def shared_queries_kernel(
    Q,
    K,
    V,
    DOUT,
    DELTA,
    LSE2,
    DK,
    DV,
    PARTIAL,
    SEGMENTS,
    K_OFFSETS,
    scale,
    natural_scale,
    queries,
    rows,
    turns,
    workers,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_sample,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK, dV and a worker's share of dQ of broadcast attention, whose queries fill one tile.

    All queries are at hand, so that dK and dV of a block of keys are complete at once. dQ is kept
    transposed `[BLOCK_D, BLOCK_Q]`: then the gradient of the scores is a right operand, and no
    product's result needs to be transposed. PARTIAL is float32 `[workers, queries, HEADS, DIM]`.
    Grid: (HEADS, workers).
    """
    head = tl.program_id(0)
    worker = tl.program_id(1)
    i_rows = tl.arange(0, BLOCK_Q)
    j_rows = tl.arange(0, BLOCK_K)
    q = load_rows(Q + head * q_head, i_rows, queries, q_row, DIM, BLOCK_D, False)
    dq = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
    for turn in tl.range(0, turns, num_stages=1):
        sample, begin, end = _segment(SEGMENTS, turn, worker, workers)
        sample64 = sample.to(tl.int64)
        k_first = tl.load(K_OFFSETS + sample).to(tl.int64)
        do_base = DOUT + sample64 * do_sample + head * do_head
        do = load_rows(do_base, i_rows, queries, do_row, DIM, BLOCK_D, False)
        place = head * rows.to(tl.int64) + sample64 * queries
        lse, delta = _load_statistics(LSE2, DELTA, place, i_rows, queries)
        for j in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            row = k_first + j
            k_base = K + row * k_row + head * k_head
            v_base = V + row * v_row + head * v_head
            k = load_rows(k_base, j_rows, end - j, k_row, DIM, BLOCK_D, False)
            v = load_rows(v_base, j_rows, end - j, v_row, DIM, BLOCK_D, False)
            p = _probabilities(tl.dot(k, tl.trans(q)), lse[None, :], scale)
            dp = tl.dot(v, tl.trans(do))
            dv = tl.dot(p.to(do.dtype), do)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q) * natural_scale
            dq = tl.dot(tl.trans(k), ds, dq)
            to = (row * HEADS + head) * DIM
            store_rows(DV + to, j_rows, end - j, HEADS * DIM, dv, DIM, BLOCK_D)
            store_rows(DK + to, j_rows, end - j, HEADS * DIM, dk, DIM, BLOCK_D)
    columns = tl.arange(0, BLOCK_D)
    to = ((worker.to(tl.int64) * queries + i_rows[None, :]) * HEADS + head) * DIM + columns[:, None]
    tl.store(PARTIAL + to, dq, mask=(i_rows[None, :] < queries) & (columns[:, None] < DIM))


@triton.jit(do_not_specialize=["workers"])  # a size that 16 divides lets loads be wide
def sum_kernel(
    PARTIAL, DQ, natural_scale, workers, size, BLOCK: tl.constexpr, WORKERS: tl.constexpr
):
    """DQ `[size]` from PARTIAL float32 `[workers, size]`, added in an order that is fixed.

    WORKERS are read at once: there are few programs, and what they wait for is memory.
    """
    x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([WORKERS, BLOCK], tl.float32)
    for first in tl.range(0, workers, WORKERS):
        worker = first + tl.arange(0, WORKERS)
        place = worker.to(tl.int64)[:, None] * size + x[None, :]
        mask = (worker < workers)[:, None] & (x < size)[None, :]
        total += tl.load(PARTIAL + place, mask=mask, other=0.0)
    total = tl.sum(total, 0) * natural_scale
    tl.store(DQ + x, total.to(DQ.dtype.element_ty), mask=x < size)

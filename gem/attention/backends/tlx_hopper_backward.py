"""The backward kernel for Hopper (sm_90a) in TLX: warp-specialised, persistent, keys stationary.

A CTA walks its share of the tiles of 128 keys (`schedule.dealt_keys`). Each of its two consumers
has 64 of the keys, with their dK and dV in registers. Queries and dout stream by; for 64 (at dim
64, two times 64) of them at a time:

    S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta)
    dV += P^T dO, dK += dS^T Q, with P^T and dS^T from registers
    dQ += dS K, over all 128 keys: dS goes through shared memory, and each consumer computes a half

(FlashAttention-2, arXiv 2307.08691, algorithm 2). A step's share of dQ leaves by a TMA copy that
adds to float32 sums in global memory. The order of these additions is not fixed; without WITH_DQ
there are none, and a kernel that keeps queries computes dQ.

The keys of the next tile are copied while this one runs, and its values as soon as this one's last
dP is known; dK and dV leave through shared memory while the next tile begins. Rows past a sample's
end read as 0 and are never written (`tlx_common.ragged`), so that no step needs a mask but for
windows: the log-sum-exp of queries that are not there is +inf, and keys that are not there add 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import (
    copy_rows,
    dealt_place,
    dealt_turns,
    store_rows,
    store_sums,
)


@triton.jit(do_not_specialize=["stats"])
def statistics_kernel(
    OUT,
    DOUT,
    LSE,
    DLSE,
    DELTA,
    LSE2,
    TILES,
    stats,
    do_row,
    do_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """DELTA and LSE2 `[HEADS, stats]`, each sample's from a multiple of BLOCK on.

    TILES has (first row, rows) of each BLOCK of statistics. delta = sum(dout * out) - dlse, and the
    log-sum-exp is in base 2. It is +inf, so that exp gives 0, where a query sees nothing or is not
    there; then delta is 0.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(TILES + 2 * tile).to(tl.int64)
    there = tl.arange(0, BLOCK) < tl.load(TILES + 2 * tile + 1)
    r = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (columns < DIM)[None, :]
    out = tl.load(OUT + (r * HEADS + head)[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
    place = (r * do_row + head * do_head)[:, None]
    dout = tl.load(DOUT + place + columns[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + r * HEADS + head, mask=there, other=0.0)
    lse = tl.load(LSE + r * HEADS + head, mask=there, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
    to = head.to(tl.int64) * stats + tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(DELTA + to, delta)
    tl.store(LSE2 + to, lse)


@triton.jit
def _row(TILES, turn):
    """The table's row of a turn."""
    return TILES + (turn * tl.num_programs(0) + dealt_place(turn, 1)) * 9


@triton.jit
def _keys(row):
    """(first row, number) of the sample's keys, (first key, head) of the tile."""
    return tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)


@triton.jit
def _queries(row):
    """(first row, number) of the sample's queries, first of their statistics, (begin, end) seen."""
    return (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 8),
        tl.load(row + 2),
        tl.load(row + 3),
    )


@triton.jit
def _probabilities(s, lse, begin, end, scale, EDGES: tl.constexpr):
    """P^T of scores `[64 keys, 64 queries]`: at most 1, whatever rounding does to the scores.

    EDGES: 1, with the queries before begin 0, 2, with those from end on, 3 for both; begin and end
    are `[64]` for each key, counted from the tile's first query.
    """
    p = tl.math.exp2(tl.minimum(s * scale - lse[None, :], 0.0))
    i = tl.arange(0, 64)[None, :]
    if EDGES % 2 == 1:
        p = tl.where(i >= begin[:, None], p, 0.0)
    if EDGES >= 2:
        p = tl.where(i < end[:, None], p, 0.0)
    return p


@triton.jit
def _step(
    k_tiles,
    v_tile,
    v_empty,
    q_tiles,
    do_tiles,
    lse_tiles,
    delta_tiles,
    at,
    q_full,
    q_phase,
    q_empty,
    ds_tiles,
    ds_at,
    dq_tile,
    desc_dq,
    dq_first,
    queries,
    m,
    head,
    dk,
    dv,
    begin,
    end,
    last,
    scale,
    cid: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(dk, dv) after one or two tiles of 64 queries; `last`: the values are not needed again."""
    tlx.barrier_wait(q_full, q_phase)
    s0 = tlx.async_dot(k_tiles[cid], tlx.local_trans(q_tiles[at]))
    dp0 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at]))
    if TILES == 2:
        s1 = tlx.async_dot(k_tiles[cid], tlx.local_trans(q_tiles[at + 1]))
        dp1 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at + 1]))
    s0 = tlx.async_dot_wait(2 * TILES - 1, s0)
    p0 = _probabilities(s0, tlx.local_load(lse_tiles[at]), begin, end, scale, EDGES)
    dp0 = tlx.async_dot_wait(2 * TILES - 2, dp0)
    if TILES == 1:
        tlx.barrier_arrive(v_empty, pred=last)
    ds0 = (p0 * (dp0 - tlx.local_load(delta_tiles[at])[None, :])).to(DTYPE)
    if WITH_DQ:
        tlx.local_store(ds_tiles[ds_at + cid], ds0)
        if TILES == 1:
            tlx.fence("async_shared")
    dv = tlx.async_dot(p0.to(DTYPE), do_tiles[at], dv)
    dk = tlx.async_dot(ds0, q_tiles[at], dk)
    if TILES == 2:
        s1 = tlx.async_dot_wait(3, s1)
        lse1 = tlx.local_load(lse_tiles[at + 1])
        p1 = _probabilities(s1, lse1, begin - 64, end - 64, scale, EDGES)
        dp1 = tlx.async_dot_wait(2, dp1)
        tlx.barrier_arrive(v_empty, pred=last)
        ds1 = (p1 * (dp1 - tlx.local_load(delta_tiles[at + 1])[None, :])).to(DTYPE)
        if WITH_DQ:
            tlx.local_store(ds_tiles[ds_at + 2 + cid], ds1)
            tlx.fence("async_shared")
        dv = tlx.async_dot(p1.to(DTYPE), do_tiles[at + 1], dv)
        dk = tlx.async_dot(ds1, q_tiles[at + 1], dk)
    if WITH_DQ:
        tlx.named_barrier_wait(9, 256)  # both have written dS
        if TILES == 2:  # one tile of queries for each consumer
            ds_at += 2 * cid
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at]), k_tiles[0])
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at + 1]), k_tiles[1], dq)
            m += 64 * cid
            column = 0
        else:  # one half of the columns for each
            HALF: tl.constexpr = BLOCK_D // 2
            column = HALF * cid
            k0 = tlx.local_slice(k_tiles[0], [0, HALF * cid], [64, HALF])
            k1 = tlx.local_slice(k_tiles[1], [0, HALF * cid], [64, HALF])
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at]), k0)
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at + 1]), k1, dq)
        dv = tlx.async_dot_wait(2, dv)
        dk = tlx.async_dot_wait(2, dk)
        tlx.barrier_arrive(q_empty)
        dq = tlx.async_dot_wait(0, dq)
        tlx.async_descriptor_store_wait(0)  # the copy before has left its stage
        tlx.local_store(dq_tile, dq)
        tlx.fence("async_shared")
        store_sums(desc_dq, dq_tile, dq_first, queries, m, head, column)
    else:
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_empty)
    return dk, dv


@triton.jit
def _steps(
    x_begin,
    x_end,
    x_last,
    k_tiles,
    v_tile,
    v_empty,
    q_tiles,
    do_tiles,
    lse_tiles,
    delta_tiles,
    q_full,
    q_empty,
    ds_tiles,
    dq_tile,
    desc_dq,
    dq_first,
    keys,
    queries,
    q_begin,
    head,
    j,
    dk,
    dv,
    count,
    left,
    right,
    scale,
    cid: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_STAGES: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(dk, dv, count) after a head's steps from x_begin to x_end; x_last is the tile's last."""
    for x in tl.range(x_begin, x_end):
        m = q_begin + x * (64 * TILES)
        # The queries that see key j are those from j - shift - right to j - shift + left.
        begin = j - (keys - queries) - m - right
        end = j - (keys - queries) - m + left + 1
        st = count % Q_STAGES
        dk, dv = _step(
            k_tiles, v_tile, v_empty, q_tiles, do_tiles, lse_tiles, delta_tiles, TILES * st,
            q_full[st], (count // Q_STAGES) & 1, q_empty[st], ds_tiles, 2 * TILES * (count % 2),
            dq_tile, desc_dq, dq_first, queries, m, head, dk, dv, begin, end, x == x_last, scale,
            cid, TILES, BLOCK_D, EDGES, WITH_DQ, DTYPE,
        )  # fmt: skip
        count += 1
    return dk, dv, count


@triton.jit(do_not_specialize=["tiles", "stats", "left", "right"])
def hopper_backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dk,
    desc_dv,
    desc_dq,
    LSE2,
    DELTA,
    TILES,
    tiles,
    stats,
    scale,
    natural_scale,
    left,
    right,
    GROUP: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    """dk and dv of all tiles and, unless WITH_DQ is off, dq added to float32 sums that begin as 0.

    Grid: as many CTAs as run at once. Every tile of keys is seen by a query. `scale` holds log2(e)
    too. dq's sums are still to be multiplied by the scale.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    K_STAGES: tl.constexpr = 2
    Q_STAGES: tl.constexpr = 2
    Q_TILES: tl.constexpr = 128 // BLOCK_D  # of 64 queries, in a step
    BLOCK_Q: tl.constexpr = 64 * Q_TILES
    TILE_BYTES: tl.constexpr = 64 * BLOCK_D * 2
    Q_BYTES: tl.constexpr = 2 * Q_TILES * (TILE_BYTES + 256)
    k_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * K_STAGES)
    v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    q_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, Q_TILES * Q_STAGES)
    do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, Q_TILES * Q_STAGES)
    lse_tiles = tlx.local_alloc((64,), tl.float32, Q_TILES * Q_STAGES)
    delta_tiles = tlx.local_alloc((64,), tl.float32, Q_TILES * Q_STAGES)
    ds_tiles = tlx.local_alloc((64, 64), DTYPE, 4 * Q_TILES)  # [step % 2, tile, consumer]
    dq_tiles = tlx.local_alloc((64, 64), tl.float32, 2)
    # dV leaves through the stages of dQ; Q_TILES of its tiles fit into one.
    dv_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * Q_TILES, reuse=dq_tiles)
    k_full = tlx.alloc_barriers(K_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(K_STAGES, 4, 2)
    v_full = tlx.alloc_barriers(1, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(1, 4, 2)
    q_full = tlx.alloc_barriers(Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(Q_STAGES, 4, 2)
    turns = dealt_turns(tiles, 1)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            count = 0
            for turn in tl.range(0, turns):
                row = _row(TILES, turn)
                k_first, keys, first_j, kv_head = _keys(row)
                out_first, queries, stats_first, q_begin, q_end = _queries(row)
                q_first = 0 if BROADCAST else out_first
                ks = turn % K_STAGES
                tlx.barrier_wait(k_empty[ks], ((turn // K_STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(k_full[ks], 2 * TILE_BYTES)
                for c in tl.static_range(2):
                    j = first_j + 64 * c
                    copy_rows(desc_k, k_tiles[2 * ks + c], k_full[ks], k_first, keys, j, kv_head)
                for g in tl.range(0, GROUP):
                    head = kv_head * GROUP + g
                    for m in tl.range(q_begin, q_end, BLOCK_Q):
                        st = count % Q_STAGES
                        tlx.barrier_wait(q_empty[st], ((count // Q_STAGES) & 1) ^ 1)
                        tlx.barrier_expect_bytes(q_full[st], Q_BYTES)
                        for u in tl.static_range(Q_TILES):
                            at = Q_TILES * st + u
                            i = m + 64 * u
                            copy_rows(desc_q, q_tiles[at], q_full[st], q_first, queries, i, head)
                            copy_rows(
                                desc_do, do_tiles[at], q_full[st], out_first, queries, i, head
                            )
                            place = head.to(tl.int64) * stats + stats_first + i
                            tlx.async_load(
                                LSE2 + place, lse_tiles[at], bulk=True, bulk_size=256,
                                barrier=q_full[st],
                            )  # fmt: skip
                            tlx.async_load(
                                DELTA + place, delta_tiles[at], bulk=True, bulk_size=256,
                                barrier=q_full[st],
                            )  # fmt: skip
                        # The values' one stage becomes free later than that of these queries.
                        if (g == 0) & (m == q_begin):
                            tlx.barrier_wait(v_empty[0], (turn & 1) ^ 1)
                            tlx.barrier_expect_bytes(v_full[0], 2 * TILE_BYTES)
                            for c in tl.static_range(2):
                                j = first_j + 64 * c
                                copy_rows(desc_v, v_tiles[c], v_full[0], k_first, keys, j, kv_head)
                        count += 1

        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            count = 0
            for turn in tl.range(0, turns):
                row = _row(TILES, turn)
                k_first, keys, first_j, kv_head = _keys(row)
                out_first, queries, stats_first, q_begin, q_end = _queries(row)
                first_j += 64 * cid
                j = first_j + tl.arange(0, 64)
                dq_first = 0 if BROADCAST else out_first
                blocks = (q_end - q_begin + BLOCK_Q - 1) // BLOCK_Q
                # In steps before `inner` the window begins for some key, from `outer` on it ends.
                inner = 0
                outer = blocks
                if HAS_RIGHT:
                    edge = first_j + 63 - (keys - queries) - right - q_begin
                    inner = tl.minimum(tl.maximum(edge + BLOCK_Q - 1, 0) // BLOCK_Q, blocks)
                if HAS_LEFT:
                    edge = first_j - (keys - queries) + left + 1 - q_begin
                    outer = tl.minimum(tl.maximum(edge, 0) // BLOCK_Q, blocks)
                ks = 2 * (turn % K_STAGES)
                dk = tl.zeros([64, BLOCK_D], tl.float32)
                dv = tl.zeros([64, BLOCK_D], tl.float32)
                tlx.barrier_wait(k_full[turn % K_STAGES], (turn // K_STAGES) & 1)
                tlx.barrier_wait(v_full[0], turn & 1)
                k_pair = (k_tiles[ks], k_tiles[ks + 1])
                for g in tl.range(0, GROUP):
                    head = kv_head * GROUP + g
                    x_last = tl.where(g == GROUP - 1, blocks - 1, -1)
                    if HAS_RIGHT:
                        dk, dv, count = _steps(
                            0, tl.minimum(inner, outer), x_last, k_pair, v_tiles[cid], v_empty[0],
                            q_tiles, do_tiles, lse_tiles, delta_tiles, q_full, q_empty, ds_tiles,
                            dq_tiles[cid], desc_dq, dq_first, keys, queries, q_begin, head, j, dk,
                            dv, count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, 1,
                            WITH_DQ, DTYPE,
                        )  # fmt: skip
                    if HAS_LEFT and HAS_RIGHT:  # a window shorter than a tile
                        dk, dv, count = _steps(
                            outer, inner, x_last, k_pair, v_tiles[cid], v_empty[0], q_tiles,
                            do_tiles, lse_tiles, delta_tiles, q_full, q_empty, ds_tiles,
                            dq_tiles[cid], desc_dq, dq_first, keys, queries, q_begin, head, j, dk,
                            dv, count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, 3,
                            WITH_DQ, DTYPE,
                        )  # fmt: skip
                    dk, dv, count = _steps(
                        inner, outer, x_last, k_pair, v_tiles[cid], v_empty[0], q_tiles, do_tiles,
                        lse_tiles, delta_tiles, q_full, q_empty, ds_tiles, dq_tiles[cid], desc_dq,
                        dq_first, keys, queries, q_begin, head, j, dk, dv, count, left, right,
                        scale, cid, Q_TILES, BLOCK_D, Q_STAGES, 0, WITH_DQ, DTYPE,
                    )  # fmt: skip
                    if HAS_LEFT:
                        dk, dv, count = _steps(
                            tl.maximum(inner, outer), blocks, x_last, k_pair, v_tiles[cid],
                            v_empty[0], q_tiles, do_tiles, lse_tiles, delta_tiles, q_full, q_empty,
                            ds_tiles, dq_tiles[cid], desc_dq, dq_first, keys, queries, q_begin,
                            head, j, dk, dv, count, left, right, scale, cid, Q_TILES, BLOCK_D,
                            Q_STAGES, 2, WITH_DQ, DTYPE,
                        )  # fmt: skip
                if WITH_DQ:  # the other consumer's last dQ reads these keys too
                    tlx.named_barrier_wait(10, 256)
                tlx.local_store(k_tiles[ks + cid], (dk * natural_scale).to(DTYPE))
                tlx.fence("async_shared")
                store_rows(desc_dk, k_tiles[ks + cid], k_first, keys, first_j, kv_head)
                tlx.async_descriptor_store_wait(1)  # dQ's or dV's last copy has left its stage
                tlx.local_store(dv_tiles[Q_TILES * cid], dv.to(DTYPE))
                tlx.fence("async_shared")
                store_rows(desc_dv, dv_tiles[Q_TILES * cid], k_first, keys, first_j, kv_head)
                tlx.async_descriptor_store_wait(1)
                tlx.barrier_arrive(k_empty[turn % K_STAGES])
            tlx.async_descriptor_store_wait(0)

"""The backward kernel for Hopper (sm_90a) in TLX: warp-specialised, persistent, keys stationary.

CTAs take tiles of 128 keys (`schedule.dealt_keys`) from a counter, so that those which share
queries run at the same time and find them in the L2 cache. Each of two consumers has 64 of a tile's
keys, with their dK and dV in registers. Queries and dout stream by; for 64 (at dim 64, two times
64) of them at a time:

    S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta)
    dV += P^T dO, dK += dS^T Q, with P^T and dS^T from registers
    dQ += dS K, over all 128 keys: dS goes through shared memory

(FlashAttention-2, arXiv 2307.08691, algorithm 2). dQ of a tile of queries is one consumer's task,
in turns; only one of them waits for the other, so that they do not march in step and one has the
tensor cores while the other is in its softmax. At dim 64 each takes one of a step's two tiles. dQ
leaves by a TMA copy that adds to float32 sums in global memory (`tlx_backward_sums`). The order of
these additions is not fixed, but for whole samples, all of whose keys one CTA has: there the first
tile writes the sums, which need not be cleared, and the others wait for what went before. Without
WITH_DQ there are no additions, and a kernel that keeps queries computes dQ.

The keys of the next tile are copied while this one runs, and its values as soon as this one's last
dP is known; dK and dV leave through shared memory while the next tile begins. Rows past a sample's
end read as 0 and are never written (`tlx_common.ragged`), so that no step needs a mask but for
windows: the log-sum-exp of queries that are not there is +inf, and keys that are not there add 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_backward_sums import add_sums
from gem.attention.backends.tlx_common import (
    TILE_STAGES,
    answer,
    ask,
    copy_rows,
    dealt_place,
    hand_over,
    handed_over,
    store_columns,
    store_rows,
    wait_for_writes,
)


@triton.jit
def _unit(number, single, pairs):
    """(first row, rows) of what a CTA takes at a time, of `schedule.KeyTiles`."""
    pair = (number >= single) & (number < single + pairs)
    return number + tl.minimum(tl.maximum(number - single, 0), pairs), 1 + pair.to(tl.int32)


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
def _step_of_one(
    buffers,
    q_full,
    q_phase,
    q_empty,
    at,
    ds_at,
    desc_dq,
    dq_tile,
    dk,
    dv,
    begin,
    end,
    first,
    last,
    order,
    mine,
    scale,
    cid: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(dk, dv) after a tile of 64 queries.

    `first`: the stage of the keys before is free once this consumer's copies from there are done.
    `last`: the values are not needed after this step. `order`: as in `schedule.KeyTiles`. `mine`:
    dQ is this consumer's task.
    """
    k_tile, v_tile, q_tiles, do_tiles, lse_tiles, delta_tiles = buffers[:6]
    ds_tiles, ds_stages, dq_stages, v_empty, k_before = buffers[6:]
    keys = tlx.local_slice(k_tile, [64 * cid, 0], [64, BLOCK_D])
    tlx.barrier_wait(q_full, q_phase)
    if not EDGES:  # the load's time is that of the products
        lse = tlx.local_load(lse_tiles[at])
    s = tlx.async_dot(keys, tlx.local_trans(q_tiles[at]))
    dp = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at]))
    s = tlx.async_dot_wait(1, s)
    if EDGES:  # registers are short
        lse = tlx.local_load(lse_tiles[at])
    p = _probabilities(s, lse, begin, end, scale, EDGES)
    dv = tlx.async_dot(p.to(DTYPE), do_tiles[at], dv)
    dp = tlx.async_dot_wait(1, dp)
    tlx.barrier_arrive(v_empty, pred=last)
    ds = (p * (dp - tlx.local_load(delta_tiles[at])[None, :])).to(DTYPE)
    tlx.async_descriptor_store_wait(0)  # this consumer's copies before have left their stages
    if WITH_DQ:
        # Nobody adds before both consumers are here: they meet before every dQ.
        if order == 2:
            if first:
                wait_for_writes()
    tlx.barrier_arrive(k_before, pred=first)
    if WITH_DQ:
        tlx.local_store(ds_stages[2 * ds_at + cid], ds)
        tlx.fence("async_shared")
        if not mine:
            tlx.named_barrier_arrive(10 - cid, 256)
    dk = tlx.async_dot(ds, q_tiles[at], dk)
    dv = tlx.async_dot_wait(0, dv)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(q_empty)
    if WITH_DQ:
        if mine:
            tlx.named_barrier_wait(9 + cid, 256)  # the other has written its dS
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at]), k_tile)
            dq = tlx.async_dot_wait(0, dq)
            add_sums(dq, dq_stages[0], desc_dq, dq_tile, order == 1, BLOCK_D)
    return dk, dv


@triton.jit
def _step_of_two(
    buffers,
    q_full,
    q_phase,
    q_empty,
    at,
    ds_at,
    desc_dq,
    dq_tile,
    dk,
    dv,
    begin,
    end,
    first,
    last,
    order,
    scale,
    cid: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As `_step_of_one`, with two tiles of 64 queries; each consumer computes dQ of one."""
    k_tile, v_tile, q_tiles, do_tiles, lse_tiles, delta_tiles = buffers[:6]
    ds_tiles, ds_stages, dq_stages, v_empty, k_before = buffers[6:]
    keys = tlx.local_slice(k_tile, [64 * cid, 0], [64, BLOCK_D])
    tlx.barrier_wait(q_full, q_phase)
    if not EDGES:
        lse0 = tlx.local_load(lse_tiles[at])
    s0 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at]))
    dp0 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at]))
    s1 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at + 1]))
    dp1 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at + 1]))
    s0 = tlx.async_dot_wait(3, s0)
    if EDGES:
        lse0 = tlx.local_load(lse_tiles[at])
    else:
        delta0 = tlx.local_load(delta_tiles[at])
    p0 = _probabilities(s0, lse0, begin, end, scale, EDGES)
    dp0 = tlx.async_dot_wait(2, dp0)
    if EDGES:
        delta0 = tlx.local_load(delta_tiles[at])
    ds0 = (p0 * (dp0 - delta0[None, :])).to(DTYPE)
    tlx.async_descriptor_store_wait(0)
    if WITH_DQ:
        if order == 2:
            if first:
                wait_for_writes()
    tlx.barrier_arrive(k_before, pred=first)
    if WITH_DQ:
        tlx.local_store(ds_stages[2 * ds_at + cid], ds0)
    dv = tlx.async_dot(p0.to(DTYPE), do_tiles[at], dv)
    dk = tlx.async_dot(ds0, q_tiles[at], dk)
    s1 = tlx.async_dot_wait(3, s1)
    lse1 = tlx.local_load(lse_tiles[at + 1])
    p1 = _probabilities(s1, lse1, begin - 64, end - 64, scale, EDGES)
    dp1 = tlx.async_dot_wait(2, dp1)
    tlx.barrier_arrive(v_empty, pred=last)
    ds1 = (p1 * (dp1 - tlx.local_load(delta_tiles[at + 1])[None, :])).to(DTYPE)
    if WITH_DQ:
        tlx.local_store(ds_stages[2 * ds_at + 2 + cid], ds1)
        tlx.fence("async_shared")
    dv = tlx.async_dot(p1.to(DTYPE), do_tiles[at + 1], dv)
    dk = tlx.async_dot(ds1, q_tiles[at + 1], dk)
    if WITH_DQ:
        tlx.named_barrier_wait(9, 256)  # both have written dS
        dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at + cid]), k_tile)
        dv = tlx.async_dot_wait(1, dv)
        dk = tlx.async_dot_wait(1, dk)
        tlx.barrier_arrive(q_empty)
        dq = tlx.async_dot_wait(0, dq)
        add_sums(dq, dq_stages[cid], desc_dq, dq_tile + HEADS * cid, order == 1, BLOCK_D)
    else:
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_empty)
    return dk, dv


@triton.jit
def _steps(
    x_begin,
    x_end,
    x_first,
    x_last,
    order,
    buffers,
    desc_dq,
    dq_tile,
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
    HEADS: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(dk, dv, count) after a head's steps from x_begin to x_end.

    x_first and x_last are the tile's, or -1 where they are another head's. dq_tile is that of
    step 0; j are the keys, counted from the first query of step 0.
    """
    q_full, q_empty = buffers[-2:]
    for x in tl.range(x_begin, x_end):
        st = count % Q_STAGES
        # The queries that see key j are those from j - right to j + left.
        begin = j - x * (64 * TILES) - right
        end = j - x * (64 * TILES) + left + 1
        phase, tile = (count // Q_STAGES) & 1, dq_tile + x * (TILES * HEADS)
        if TILES == 1:
            dk, dv = _step_of_one(
                buffers[:-2], q_full[st], phase, q_empty[st], st, count % 2, desc_dq, tile, dk, dv,
                begin, end, x == x_first, x == x_last, order, count % 2 == cid, scale, cid, BLOCK_D,
                EDGES, WITH_DQ, DTYPE,
            )  # fmt: skip
        else:
            dk, dv = _step_of_two(
                buffers[:-2], q_full[st], phase, q_empty[st], 2 * st, 2 * (count % 2), desc_dq,
                tile, dk, dv, begin, end, x == x_first, x == x_last, order, scale, cid, BLOCK_D,
                HEADS, EDGES, WITH_DQ, DTYPE,
            )  # fmt: skip
        count += 1
    return dk, dv, count


@triton.jit
def _steps_without_keys(
    x_begin,
    x_end,
    x_first,
    x_last,
    order,
    buffers,
    desc_dq,
    dq_tile,
    count,
    cid: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The count after steps of a consumer whose keys are past the sample's end.

    It keeps to all barriers and takes its turns at dQ, to which its own dS adds 0.
    """
    k_tile, ds_tiles = buffers[0], buffers[6]
    ds_stages, dq_stages, v_empty, k_before, q_full, q_empty = buffers[7:]
    for x in tl.range(x_begin, x_end):
        st = count % Q_STAGES
        ds_at = TILES * (count % 2)
        tile = dq_tile + x * (TILES * HEADS)
        tlx.barrier_wait(q_full[st], (count // Q_STAGES) & 1)
        tlx.barrier_arrive(v_empty, pred=x == x_last)
        tlx.async_descriptor_store_wait(0)
        if WITH_DQ:
            if order == 2:
                if x == x_first:
                    wait_for_writes()
        tlx.barrier_arrive(k_before, pred=x == x_first)
        tlx.barrier_arrive(q_empty[st])
        if WITH_DQ:
            for u in tl.static_range(TILES):
                tlx.local_store(ds_stages[2 * (ds_at + u) + cid], tl.zeros([64, 64], DTYPE))
            tlx.fence("async_shared")
            if TILES == 2:
                tlx.named_barrier_wait(9, 256)
                dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at + cid]), k_tile)
                dq = tlx.async_dot_wait(0, dq)
                add_sums(dq, dq_stages[cid], desc_dq, tile + HEADS * cid, order == 1, BLOCK_D)
            elif count % 2 == cid:
                tlx.named_barrier_wait(9 + cid, 256)
                dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at]), k_tile)
                dq = tlx.async_dot_wait(0, dq)
                add_sums(dq, dq_stages[0], desc_dq, tile, order == 1, BLOCK_D)
            else:
                tlx.named_barrier_arrive(10 - cid, 256)
        count += 1
    return count


@triton.jit(do_not_specialize=["single", "pairs", "units", "stats", "left", "right"])
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
    COUNTER,
    single,
    pairs,
    units,
    stats,
    scale,
    natural_scale,
    left,
    right,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    NARROW: tl.constexpr,
    BY_COUNTER: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    """dk and dv of all tiles and, unless WITH_DQ is off, dq added to float32 sums.

    TILES, single, pairs and units are those of `schedule.KeyTiles`; every tile is seen by a query.
    Grid: as many CTAs as run at once, at most one for each unit. COUNTER: int32, 0; without
    BY_COUNTER units are dealt in a zig-zag. `scale` holds log2(e) too. NARROW: a window may begin
    and end within one step. Sums begin as 0 but for whole samples; `dq_kernel` finishes them.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    K_STAGES: tl.constexpr = 2
    Q_STAGES: tl.constexpr = 2
    Q_TILES: tl.constexpr = 128 // BLOCK_D  # of 64 queries, in a step
    BLOCK_Q: tl.constexpr = 64 * Q_TILES
    TILE_BYTES: tl.constexpr = 64 * BLOCK_D * 2
    Q_BYTES: tl.constexpr = 2 * Q_TILES * (TILE_BYTES + 256)
    k_tiles = tlx.local_alloc((128, BLOCK_D), DTYPE, K_STAGES)
    v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    q_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, Q_TILES * Q_STAGES)
    do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, Q_TILES * Q_STAGES)
    lse_tiles = tlx.local_alloc((64,), tl.float32, Q_TILES * Q_STAGES)
    delta_tiles = tlx.local_alloc((64,), tl.float32, Q_TILES * Q_STAGES)
    ds_tiles = tlx.local_alloc((128, 64), DTYPE, 2 * Q_TILES)  # [step % 2, tile]
    # What threads write is written through names of its own: where a product reads a buffer by the
    # name by which threads write it, the compiler puts another fence before every such product.
    ds_stages = tlx.local_alloc((64, 64), DTYPE, 4 * Q_TILES, reuse=ds_tiles)
    dk_stages = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * K_STAGES, reuse=k_tiles)
    if WITH_DQ:
        dq_stages = tlx.local_alloc((2 * BLOCK_D, 32), tl.float32, Q_TILES)
    else:  # not used
        dq_stages = ds_stages
    k_full = tlx.alloc_barriers(K_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(K_STAGES, 4, 2)
    v_full = tlx.alloc_barriers(1, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(1, 4, 2)
    q_full = tlx.alloc_barriers(Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(Q_STAGES, 4, 2)
    numbers = tlx.local_alloc((1,), tl.int32, TILE_STAGES)
    number_full = tlx.alloc_warp_barrier(TILE_STAGES, 4)
    number_empty = tlx.alloc_warp_barrier(TILE_STAGES, 4, 2)
    # Named barriers: at 9 + cid a consumer waits for the other's dS, at 11 + cid for its last dQ.

    with tlx.async_tasks():
        with tlx.async_task("default"):
            count = 0
            tile = 0
            number = tl.program_id(0)
            if BY_COUNTER:
                taken = ask(COUNTER, True, 1)
            turn = 0
            while number >= 0:
                first_row, rows = _unit(number, single, pairs)
                if BY_COUNTER:
                    number = answer(taken, 1)
                    taken = ask(COUNTER, True, 1)
                else:
                    turn += 1
                    number = turn * tl.num_programs(0) + dealt_place(turn, 1)
                number = tl.where(number < units, number, -1)
                next_row, _ = _unit(number, single, pairs)
                for r in tl.range(first_row, first_row + rows):
                    after = tl.where(r + 1 < first_row + rows, r + 1, next_row)
                    hand_over(numbers, number_full, number_empty, tile, after)
                    row = TILES + r * 10
                    k_first, keys, first_j, kv_head = _keys(row)
                    out_first, queries, stats_first, q_begin, q_end = _queries(row)
                    q_first = 0 if BROADCAST else out_first
                    ks = tile % K_STAGES
                    # The stage is left in the first step of the tile before.
                    tlx.barrier_wait(k_empty[ks], (((tile + 1) // K_STAGES) & 1) ^ 1)
                    tlx.barrier_expect_bytes(k_full[ks], 2 * TILE_BYTES)
                    copy_rows(desc_k, k_tiles[ks], k_full[ks], k_first, keys, first_j, kv_head)
                    blocks = (q_end - q_begin + BLOCK_Q - 1) // BLOCK_Q
                    for g in tl.range(0, GROUP):
                        head = kv_head * GROUP + g
                        for x in tl.range(0, blocks):
                            m = q_begin + x * BLOCK_Q
                            st = count % Q_STAGES
                            tlx.barrier_wait(q_empty[st], ((count // Q_STAGES) & 1) ^ 1)
                            tlx.barrier_expect_bytes(q_full[st], Q_BYTES)
                            for u in tl.static_range(Q_TILES):
                                at = Q_TILES * st + u
                                i = m + 64 * u
                                copy_rows(
                                    desc_q, q_tiles[at], q_full[st], q_first, queries, i, head
                                )
                                copy_rows(
                                    desc_do,
                                    do_tiles[at],
                                    q_full[st],
                                    out_first,
                                    queries,
                                    i,
                                    head,
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
                            if (g == 0) & (x == 0):
                                tlx.barrier_wait(v_empty[0], (tile & 1) ^ 1)
                                tlx.barrier_expect_bytes(v_full[0], 2 * TILE_BYTES)
                                for c in tl.static_range(2):
                                    j = first_j + 64 * c
                                    copy_rows(
                                        desc_v, v_tiles[c], v_full[0], k_first, keys, j, kv_head
                                    )
                            count += 1
                    tile += 1

        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            count = 0
            tile = 0
            number, _ = _unit(tl.program_id(0), single, pairs)
            while number >= 0:
                row = TILES + number * 10
                k_first, keys, first_j, kv_head = _keys(row)
                out_first, queries, stats_first, q_begin, q_end = _queries(row)
                order = 0 if BROADCAST or HAS_LEFT or HAS_RIGHT else tl.load(row + 9)
                first_j += 64 * cid
                blocks = (q_end - q_begin + BLOCK_Q - 1) // BLOCK_Q
                # The tile's first key as the queries count, from the first step's first one.
                first = first_j - (keys - queries) - q_begin
                # A consumer without keys has other steps. The first one has some in every tile.
                mine = blocks
                if cid > 0:
                    mine = tl.where(first_j < keys, blocks, 0)
                # In steps before `inner` the window begins for some key, from `outer` on it ends.
                inner = 0
                outer = mine
                if HAS_RIGHT:
                    inner = tl.maximum(first + 63 - right + BLOCK_Q - 1, 0) // BLOCK_Q
                    inner = tl.minimum(inner, mine)
                if HAS_LEFT:
                    outer = tl.minimum(tl.maximum(first + left + 1, 0) // BLOCK_Q, mine)
                ks = tile % K_STAGES
                j = first + tl.arange(0, 64)
                dk = tl.zeros([64, BLOCK_D], tl.float32)
                dv = tl.zeros([64, BLOCK_D], tl.float32)
                buffers = (
                    k_tiles[ks], v_tiles[cid], q_tiles, do_tiles,
                    lse_tiles, delta_tiles, ds_tiles, ds_stages, dq_stages, v_empty[0],
                    k_empty[(tile + 1) % K_STAGES], q_full, q_empty,
                )  # fmt: skip
                tlx.barrier_wait(k_full[ks], (tile // K_STAGES) & 1)
                tlx.barrier_wait(v_full[0], tile & 1)
                for g in tl.range(0, GROUP):
                    head = kv_head * GROUP + g
                    dq_tile = q_begin if BROADCAST else stats_first + q_begin
                    dq_tile = dq_tile // 64 * HEADS + head
                    x_first = 0
                    x_last = blocks - 1
                    if GROUP > 1:
                        x_first = tl.where(g == 0, x_first, -1)
                        x_last = tl.where(g == GROUP - 1, x_last, -1)
                    if HAS_RIGHT:
                        dk, dv, count = _steps(
                            0, tl.minimum(inner, outer), x_first, x_last, order, buffers, desc_dq,
                            dq_tile, j, dk, dv, count, left, right, scale, cid, Q_TILES, BLOCK_D,
                            Q_STAGES, HEADS, 1, WITH_DQ, DTYPE,
                        )  # fmt: skip
                    if NARROW:
                        dk, dv, count = _steps(
                            outer, inner, x_first, x_last, order, buffers, desc_dq, dq_tile, j, dk,
                            dv, count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, HEADS,
                            3, WITH_DQ, DTYPE,
                        )  # fmt: skip
                    dk, dv, count = _steps(
                        inner, outer, x_first, x_last, order, buffers, desc_dq, dq_tile, j, dk, dv,
                        count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, HEADS, 0,
                        WITH_DQ, DTYPE,
                    )  # fmt: skip
                    if HAS_LEFT:
                        dk, dv, count = _steps(
                            tl.maximum(inner, outer), mine, x_first, x_last, order, buffers,
                            desc_dq, dq_tile, j, dk, dv, count, left, right, scale, cid, Q_TILES,
                            BLOCK_D, Q_STAGES, HEADS, 2, WITH_DQ, DTYPE,
                        )  # fmt: skip
                    if cid > 0:
                        count = _steps_without_keys(
                            mine, blocks, x_first, x_last, order, buffers, desc_dq, dq_tile, count,
                            cid, Q_TILES, BLOCK_D, Q_STAGES, HEADS, WITH_DQ, DTYPE,
                        )  # fmt: skip
                # Of the keys and dS nothing is read any more: the last to read them is dQ.
                if not WITH_DQ or Q_TILES == 2:
                    tlx.named_barrier_wait(11, 256)
                elif count % 2 == cid:
                    tlx.named_barrier_wait(11 + cid, 256)
                else:
                    tlx.named_barrier_arrive(12 - cid, 256)
                tlx.local_store(dk_stages[2 * ks + cid], (dk * natural_scale).to(DTYPE))
                if BLOCK_D == 64:
                    tlx.local_store(ds_stages[cid], dv.to(DTYPE))
                else:
                    dv = tl.permute(tl.reshape(dv.to(DTYPE), [64, 2, 64]), [0, 2, 1])
                    dv0, dv1 = tl.split(dv)
                    tlx.local_store(ds_stages[cid], dv0)
                    tlx.local_store(ds_stages[2 + cid], dv1)
                tlx.fence("async_shared")
                store_rows(desc_dk, dk_stages[2 * ks + cid], k_first, keys, first_j, kv_head)
                for part in tl.static_range(BLOCK_D // 64):
                    stage = ds_stages[2 * part + cid]
                    store_columns(desc_dv, stage, k_first, keys, first_j, kv_head, 64 * part)
                number = handed_over(numbers, number_full, number_empty, tile)
                tile += 1
            tlx.async_descriptor_store_wait(0)

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
    store_columns,
    store_rows,
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
def _add(dq, stage, desc_dq, tile, BLOCK_D: tl.constexpr):
    """Adds dq `[64, BLOCK_D]` to the float32 sums of a tile, in the order of a product's registers.

    A thread of a product has two rows and, of each eight columns, two: four numbers. So it writes
    16 bytes at once, and a warp to all banks; by rows it would need twice as many writes, of which
    each would meet another in a bank. `dq_kernel` has the order too.
    """
    x = tl.reshape(dq, [4, 2, 8, BLOCK_D // 8, 4, 2])  # warp, half, row, eighth, column, of two
    x = tl.reshape(tl.permute(x, [3, 0, 2, 4, 1, 5]), [2 * BLOCK_D, 32])
    tlx.local_store(stage, x)
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc_dq, stage, [tile * (2 * BLOCK_D), 0], store_reduce="add")


@triton.jit
def _step(
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
    mine,
    scale,
    cid: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    EDGES: tl.constexpr,
    WITH_DQ: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(dk, dv) after one or two tiles of 64 queries.

    `first`: the stage of the keys before is free once this consumer's copies from there are done.
    `last`: the values are not needed after this step. `mine`: where there is one tile of queries,
    whether its dQ is this consumer's task.
    """
    k_tile, v_tile, q_tiles, do_tiles, lse_tiles, delta_tiles = buffers[:6]
    ds_tiles, ds_stages, dq_stages, v_empty, k_before = buffers[6:]
    keys = tlx.local_slice(k_tile, [64 * cid, 0], [64, BLOCK_D])
    tlx.barrier_wait(q_full, q_phase)
    if not EDGES:  # the loads' time is that of the products
        lse0 = tlx.local_load(lse_tiles[at])
    s0 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at]))
    dp0 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at]))
    if TILES == 2:
        s1 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at + 1]))
        dp1 = tlx.async_dot(v_tile, tlx.local_trans(do_tiles[at + 1]))
    s0 = tlx.async_dot_wait(2 * TILES - 1, s0)
    if EDGES:  # registers are short
        lse0 = tlx.local_load(lse_tiles[at])
    elif TILES == 2:
        delta0 = tlx.local_load(delta_tiles[at])
    p0 = _probabilities(s0, lse0, begin, end, scale, EDGES)
    if TILES == 1:
        dv = tlx.async_dot(p0.to(DTYPE), do_tiles[at], dv)
        dp0 = tlx.async_dot_wait(1, dp0)
        tlx.barrier_arrive(v_empty, pred=last)
    else:
        dp0 = tlx.async_dot_wait(2, dp0)
    if EDGES or TILES == 1:
        delta0 = tlx.local_load(delta_tiles[at])
    ds0 = (p0 * (dp0 - delta0[None, :])).to(DTYPE)
    tlx.async_descriptor_store_wait(0)  # this consumer's copies before have left their stages
    tlx.barrier_arrive(k_before, pred=first)
    if WITH_DQ:
        tlx.local_store(ds_stages[2 * ds_at + cid], ds0)
    if TILES == 1:
        if WITH_DQ:
            tlx.fence("async_shared")
            if not mine:
                tlx.named_barrier_arrive(10 - cid, 256)
        dk = tlx.async_dot(ds0, q_tiles[at], dk)
    else:
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
    if WITH_DQ and TILES == 2:  # each has dQ of one tile
        tlx.named_barrier_wait(9, 256)  # both have written dS
        dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at + cid]), k_tile)
        dv = tlx.async_dot_wait(1, dv)
        dk = tlx.async_dot_wait(1, dk)
        tlx.barrier_arrive(q_empty)
        dq = tlx.async_dot_wait(0, dq)
        _add(dq, dq_stages[cid], desc_dq, dq_tile + HEADS * cid, BLOCK_D)
    else:
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_empty)
    if WITH_DQ and TILES == 1:  # each has dQ of every other tile: it is late where the other is not
        if mine:
            tlx.named_barrier_wait(9 + cid, 256)  # the other has written its dS
            dq = tlx.async_dot(tlx.local_trans(ds_tiles[ds_at]), k_tile)
            dq = tlx.async_dot_wait(0, dq)
            _add(dq, dq_stages[0], desc_dq, dq_tile, BLOCK_D)
    return dk, dv


@triton.jit
def _steps(
    x_begin,
    x_end,
    x_first,
    x_last,
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
        dk, dv = _step(
            buffers[:-2], q_full[st], (count // Q_STAGES) & 1, q_empty[st], TILES * st,
            TILES * (count % 2), desc_dq, dq_tile + x * (TILES * HEADS), dk, dv, begin, end,
            x == x_first, x == x_last, count % 2 == cid, scale, cid, TILES, BLOCK_D, HEADS, EDGES,
            WITH_DQ, DTYPE,
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
    HEADS: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DQ: tl.constexpr,
):
    """dk and dv of all tiles and, unless WITH_DQ is off, dq added to float32 sums that begin as 0.

    Grid: as many CTAs as run at once. Every tile of keys is seen by a query. `scale` holds log2(e)
    too. NARROW: a window may begin and end within one step. The sums are to be finished by
    `dq_kernel`.
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
                # The stage is left in the first step of the tile before.
                tlx.barrier_wait(k_empty[ks], (((turn + 1) // K_STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(k_full[ks], 2 * TILE_BYTES)
                copy_rows(desc_k, k_tiles[ks], k_full[ks], k_first, keys, first_j, kv_head)
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
                blocks = (q_end - q_begin + BLOCK_Q - 1) // BLOCK_Q
                # The tile's first key as the queries count, from the first step's first one.
                first = first_j - (keys - queries) - q_begin
                # In steps before `inner` the window begins for some key, from `outer` on it ends.
                inner = 0
                outer = blocks
                if HAS_RIGHT:
                    inner = tl.maximum(first + 63 - right + BLOCK_Q - 1, 0) // BLOCK_Q
                    inner = tl.minimum(inner, blocks)
                if HAS_LEFT:
                    outer = tl.minimum(tl.maximum(first + left + 1, 0) // BLOCK_Q, blocks)
                ks = turn % K_STAGES
                j = first + tl.arange(0, 64)
                dk = tl.zeros([64, BLOCK_D], tl.float32)
                dv = tl.zeros([64, BLOCK_D], tl.float32)
                buffers = (
                    k_tiles[ks], v_tiles[cid], q_tiles, do_tiles,
                    lse_tiles, delta_tiles, ds_tiles, ds_stages, dq_stages, v_empty[0],
                    k_empty[(turn + 1) % K_STAGES], q_full, q_empty,
                )  # fmt: skip
                tlx.barrier_wait(k_full[ks], (turn // K_STAGES) & 1)
                tlx.barrier_wait(v_full[0], turn & 1)
                for g in tl.range(0, GROUP):
                    head = kv_head * GROUP + g
                    dq_tile = q_begin if BROADCAST else stats_first + q_begin
                    dq_tile = dq_tile // 64 * HEADS + head
                    x_first = 0 if GROUP == 1 else tl.where(g == 0, 0, -1)
                    x_last = blocks - 1 if GROUP == 1 else tl.where(g == GROUP - 1, blocks - 1, -1)
                    if HAS_RIGHT:
                        dk, dv, count = _steps(
                            0, tl.minimum(inner, outer), x_first, x_last, buffers, desc_dq, dq_tile,
                            j, dk, dv, count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES,
                            HEADS, 1, WITH_DQ, DTYPE,
                        )  # fmt: skip
                    if NARROW:
                        dk, dv, count = _steps(
                            outer, inner, x_first, x_last, buffers, desc_dq, dq_tile, j, dk, dv,
                            count, left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, HEADS, 3,
                            WITH_DQ, DTYPE,
                        )  # fmt: skip
                    dk, dv, count = _steps(
                        inner, outer, x_first, x_last, buffers, desc_dq, dq_tile, j, dk, dv, count,
                        left, right, scale, cid, Q_TILES, BLOCK_D, Q_STAGES, HEADS, 0, WITH_DQ,
                        DTYPE,
                    )  # fmt: skip
                    if HAS_LEFT:
                        dk, dv, count = _steps(
                            tl.maximum(inner, outer), blocks, x_first, x_last, buffers, desc_dq,
                            dq_tile, j, dk, dv, count, left, right, scale, cid, Q_TILES, BLOCK_D,
                            Q_STAGES, HEADS, 2, WITH_DQ, DTYPE,
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
            tlx.async_descriptor_store_wait(0)


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
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """DQ `[rows, HEADS, DIM]` of the float32 sums `[tiles, HEADS, 64 * BLOCK_D]` that `_add` made.

    Grid: (tiles of 64 queries, HEADS). TILES is as in `statistics_kernel`; where q is shared it is
    not used, and `queries` are DQ's rows.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if BROADCAST:
        first = tile * 64
        rows = queries - first
    else:
        row = TILES + tile * 64 // BLOCK * 2
        first = tl.load(row) + tile * 64 % BLOCK
        rows = tl.load(row + 1) - tile * 64 % BLOCK
    place = (tile * HEADS + head).to(tl.int64) * (64 * BLOCK_D)
    x = tl.load(SUMS + place + tl.arange(0, 64 * BLOCK_D))
    # From [eighth, warp, row, column, half, of two] to [warp, half, row, eighth, column, of two].
    x = tl.permute(tl.reshape(x, [BLOCK_D // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [64, BLOCK_D]) * natural_scale
    r = tl.arange(0, 64)
    columns = tl.arange(0, BLOCK_D)
    place = ((first + r).to(tl.int64) * HEADS + head)[:, None] * DIM + columns[None, :]
    mask = (r < rows)[:, None] & (columns < DIM)[None, :]
    tl.store(DQ + place, x.to(DQ.dtype.element_ty), mask=mask)

"""The backward kernel for Hopper (sm_90a) in TLX: warp-specialised, persistent, keys stationary.

CTAs take tiles of 128 keys (`schedule.dealt_keys`) from a counter, so that those which share
queries run at the same time and find them in the L2 cache. Each of two consumers has 64 of a tile's
keys, with their dK and dV in registers. Queries and dout stream by; for 64 (at dim 64, two times
64) of them at a time (`tlx_backward_steps`):

    S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta)
    dV += P^T dO, dK += dS^T Q, with P^T and dS^T from registers
    dQ += dS K, over all 128 keys: dS goes through shared memory

(FlashAttention-2, arXiv 2307.08691, algorithm 2). dQ of a tile of queries is one consumer's task,
in turns; only one of them waits for the other, so that they do not march in step and one has the
tensor cores while the other is in its softmax. At dim 64 each takes one of a step's two tiles. dQ
leaves by a TMA copy that adds to float32 sums in global memory (`tlx_backward_sums`). The order of
these additions is not fixed, but for whole samples, all of whose keys one CTA has: there the first
tile writes the sums, which need not be cleared, and the second waits for these writes; a tile that
is alone writes dQ itself, unless heads are grouped. Without WITH_DQ there are no additions, and a
kernel that keeps queries computes dQ.

The keys of the next tile are copied while this one runs, and its values as soon as this one's last
dP is known; dK and dV leave through shared memory while the next tile begins. Rows past a sample's
end read as 0 and are never written (`tlx_common.ragged`), so that no step needs a mask but for
windows: the log-sum-exp of queries that are not there is +inf, and keys that are not there add 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_backward_steps import (
    Consumer,
    Options,
    Tile,
    steps,
    steps_without_keys,
)
from gem.attention.backends.tlx_common import (
    TILE_STAGES,
    answer,
    ask,
    copy_rows,
    dealt_place,
    hand_over,
    handed_over,
    rows_of,
    store_columns,
    store_rows,
)


@triton.jit
def _unit(number, single, pairs):
    """(first row, rows) of what a CTA takes at a time, of `schedule.KeyTiles`."""
    pair = (number >= single) & (number < single + pairs)
    return number + tl.minimum(tl.maximum(number - single, 0), pairs), 1 + pair.to(tl.int32)


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
def _copy_statistics(x, buffer, barrier):
    """Copies a number of each of 64 queries."""
    tlx.async_load(x, buffer, bulk=True, bulk_size=256, barrier=barrier)


@triton.jit(do_not_specialize=["single", "pairs", "units", "stats", "left", "right"])
def hopper_backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_do,
    desc_dk,
    desc_dv,
    desc_dq,
    desc_sums,
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
    WHOLE: tl.constexpr,
    ALONE: tl.constexpr,
):
    """dk and dv of all tiles and, unless WITH_DQ is off, dq: added to float32 sums, or written.

    TILES, single, pairs and units are those of `schedule.KeyTiles`; every tile is seen by a query.
    Grid: as many CTAs as run at once, at most one for each unit. COUNTER: int32, 0; without
    BY_COUNTER units are dealt in a zig-zag. `scale` holds log2(e) too. NARROW: a window may begin
    and end within one step. Sums begin as 0 but for whole samples, of which there are some with
    WHOLE; `dq_kernel` finishes them. Through `desc_dq` goes what has no sums: dq of whole samples
    with one tile, with ALONE.
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
        sum_stages = tlx.local_alloc((2 * BLOCK_D, 32), tl.float32, Q_TILES)
        dq_stages = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * Q_TILES, reuse=sum_stages)
    else:  # not used
        sum_stages = ds_stages
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
                    k_first, keys, first_j, kv_head = rows_of(row)
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
                            full = q_full[st]
                            tlx.barrier_expect_bytes(full, Q_BYTES)
                            for u in tl.static_range(Q_TILES):
                                at = Q_TILES * st + u
                                i = m + 64 * u
                                copy_rows(desc_q, q_tiles[at], full, q_first, queries, i, head)
                                copy_rows(desc_do, do_tiles[at], full, out_first, queries, i, head)
                                place = head.to(tl.int64) * stats + stats_first + i
                                _copy_statistics(LSE2 + place, lse_tiles[at], full)
                                _copy_statistics(DELTA + place, delta_tiles[at], full)
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
            OPTIONS: tl.constexpr = Options(
                cid=cid, TILES=Q_TILES, BLOCK_D=BLOCK_D, Q_STAGES=Q_STAGES, HEADS=HEADS,
                WITH_DQ=WITH_DQ, WHOLE=WHOLE, ALONE=ALONE, DTYPE=DTYPE,
            )  # fmt: skip
            consumer = Consumer(
                v_tile=v_tiles[cid], v_empty=v_empty[0],
                q_tiles=q_tiles, do_tiles=do_tiles, lse_tiles=lse_tiles, delta_tiles=delta_tiles,
                q_full=q_full, q_empty=q_empty,
                ds_tiles=ds_tiles, ds_stages=ds_stages,
                sum_stages=sum_stages, desc_sums=desc_sums, dq_stages=dq_stages, desc_dq=desc_dq,
                left=left, right=right, scale=scale, natural_scale=natural_scale,
            )  # fmt: skip
            count = 0
            tile = 0
            number, _ = _unit(tl.program_id(0), single, pairs)
            while number >= 0:
                row = TILES + number * 10
                k_first, keys, first_j, kv_head = rows_of(row)
                out_first, queries, stats_first, q_begin, q_end = _queries(row)
                order = tl.load(row + 9) if WHOLE else 0
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
                k_tile, k_before = k_tiles[ks], k_empty[(tile + 1) % K_STAGES]
                tlx.barrier_wait(k_full[ks], (tile // K_STAGES) & 1)
                tlx.barrier_wait(v_full[0], tile & 1)
                for g in tl.range(0, GROUP):
                    head = kv_head * GROUP + g
                    sums = q_begin if BROADCAST else stats_first + q_begin
                    sums = sums // 64 * HEADS + head
                    x_first = 0
                    x_last = blocks - 1
                    if GROUP > 1:
                        x_first = tl.where(g == 0, x_first, -1)
                        x_last = tl.where(g == GROUP - 1, x_last, -1)
                    this = Tile(
                        k_tile, k_before, j, sums, out_first, queries, head, x_first, x_last, order
                    )
                    if HAS_RIGHT:
                        dk, dv, count = steps(
                            0, tl.minimum(inner, outer), consumer, this, dk, dv, count, OPTIONS, 1
                        )
                    if NARROW:
                        dk, dv, count = steps(
                            outer, inner, consumer, this, dk, dv, count, OPTIONS, 3
                        )
                    dk, dv, count = steps(inner, outer, consumer, this, dk, dv, count, OPTIONS, 0)
                    if HAS_LEFT:
                        begin = tl.maximum(inner, outer)
                        dk, dv, count = steps(
                            begin, mine, consumer, this, dk, dv, count, OPTIONS, 2
                        )
                    if cid > 0:
                        count = steps_without_keys(mine, blocks, consumer, this, count, OPTIONS)
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

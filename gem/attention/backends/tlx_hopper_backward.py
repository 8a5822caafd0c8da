"""The backward kernel for Hopper (sm_90a) in TLX: warp-specialised, persistent, keys stationary.

CTAs take tiles of 128 keys (`dealing.dealt_keys`) from a counter, so that those which share
queries run at the same time and find them in the L2 cache. Each of two consumers has 64 of a tile's
keys, with their dK and dV in registers. Queries and dout stream by; for 64 (at dim 64, two times
64) of them at a time (`tlx_backward_steps`):

    S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta)
    dV += P^T dO, dK += dS^T Q, with P^T and dS^T from registers
    dQ += dS K, over all 128 keys: dS goes through shared memory

(FlashAttention-2, arXiv 2307.08691, algorithm 2). dQ of a tile of queries is one consumer's task,
in turns; only one of them waits for the other, so that they do not march in step and one has the
tensor cores while the other is in its softmax. At dim 64 each takes one of a step's two tiles, and
both wait. dQ leaves by a TMA copy that adds to float32 sums in global memory (`tlx_backward_sums`).
The order of these additions is not fixed, but for whole samples, all of whose keys one CTA has:
there the first tile writes the sums, which need not be cleared, and the second waits for these
writes; a tile that is alone writes dQ itself, unless heads are grouped. Without WITH_DQ there are
no additions, and a kernel that keeps queries computes dQ.

All copies are made by three warps beside the consumers (`tlx_backward_copies`). The keys of the
next tile are copied while this one runs, and a consumer's values as soon as its last dP is known;
dK and dV leave through shared memory while the next tile begins, without waiting for the last dQ.
What consumers write there is fenced by whoever reads it, past the barrier between them: a fence
waits for all that a thread has written before, and the writers have other things to do.

Rows past a sample's end read as 0 and are never written (`tlx_common.ragged`), so that no step
needs a mask but for windows: the log-sum-exp of queries that are not there is +inf, and keys that
are not there add 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_backward_copies import Loads, Stores, load, store_dq, store_keys
from gem.attention.backends.tlx_backward_steps import (
    Consumer,
    Tile,
    steps,
    steps_without_keys,
)
from gem.attention.backends.tlx_backward_tiles import (
    Options,
    Ring,
    dk_place,
    queries_of,
    steps_of,
    unit,
)
from gem.attention.backends.tlx_common import TILE_STAGES, handed_over, rows_of


@triton.jit
def _consume(
    cid: tl.constexpr,
    consumer,
    ring,
    TABLE,
    single,
    pairs,
    OPTIONS: tl.constexpr,
):
    """What consumer `cid` does with all tiles."""
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    BLOCK_Q: tl.constexpr = 64 * OPTIONS.TILES
    count = 0
    tile = 0
    number, _ = unit(tl.program_id(0), single, pairs)
    while number >= 0:
        row = TABLE + number * 10
        _, keys, first_j, _ = rows_of(row)
        _, queries, _, q_begin, q_end = queries_of(row)
        alone = tl.load(row + 9) == 3 if OPTIONS.ALONE else False
        first_j += 64 * cid
        blocks = steps_of(q_begin, q_end, OPTIONS)
        # This consumer's first key as the queries count, from the first step's first one.
        first = first_j - (keys - queries) - q_begin
        # A consumer without keys has other steps. The first one has some in every tile.
        mine = blocks
        if cid > 0:
            mine = tl.where(first_j < keys, blocks, 0)
        # In steps before `inner` the window begins for some key, from `outer` on it ends.
        inner = 0
        outer = mine
        if OPTIONS.RIGHT:
            inner = tl.maximum(first + 63 - consumer.right + BLOCK_Q - 1, 0) // BLOCK_Q
            inner = tl.minimum(inner, mine)
        if OPTIONS.LEFT:
            outer = tl.minimum(tl.maximum(first + consumer.left + 1, 0) // BLOCK_Q, mine)
        ks = tile % OPTIONS.K_STAGES
        j = first + tl.arange(0, 64)
        dk = tl.zeros([64, BLOCK_D], tl.float32)
        dv = tl.zeros([64, BLOCK_D], tl.float32)
        tlx.barrier_wait(consumer.k_full[ks], (tile // OPTIONS.K_STAGES) & 1)
        tlx.barrier_wait(consumer.v_full[cid], tile & 1)
        for g in tl.range(0, OPTIONS.GROUP):
            x_last = blocks - 1
            if OPTIONS.GROUP > 1:
                x_last = tl.where(g == OPTIONS.GROUP - 1, x_last, -1)
            this = Tile(consumer.k_tiles[ks], j, tile, x_last, alone)
            if OPTIONS.RIGHT:
                dk, dv = steps(
                    0, tl.minimum(inner, outer), consumer, this, dk, dv, count, cid, OPTIONS, 1
                )
            if OPTIONS.NARROW:
                dk, dv = steps(outer, inner, consumer, this, dk, dv, count, cid, OPTIONS, 3)
            dk, dv = steps(inner, outer, consumer, this, dk, dv, count, cid, OPTIONS, 0)
            if OPTIONS.LEFT:
                begin = tl.maximum(inner, outer)
                dk, dv = steps(begin, mine, consumer, this, dk, dv, count, cid, OPTIONS, 2)
            if cid > 0:
                steps_without_keys(mine, blocks, consumer, this, count, cid, OPTIONS)
            count += blocks
        # This consumer alone has read the tiles of dS at whose place dV is staged, and is done; the
        # other one has written them, but before that, and again only once dV has left.
        tlx.barrier_wait(consumer.left_empty[cid], (tile & 1) ^ 1)
        tlx.local_store(consumer.dv_stages[OPTIONS.TILES * cid], dv.to(OPTIONS.DTYPE))
        dk_stage = consumer.dk_stages[dk_place(tile, cid, OPTIONS)]
        if OPTIONS.TILES == 1 and OPTIONS.WITH_DQ:
            tlx.barrier_wait(consumer.k_read[0], tile & 1)
        tlx.local_store(dk_stage, (dk * consumer.natural_scale).to(OPTIONS.DTYPE))
        tlx.barrier_arrive(consumer.left_full[cid])
        number = handed_over(ring.numbers, ring.full, ring.empty, tile)
        tile += 1


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
    TABLE,
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

    TABLE, single, pairs and units are those of `dealing.KeyTiles`; every tile is seen by a query.
    Grid: as many CTAs as run at once, at most one for each unit. COUNTER: int32, 0; without
    BY_COUNTER units are dealt in a zig-zag. `scale` holds log2(e) too. NARROW: a window may begin
    and end within one step. Sums begin as 0 but for whole samples, of which there are some with
    WHOLE; `dq_kernel` finishes them. Through `desc_dq` goes what has no sums: dq of whole samples
    with one tile, with ALONE.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    TILES: tl.constexpr = 128 // BLOCK_D
    OPTIONS: tl.constexpr = Options(
        TILES=TILES, BLOCK_D=BLOCK_D, K_STAGES=2, Q_STAGES=2, GROUP=GROUP, HEADS=HEADS,
        BROADCAST=BROADCAST, LEFT=HAS_LEFT, RIGHT=HAS_RIGHT, NARROW=NARROW, BY_COUNTER=BY_COUNTER,
        WITH_DQ=WITH_DQ, WHOLE=WHOLE, ALONE=ALONE, DTYPE=DTYPE,
    )  # fmt: skip
    k_tiles = tlx.local_alloc((128, BLOCK_D), DTYPE, 2)
    v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    q_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * TILES)
    do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * TILES)
    lse_tiles = tlx.local_alloc((64,), tl.float32, 2 * TILES)
    delta_tiles = tlx.local_alloc((64,), tl.float32, 2 * TILES)
    ds_tiles = tlx.local_alloc((128, 64), DTYPE, 2 * TILES)  # [step % 2, tile]
    # What threads write is written through names of its own: where a product reads a buffer by the
    # name by which threads write it, the compiler puts another fence before every such product.
    ds_stages = tlx.local_alloc((64, 64), DTYPE, 4 * TILES, reuse=ds_tiles)
    dv_stages = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * TILES * TILES, reuse=ds_tiles)
    sum_stages = tlx.local_alloc((2 * BLOCK_D, 32), tl.float32, TILES)
    dq_stages = tlx.local_alloc((64, BLOCK_D), DTYPE, 2 * TILES, reuse=sum_stages)
    if TILES == 2:  # there is room beside dV
        dk_stages = dv_stages
    elif WITH_DQ:
        dk_stages = tlx.local_alloc((64, BLOCK_D), DTYPE, 4, reuse=k_tiles)
    else:
        dk_stages = dq_stages
    k_full = tlx.alloc_barriers(2, arrive_count=1)
    k_empty = tlx.alloc_barriers(2, arrive_count=1)
    k_read = tlx.alloc_warp_barrier(1, 4)
    v_full = tlx.alloc_barriers(2, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(2, 4)
    q_full = tlx.alloc_barriers(2, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(2, 4, 2)
    sum_full = tlx.alloc_warp_barrier(TILES, 4)
    sum_empty = tlx.alloc_barriers(TILES, arrive_count=1)
    left_full = tlx.alloc_warp_barrier(2, 4)
    left_empty = tlx.alloc_barriers(2, arrive_count=1)
    # Read by two consumers of four warps and those that store.
    ring = Ring(
        numbers=tlx.local_alloc((1,), tl.int32, TILE_STAGES),
        full=tlx.alloc_warp_barrier(TILE_STAGES, 1),
        empty=tlx.alloc_warp_barrier(TILE_STAGES, 10 if WITH_DQ else 9),
    )
    # At the named barrier 9 + cid (at dim 64 both at 9) a consumer waits for the other's dS.
    consumer = Consumer(
        k_tiles=k_tiles, v_tiles=v_tiles, k_full=k_full, k_read=k_read,
        v_full=v_full, v_empty=v_empty,
        q_tiles=q_tiles, do_tiles=do_tiles, lse_tiles=lse_tiles, delta_tiles=delta_tiles,
        q_full=q_full, q_empty=q_empty, ds_tiles=ds_tiles, ds_stages=ds_stages,
        dv_stages=dv_stages, left_full=left_full, left_empty=left_empty,
        sum_stages=sum_stages, dq_stages=dq_stages, dk_stages=dk_stages,
        sum_full=sum_full, sum_empty=sum_empty,
        left=left, right=right, scale=scale, natural_scale=natural_scale,
    )  # fmt: skip

    to = Loads(
        desc_q=desc_q, desc_k=desc_k, desc_v=desc_v, desc_do=desc_do,
        LSE2=LSE2, DELTA=DELTA, k_tiles=k_tiles, v_tiles=v_tiles,
        q_tiles=q_tiles, do_tiles=do_tiles, lse_tiles=lse_tiles, delta_tiles=delta_tiles,
        k_full=k_full, k_empty=k_empty, v_full=v_full, v_empty=v_empty,
        q_full=q_full, q_empty=q_empty,
    )  # fmt: skip
    of = Stores(
        desc_dk=desc_dk, desc_dv=desc_dv, desc_dq=desc_dq, desc_sums=desc_sums,
        sum_stages=sum_stages, dq_stages=dq_stages, dv_stages=dv_stages,
        dk_stages=dk_stages, sum_full=sum_full, sum_empty=sum_empty, k_empty=k_empty,
        left_full=left_full, left_empty=left_empty,
    )  # fmt: skip

    with tlx.async_tasks():
        with tlx.async_task("default"):
            _consume(0, consumer, ring, TABLE, single, pairs, OPTIONS)
        with tlx.async_task(num_warps=4, registers=240):
            _consume(1, consumer, ring, TABLE, single, pairs, OPTIONS)
        with tlx.async_task(num_warps=1, registers=24):
            load(to, ring, TABLE, COUNTER, single, pairs, units, stats, OPTIONS)
        with tlx.async_task(num_warps=1, registers=24):
            store_keys(of, ring, TABLE, single, pairs, OPTIONS)
        with tlx.async_task(num_warps=1, registers=24):
            if WITH_DQ:
                store_dq(of, ring, TABLE, single, pairs, OPTIONS)

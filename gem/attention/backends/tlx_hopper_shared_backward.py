"""The backward kernel for Hopper (sm_90a) in TLX of broadcast attention with at most 64 queries.

Queries stationary: a CTA keeps the queries of one head in shared memory and, in the registers of
each consumer, a float32 dQ for its whole life, while it walks over runs of keys of many samples
(`schedule.key_segments`). A consumer has 64 keys at a time and finishes their dK and dV at once,
since all queries are there:

    delta = sum(dO * O, dim) - dlse, once for each run
    S^T = K Q^T, dP^T = V dO^T, P^T = exp(S^T - lse), dS^T = P^T * (dP^T - delta)
    dV = P^T dO, dK = dS^T Q, with P^T and dS^T from registers, and dQ += dS K

(FlashAttention-2, arXiv 2307.08691, algorithm 2). So nothing is added to in global memory: a
consumer's dQ is written once, and a second kernel sums these partial dQ in a fixed order.

dV and dK leave through the stages of V and K that they came from, copied by a warp for each
consumer, so that no consumer waits for the copy engine. Rows past a sample's end read as 0 and are
never written (`tlx_common.ragged`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import copy_rows, store_rows, to_base_2

CONSUMERS = tl.constexpr(2)  # the first is the default task


class Runs(NamedTuple):
    """A worker's runs of keys, with a head; `schedule.key_segments` has the table."""

    SEGMENTS: tl.tensor
    K_OFFSETS: tl.tensor
    turns: tl.tensor
    worker: tl.tensor
    workers: tl.tensor
    head: tl.tensor


@triton.jit
def _segment(runs, turn):
    """(sample, its first key row, its keys, begin and end of the run): a zig-zag over workers."""
    place = tl.where(turn % 2 == 0, runs.worker, runs.workers - 1 - runs.worker)
    at = runs.SEGMENTS + 3 * (turn * runs.workers + place)
    sample = tl.load(at)
    first = tl.load(runs.K_OFFSETS + sample)
    keys = tl.load(runs.K_OFFSETS + sample + 1) - first
    return sample, first.to(tl.int32), keys.to(tl.int32), tl.load(at + 1), tl.load(at + 2)


class Stages(NamedTuple):
    """Shared memory and its barriers.

    Attributes:
        q_tile, do_tiles, out_tiles: `[64, BLOCK_D]`; dout and the output have two stages.
        k_tiles, v_tiles: `[64, BLOCK_D]`, STAGES for each consumer; dK and dV leave through them.
        ds_tiles, delta_tiles: `[64, 64]` and `[64]`, for each consumer.
        dq_tiles: float32 `[64, BLOCK_D]`, each in place of two stages of keys.
        dv_full, dk_full: to say that a stage has dV or dK; kv_empty: that both have left.
    """

    q_tile: tlx.buffered_tensor
    do_tiles: tlx.buffered_tensor
    out_tiles: tlx.buffered_tensor
    k_tiles: tlx.buffered_tensor
    v_tiles: tlx.buffered_tensor
    ds_tiles: tlx.buffered_tensor
    delta_tiles: tlx.buffered_tensor
    dq_tiles: tlx.buffered_tensor
    q_full: tlx.mbarrier
    do_full: tlx.mbarrier
    do_empty: tlx.mbarrier
    kv_full: tlx.mbarrier
    kv_empty: tlx.mbarrier
    dv_full: tlx.mbarrier
    dk_full: tlx.mbarrier


@triton.jit
def _load(
    stages, runs, desc_q, desc_k, desc_v, desc_out, desc_do, queries,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copies the queries, and of every run dout, the output, keys and values."""
    BYTES: tl.constexpr = 64 * BLOCK_D * 2
    head = runs.head
    tlx.barrier_expect_bytes(stages.q_full[0], BYTES)
    copy_rows(desc_q, stages.q_tile[0], stages.q_full[0], 0, queries, 0, head)
    count = 0
    for turn in tl.range(0, runs.turns):
        sample, k_first, keys, begin, end = _segment(runs, turn)
        d = turn % 2
        tlx.barrier_wait(stages.do_empty[d], ((turn // 2) & 1) ^ 1)
        do_full = stages.do_full[d]
        tlx.barrier_expect_bytes(do_full, 2 * BYTES)
        first = sample * queries
        copy_rows(desc_do, stages.do_tiles[d], do_full, first, queries, 0, head)
        copy_rows(desc_out, stages.out_tiles[d], do_full, first, queries, 0, head)
        for row in tl.range(begin, end, 64 * CONSUMERS):
            for c in tl.static_range(CONSUMERS):
                st = c * STAGES + count % STAGES
                tlx.barrier_wait(stages.kv_empty[st], ((count // STAGES) & 1) ^ 1)
                full = stages.kv_full[st]
                tlx.barrier_expect_bytes(full, 2 * BYTES)
                j = row + 64 * c
                copy_rows(desc_k, stages.k_tiles[st], full, k_first, keys, j, head)
                copy_rows(desc_v, stages.v_tiles[st], full, k_first, keys, j, head)
            count += 1


@triton.jit
def _store(stages, runs, desc_dk, desc_dv, cid: tl.constexpr, STAGES: tl.constexpr):
    """Copies dK and dV of a consumer's blocks out, and lets their stages go."""
    count = 0
    for turn in tl.range(0, runs.turns):
        _, k_first, keys, begin, end = _segment(runs, turn)
        for row in tl.range(begin + 64 * cid, end + 64 * cid, 64 * CONSUMERS):
            st = cid * STAGES + count % STAGES
            phase = (count // STAGES) & 1
            tlx.barrier_wait(stages.dv_full[st], phase)
            store_rows(desc_dv, stages.v_tiles[st], k_first, keys, row, runs.head)
            tlx.barrier_wait(stages.dk_full[st], phase)
            store_rows(desc_dk, stages.k_tiles[st], k_first, keys, row, runs.head)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(stages.kv_empty[st])
            count += 1


@triton.jit
def _consume(
    stages, runs, desc_partial, LSE, DLSE, scale, natural_scale, queries, cid: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    HAS_DLSE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What consumer `cid` computes of every run, and its dQ of all."""
    q_tile, do_tiles, ds_tile = stages.q_tile[0], stages.do_tiles, stages.ds_tiles[cid]
    k_tiles, v_tiles = stages.k_tiles, stages.v_tiles
    i = tl.arange(0, 64)
    tlx.barrier_wait(stages.q_full[0], 0)
    dq = tl.zeros([64, BLOCK_D], tl.float32)
    count = 0
    for turn in tl.range(0, runs.turns):
        sample, _, _, begin, end = _segment(runs, turn)
        place = (sample.to(tl.int64) * queries + i) * HEADS + runs.head
        lse = tl.load(LSE + place, mask=i < queries, other=-float("inf"))
        lse = to_base_2(lse)
        d = turn % 2
        tlx.barrier_wait(stages.do_full[d], (turn // 2) & 1)
        delta = tlx.local_load(stages.out_tiles[d]).to(tl.float32)
        delta = tl.sum(delta * tlx.local_load(do_tiles[d]).to(tl.float32), 1)
        if HAS_DLSE:
            delta -= tl.load(DLSE + place, mask=i < queries, other=0.0)
        tlx.local_store(stages.delta_tiles[cid], delta)
        for _ in tl.range(begin, end, 64 * CONSUMERS):
            st = cid * STAGES + count % STAGES
            tlx.barrier_wait(stages.kv_full[st], (count // STAGES) & 1)
            s = tlx.async_dot(k_tiles[st], tlx.local_trans(q_tile))
            dp = tlx.async_dot(v_tiles[st], tlx.local_trans(do_tiles[d]))
            s = tlx.async_dot_wait(1, s)
            # Rounding may lift a score above its log-sum-exp, but no probability above 1.
            p = tl.math.exp2(tl.minimum(s * scale - lse[None, :], 0.0))
            dp = tlx.async_dot_wait(0, dp)
            ds = (p * (dp - tlx.local_load(stages.delta_tiles[cid])[None, :])).to(DTYPE)
            tlx.local_store(ds_tile, ds)
            tlx.fence("async_shared")
            dv = tlx.async_dot(p.to(DTYPE), do_tiles[d])
            dq = tlx.async_dot(tlx.local_trans(ds_tile), k_tiles[st], dq)
            dv = tlx.async_dot_wait(1, dv)
            tlx.local_store(v_tiles[st], dv.to(DTYPE))
            tlx.fence("async_shared")
            tlx.barrier_arrive(stages.dv_full[st])
            dk = tlx.async_dot(ds, q_tile)
            dq = tlx.async_dot_wait(0, dq)
            dk = tlx.async_dot_wait(0, dk)
            tlx.local_store(k_tiles[st], (dk * natural_scale).to(DTYPE))
            tlx.fence("async_shared")
            tlx.barrier_arrive(stages.dk_full[st])
            count += 1
        tlx.barrier_arrive(stages.do_empty[d])
    # dQ leaves through two stages of keys, once what they had last has left.
    for n in tl.static_range(2):
        uses = (count + STAGES - 1 - n) // STAGES
        tlx.barrier_wait(stages.kv_empty[cid * STAGES + n], (uses & 1) ^ 1)
    dq_tile = stages.dq_tiles[cid * STAGES // 2]
    tlx.local_store(dq_tile, dq)
    tlx.fence("async_shared")
    partial = runs.worker * CONSUMERS + cid
    store_rows(desc_partial, dq_tile, partial * queries, queries, 0, runs.head)
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["queries", "turns", "workers"])
def hopper_shared_backward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_out,
    desc_do,
    desc_dk,
    desc_dv,
    desc_partial,
    LSE,
    DLSE,
    SEGMENTS,
    K_OFFSETS,
    scale,
    natural_scale,
    queries,
    turns,
    workers,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """dk, dv and the partial dq `[workers * CONSUMERS, queries, HEADS, dim]`, not yet scaled.

    Grid: workers * HEADS. LSE and DLSE `[samples * queries, HEADS]`. `scale` holds log2(e) too.
    STAGES is even.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    q_tile = tlx.local_alloc((64, BLOCK_D), DTYPE, 1)
    do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    out_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    k_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * STAGES)
    v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * STAGES)
    ds_tiles = tlx.local_alloc((64, 64), DTYPE, CONSUMERS)
    delta_tiles = tlx.local_alloc((64,), tl.float32, CONSUMERS)
    dq_tiles = tlx.local_alloc((64, BLOCK_D), tl.float32, CONSUMERS * STAGES // 2, reuse=k_tiles)
    q_full = tlx.alloc_barriers(1, arrive_count=1)
    do_full = tlx.alloc_barriers(2, arrive_count=1)
    do_empty = tlx.alloc_warp_barrier(2, 4, CONSUMERS)
    kv_full = tlx.alloc_barriers(CONSUMERS * STAGES, arrive_count=1)
    kv_empty = tlx.alloc_barriers(CONSUMERS * STAGES, arrive_count=1)
    dv_full = tlx.alloc_warp_barrier(CONSUMERS * STAGES, 4)
    dk_full = tlx.alloc_warp_barrier(CONSUMERS * STAGES, 4)
    stages = Stages(
        q_tile=q_tile, do_tiles=do_tiles, out_tiles=out_tiles, k_tiles=k_tiles, v_tiles=v_tiles,
        ds_tiles=ds_tiles, delta_tiles=delta_tiles, dq_tiles=dq_tiles,
        q_full=q_full, do_full=do_full, do_empty=do_empty,
        kv_full=kv_full, kv_empty=kv_empty, dv_full=dv_full, dk_full=dk_full,
    )  # fmt: skip
    head = tl.program_id(0) % HEADS
    worker = tl.program_id(0) // HEADS
    runs = Runs(SEGMENTS, K_OFFSETS, turns, worker, workers, head)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            _consume(
                stages, runs, desc_partial, LSE, DLSE, scale, natural_scale, queries, 0,
                HEADS, BLOCK_D, STAGES, HAS_DLSE, DTYPE,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=240):
            _consume(
                stages, runs, desc_partial, LSE, DLSE, scale, natural_scale, queries, 1,
                HEADS, BLOCK_D, STAGES, HAS_DLSE, DTYPE,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=24):
            _load(
                stages, runs, desc_q, desc_k, desc_v, desc_out, desc_do, queries,
                BLOCK_D, STAGES,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=24):
            _store(stages, runs, desc_dk, desc_dv, 0, STAGES)
        with tlx.async_task(num_warps=1, registers=24):
            _store(stages, runs, desc_dk, desc_dv, 1, STAGES)

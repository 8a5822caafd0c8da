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

dV and dK leave through the stages of V and K that they came from. Rows past a sample's end read as
0 and are never written (`tlx_common.ragged`).
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import copy_rows, store_rows, to_base_2


@triton.jit
def _segment(SEGMENTS, K_OFFSETS, turn, worker, workers):
    """(sample, its first key row, its keys, begin and end of the run): a zig-zag over workers."""
    place = tl.where(turn % 2 == 0, worker, workers - 1 - worker)
    at = SEGMENTS + 3 * (turn * workers + place)
    sample = tl.load(at)
    first = tl.load(K_OFFSETS + sample)
    keys = tl.load(K_OFFSETS + sample + 1) - first
    return sample, first.to(tl.int32), keys.to(tl.int32), tl.load(at + 1), tl.load(at + 2)


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
    CONSUMERS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """dk, dv and the partial dq `[workers * CONSUMERS, queries, HEADS, dim]`, not yet scaled.

    Grid: workers * HEADS. LSE and DLSE `[samples * queries, HEADS]`. `scale` holds log2(e) too.
    STAGES is even.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    BYTES: tl.constexpr = 64 * BLOCK_D * 2
    ROWS: tl.constexpr = 64 * CONSUMERS
    q_tile = tlx.local_alloc((64, BLOCK_D), DTYPE, 1)
    do_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    out_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, 2)
    k_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * STAGES)
    v_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * STAGES)
    ds_tiles = tlx.local_alloc((64, 64), DTYPE, CONSUMERS)
    delta_tiles = tlx.local_alloc((64,), tl.float32, CONSUMERS)
    # A consumer's dQ leaves through its own stages of keys, two of which it takes.
    dq_tiles = tlx.local_alloc((64, BLOCK_D), tl.float32, CONSUMERS * STAGES // 2, reuse=k_tiles)
    q_full = tlx.alloc_barriers(1, arrive_count=1)
    do_full = tlx.alloc_barriers(2, arrive_count=1)
    do_empty = tlx.alloc_warp_barrier(2, 4, CONSUMERS)
    kv_full = tlx.alloc_barriers(CONSUMERS * STAGES, arrive_count=1)
    kv_empty = tlx.alloc_warp_barrier(CONSUMERS * STAGES, 4, 1)
    head = tl.program_id(0) % HEADS
    worker = tl.program_id(0) // HEADS

    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_expect_bytes(q_full[0], BYTES)
            copy_rows(desc_q, q_tile[0], q_full[0], 0, queries, 0, head)
            count = 0
            for turn in tl.range(0, turns):
                sample, k_first, keys, begin, end = _segment(
                    SEGMENTS, K_OFFSETS, turn, worker, workers
                )
                d = turn % 2
                tlx.barrier_wait(do_empty[d], ((turn // 2) & 1) ^ 1)
                tlx.barrier_expect_bytes(do_full[d], 2 * BYTES)
                first = sample * queries
                copy_rows(desc_do, do_tiles[d], do_full[d], first, queries, 0, head)
                copy_rows(desc_out, out_tiles[d], do_full[d], first, queries, 0, head)
                for row in tl.range(begin, end, ROWS):
                    for c in tl.static_range(CONSUMERS):
                        st = c * STAGES + count % STAGES
                        tlx.barrier_wait(kv_empty[st], ((count // STAGES) & 1) ^ 1)
                        tlx.barrier_expect_bytes(kv_full[st], 2 * BYTES)
                        j = row + 64 * c
                        copy_rows(desc_k, k_tiles[st], kv_full[st], k_first, keys, j, head)
                        copy_rows(desc_v, v_tiles[st], kv_full[st], k_first, keys, j, head)
                    count += 1

        with tlx.async_task(num_warps=4, registers=240, replicate=CONSUMERS):
            cid: tl.constexpr = tlx.async_task_replica_id()
            i = tl.arange(0, 64)
            tlx.barrier_wait(q_full[0], 0)
            dq = tl.zeros([64, BLOCK_D], tl.float32)
            count = 0
            for turn in tl.range(0, turns):
                sample, k_first, keys, begin, end = _segment(
                    SEGMENTS, K_OFFSETS, turn, worker, workers
                )
                place = (sample.to(tl.int64) * queries + i) * HEADS + head
                lse = tl.load(LSE + place, mask=i < queries, other=-float("inf"))
                lse = to_base_2(lse)
                d = turn % 2
                tlx.barrier_wait(do_full[d], (turn // 2) & 1)
                delta = tlx.local_load(out_tiles[d]).to(tl.float32)
                delta = tl.sum(delta * tlx.local_load(do_tiles[d]).to(tl.float32), 1)
                if HAS_DLSE:
                    delta -= tl.load(DLSE + place, mask=i < queries, other=0.0)
                tlx.local_store(delta_tiles[cid], delta)
                for row in tl.range(begin + 64 * cid, end + 64 * cid, ROWS):
                    st = cid * STAGES + count % STAGES
                    tlx.barrier_wait(kv_full[st], (count // STAGES) & 1)
                    s = tlx.async_dot(k_tiles[st], tlx.local_trans(q_tile[0]))
                    dp = tlx.async_dot(v_tiles[st], tlx.local_trans(do_tiles[d]))
                    s = tlx.async_dot_wait(1, s)
                    # Rounding may lift a score above its log-sum-exp, but no probability above 1.
                    p = tl.math.exp2(tl.minimum(s * scale - lse[None, :], 0.0))
                    dp = tlx.async_dot_wait(0, dp)
                    ds = (p * (dp - tlx.local_load(delta_tiles[cid])[None, :])).to(DTYPE)
                    tlx.local_store(ds_tiles[cid], ds)
                    tlx.fence("async_shared")
                    dv = tlx.async_dot(p.to(DTYPE), do_tiles[d])
                    dq = tlx.async_dot(tlx.local_trans(ds_tiles[cid]), k_tiles[st], dq)
                    dv = tlx.async_dot_wait(1, dv)
                    tlx.local_store(v_tiles[st], dv.to(DTYPE))
                    tlx.fence("async_shared")
                    store_rows(desc_dv, v_tiles[st], k_first, keys, row, head)
                    dk = tlx.async_dot(ds, q_tile[0])
                    dq = tlx.async_dot_wait(0, dq)
                    dk = tlx.async_dot_wait(0, dk)
                    tlx.local_store(k_tiles[st], (dk * natural_scale).to(DTYPE))
                    tlx.fence("async_shared")
                    store_rows(desc_dk, k_tiles[st], k_first, keys, row, head)
                    # The block before has left its stage once only this block's copies are open.
                    tlx.async_descriptor_store_wait(2)
                    if count > 0:
                        tlx.barrier_arrive(kv_empty[cid * STAGES + (count - 1) % STAGES])
                    count += 1
                tlx.barrier_arrive(do_empty[d])
            tlx.async_descriptor_store_wait(0)
            dq_tile = dq_tiles[cid * STAGES // 2]
            tlx.local_store(dq_tile, dq)
            tlx.fence("async_shared")
            partial = worker * CONSUMERS + cid
            store_rows(desc_partial, dq_tile, partial * queries, queries, 0, head)
            tlx.async_descriptor_store_wait(0)

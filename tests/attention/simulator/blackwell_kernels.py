"""Small TLX kernels for Blackwell with faults that a constexpr plants."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def product_kernel(desc_a, desc_b, C, blocks, STAGES: tl.constexpr, FAULT: tl.constexpr = ""):
    """C = A @ B, 128x64 of float32: a producer, an issuer of products, an epilogue."""
    a_tiles = tlx.local_alloc((128, 64), tl.float16, STAGES)
    b_tiles = tlx.local_alloc((64, 64), tl.float16, STAGES)
    acc_tile = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    alias = tlx.local_alloc((128, 64), tl.float16, 2, tlx.storage_kind.tmem, reuse=acc_tile)
    full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_barriers(STAGES)
    done = tlx.alloc_barriers(1)
    other = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if FAULT == "alias while in flight":
                tlx.barrier_wait(other[0], 0)
                tlx.local_store(alias[1], tl.zeros([128, 64], tl.float16))
            if FAULT != "no wait":
                tlx.barrier_wait(done[0], 0)
            if FAULT == "alias over the sum":
                tlx.local_store(alias[1], tl.zeros([128, 64], tl.float16))
            i = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
            if FAULT == "half by half":
                j = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 32)[None, :]
                tl.store(C + j, tlx.local_load(tlx.subslice(acc_tile[0], 0, 32)))
                right = tlx.local_slice(acc_tile[0], [0, 32], [128, 32])
                tl.store(C + j + 32, tlx.local_load(right))
            else:
                tl.store(C + i, tlx.local_load(acc_tile[0]))
        with tlx.async_task(num_warps=1, registers=24):
            for x in tl.range(0, blocks):
                st = x % STAGES
                phase = (x // STAGES) & 1
                if FAULT != "no wait for full":
                    tlx.barrier_wait(full[st], phase)
                use = x > 0
                if FAULT == "accumulates onto nothing":
                    use = x >= 0
                if FAULT == "early release":
                    tlx.async_dot(
                        a_tiles[st], b_tiles[st], acc_tile[0], use_acc=use, force_async=True
                    )
                    tlx.barrier_arrive(empty[st])
                elif FAULT == "waited for one by one":
                    tlx.async_dot(a_tiles[st], b_tiles[st], acc_tile[0], use_acc=use)
                    tlx.barrier_arrive(empty[st])
                else:
                    tlx.async_dot(
                        a_tiles[st], b_tiles[st], acc_tile[0], use_acc=use, mBarriers=[empty[st]]
                    )
                if FAULT == "alias while in flight":
                    if x == 0:
                        tlx.barrier_arrive(other[0])
            if FAULT == "not committed":
                tlx.barrier_arrive(done[0])
            elif FAULT != "no commit":
                tlx.tcgen05_commit(done[0])
        with tlx.async_task(num_warps=1, registers=24):
            for x in tl.range(0, blocks):
                st = x % STAGES
                tlx.barrier_wait(empty[st], ((x // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[st], (128 * 64 + 64 * 64) * 2)
                tlx.async_descriptor_load(desc_a, a_tiles[st], [0, x * 64], full[st])
                tlx.async_descriptor_load(desc_b, b_tiles[st], [x * 64, 0], full[st])


@triton.jit
def columns_kernel(NUM: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr):
    """Allocates tensor memory."""
    tlx.local_alloc((ROWS, 128), tl.float32, NUM, tlx.storage_kind.tmem)
    if ROWS == 64:  # the other lanes of the same columns
        tlx.local_alloc((ROWS, 128), tl.float32, NUM, tlx.storage_kind.tmem)
    if MORE > 0:
        tlx.local_alloc((128, 1), tl.float32, MORE, tlx.storage_kind.tmem)


@triton.jit
def aliases_kernel(OUT, SIZE: tl.constexpr, KIND: tl.constexpr, FAULT: tl.constexpr):
    """Two sums, each beside two halves and a column that share its place."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem, buffer_size_bytes=SIZE)
    sums = tlx.local_alloc((128, 64), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    halves = tlx.local_alloc((128, 32), tl.float16, 4, tlx.storage_kind.tmem, reuse=spec)
    column = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    if KIND == "distinct":
        beside = tlx.reuse_group(
            tlx.reuse_group(halves, group_size=2),
            column,
            group_type=tlx.reuse_group_type.distinct,
        )
        spec.set_buffer_overlap(tlx.reuse_group(sums, beside))
    i = tl.arange(0, 128)[:, None]
    j = tl.arange(0, 32)[None, :]
    for x in tl.static_range(4):
        tlx.local_store(halves[x], tl.full([128, 32], x, tl.float16))
    for x in tl.static_range(2):
        tlx.local_store(column[x], tl.full([128, 1], 10 + x, tl.float32))
    if FAULT:
        tlx.local_store(sums[1], tl.zeros([128, 64], tl.float32))
    for x in tl.static_range(4):
        tl.store(OUT + x * 4096 + i * 32 + j, tlx.local_load(halves[x]).to(tl.float32))
    for x in tl.static_range(2):
        tl.store(OUT + 4 * 4096 + x * 128 + i, tlx.local_load(column[x]))


@triton.jit
def out_of_place_kernel(desc, KIND: tl.constexpr):
    """Operations that the target does not have, or not so."""
    tile = tlx.local_alloc((64, 64), tl.float16, 1)
    done = tlx.alloc_barriers(1)
    if KIND == "left operand":
        a = tl.zeros([64, 64], tl.float16)
        acc = tlx.local_alloc((64, 64), tl.float32, 1, tlx.storage_kind.tmem)
        tlx.async_dot(a, tile[0], acc[0], use_acc=False)
    elif KIND == "accumulator":
        tlx.async_dot(tile[0], tile[0])
    elif KIND == "wait":
        tlx.async_dot_wait(0, tl.zeros([64, 64], tl.float32))
    elif KIND == "commit":
        tlx.tcgen05_commit(done[0])
    elif KIND == "launch control":
        tlx.clc_create_context(1)
    elif KIND == "pair":
        acc = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem)
        tlx.async_dot(tile[0], tile[0], acc[0], use_acc=False, two_ctas=True)
    elif KIND == "copy":
        acc = tlx.local_alloc((64, 64), tl.float16, 1, tlx.storage_kind.tmem)
        tlx.async_descriptor_load(desc, acc[0], [0, 0], done[0])
    elif KIND == "transpose":
        acc = tlx.local_alloc((64, 64), tl.float16, 1, tlx.storage_kind.tmem)
        tlx.local_trans(acc[0])
    elif KIND == "rank":
        tlx.barrier_arrive(done[0], 1, remote_cta_rank=1)


@triton.jit
def neighbours_kernel(X, OUT, HOW: tl.constexpr, FAULT: tl.constexpr = ""):
    """Every CTA of a cluster hands its 64 numbers to the next one."""
    own = tlx.local_alloc((64,), tl.float32, 1)
    got = tlx.local_alloc((64,), tl.float32, 1)
    came = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    after = (rank + 1) % tlx.cluster_size_1d()
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    x = tl.load(X + i)
    tlx.local_store(own[0], x)
    if HOW != "store" and FAULT != "no bytes":
        tlx.barrier_expect_bytes(came[0], 64 * 4)
    if FAULT != "no start":
        tlx.cluster_barrier()
    if HOW == "store":
        tlx.remote_shmem_store(got[0], x, after)
        if FAULT == "one goes alone":
            if rank != 1:
                tlx.cluster_barrier()
        elif FAULT != "no end":
            tlx.cluster_barrier()
    else:
        if HOW == "copy":
            if FAULT != "no fence":
                tlx.fence("async_shared")
            tlx.async_remote_shmem_copy(got[0], own[0], after, came[0])
        else:
            tlx.async_remote_shmem_store(got[0], x, after, came[0])
        if FAULT != "no wait":
            tlx.barrier_wait(came[0], 0)
    tl.store(OUT + i, tlx.local_load(got[0]))
    tlx.cluster_barrier()


@triton.jit
def multicast_kernel(desc, OUT, FAULT: tl.constexpr = ""):
    """Each of two CTAs loads half a tile for both; each scales what came and counts with CTA 0."""
    tiles = tlx.local_alloc((16, 64), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    both = tlx.alloc_barriers(1, arrive_count=2)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full[0], 16 * 64 * 4)
    tlx.barrier_expect_bytes(full[1], 16 * 64 * 4)
    tlx.async_descriptor_load(
        desc, tiles[rank], [rank * 16, 0], full[rank], multicast_targets=[0, 1]
    )
    if FAULT != "no wait":
        tlx.barrier_wait(full[1], 0)
    tlx.barrier_wait(full[0], 0)
    tlx.barrier_arrive(both[0], 1, remote_cta_rank=0)
    if FAULT == "the other waits too":
        tlx.barrier_wait(both[0], 0)
    tlx.barrier_wait(both[0], 0, pred=rank == 0)
    i = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    for x in tl.static_range(2):
        tl.store(OUT + rank * 2048 + x * 1024 + i, tlx.local_load(tiles[x]))
    tlx.cluster_barrier()


@triton.jit
def count_kernel(OUT, STAGES: tl.constexpr, MULTI: tl.constexpr, FAULT: tl.constexpr = ""):
    """Counts the visits of every tile, its own and those it takes over."""
    context = tlx.clc_create_context(tlx.cluster_size_1d() if MULTI else 1, num_stages=STAGES)
    tile = tl.program_id(0)
    count = 0
    while tile != -1:
        k = count % STAGES
        phase = (count // STAGES) & 1
        if FAULT == "phase of the producer":
            tlx.clc_producer(context, phase, multi_ctas=MULTI, k=k)
        else:
            tlx.clc_producer(context, phase ^ 1, multi_ctas=MULTI, k=k)
        tl.atomic_add(OUT + tile, 1)
        tile = tlx.clc_consumer(context, phase, multi_ctas=MULTI, k=k)
        count += 1
    if MULTI and FAULT != "no end":
        tlx.cluster_barrier()  # the others arrive at barriers of the first CTA
    if FAULT == "asks again":
        tlx.clc_producer(context, ((count // STAGES) & 1) ^ 1, k=count % STAGES)
        tlx.clc_consumer(context, (count // STAGES) & 1, k=count % STAGES)

"""Small TLX kernels with faults that a constexpr plants."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def product_kernel(
    desc_a,
    desc_b,
    desc_c,
    blocks,
    STAGES: tl.constexpr,
    FAULT: tl.constexpr = "",
):
    """C = A @ B for 64x64 tiles of float16: a producer, a consumer, STAGES buffers."""
    BYTES: tl.constexpr = 64 * 64 * 2
    EMPTY: tl.constexpr = 2 if FAULT == "count of two" else 1
    a_tiles = tlx.local_alloc((64, 64), tl.float16, STAGES)
    b_tiles = tlx.local_alloc((64, 64), tl.float16, STAGES)
    c_tile = tlx.local_alloc((64, 64), tl.float32, 1)
    full = tlx.alloc_barriers(STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(STAGES, arrive_count=EMPTY)
    row = tl.program_id(0) * 64
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for x in tl.range(0, blocks):
                st = x % STAGES
                phase = ((x // STAGES) & 1) ^ 1
                if FAULT == "wrong phase of the producer":
                    phase = phase ^ 1
                if FAULT != "no wait for empty":
                    tlx.barrier_wait(empty[st], phase)
                if FAULT == "too few bytes":
                    tlx.barrier_expect_bytes(full[st], BYTES)
                elif FAULT == "too many bytes":
                    tlx.barrier_expect_bytes(full[st], 3 * BYTES)
                elif FAULT == "expected twice":
                    tlx.barrier_expect_bytes(full[st], BYTES)
                    tlx.barrier_expect_bytes(full[st], BYTES)
                else:
                    tlx.barrier_expect_bytes(full[st], 2 * BYTES)
                tlx.async_descriptor_load(desc_a, a_tiles[st], [row, x * 64], full[st])
                if FAULT == "copied to the same buffer":
                    tlx.async_descriptor_load(desc_b, a_tiles[st], [x * 64, 0], full[st])
                elif FAULT == "one buffer for all":
                    tlx.async_descriptor_load(desc_b, b_tiles[0], [x * 64, 0], full[st])
                elif FAULT == "index outside":
                    tlx.async_descriptor_load(desc_b, b_tiles[st + 1], [x * 64, 0], full[st])
                else:
                    tlx.async_descriptor_load(desc_b, b_tiles[st], [x * 64, 0], full[st])
        with tlx.async_task(num_warps=4, registers=232):
            acc = tl.zeros([64, 64], tl.float32)
            for x in tl.range(0, blocks):
                st = x % STAGES
                phase = (x // STAGES) & 1
                if FAULT == "wrong phase of the consumer":
                    phase = phase ^ 1
                if FAULT == "phase of 2":
                    phase = phase + 2
                if FAULT != "no wait for full":
                    tlx.barrier_wait(full[st], phase)
                if FAULT == "early release":
                    tlx.barrier_arrive(empty[st])
                acc = tlx.async_dot(a_tiles[st], b_tiles[st], acc)
                if FAULT == "one product in flight":
                    acc = tlx.async_dot_wait(1, acc)
                elif FAULT == "read before the wait":
                    acc = acc * 1.0
                else:
                    acc = tlx.async_dot_wait(0, acc)
                if FAULT == "arrive twice":
                    tlx.barrier_arrive(empty[st], 2)
                elif FAULT != "no arrive" and FAULT != "early release":
                    tlx.barrier_arrive(empty[st])
            acc = tlx.async_dot_wait(0, acc)
            out = c_tile[0]
            if FAULT == "half a store":
                half = tlx.local_slice(out, [0, 0], [64, 32])
                tlx.local_store(half, tl.zeros([64, 32], tl.float32))
            elif FAULT != "no store":
                tlx.local_store(out, acc)
            if FAULT != "no fence":
                tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_c, out, [row, 0])
            if FAULT == "store over a store":
                tlx.local_store(out, acc)
            if FAULT != "no store wait":
                tlx.async_descriptor_store_wait(0)


@triton.jit
def hand_over_kernel(X, OUT, FAULT: tl.constexpr = ""):
    """Two tasks hand 64 numbers over through shared memory and named barriers 1 and 2."""
    tile = tlx.local_alloc((64,), tl.float32, 1)
    i = tl.arange(0, 64)
    count = 5
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if FAULT == "wait for each other":
                tlx.named_barrier_wait(2, 256)
            tlx.local_store(tile[0], tl.load(X + i))
            if FAULT == "arrive again":
                tlx.named_barrier_arrive(1, 256)
            if FAULT != "nobody comes":
                tlx.named_barrier_arrive(1, 256)
            tlx.named_barrier_wait(2, 256)
            count += 1
            tlx.local_store(tile[0], tl.load(X + 64 + i) + count)
        with tlx.async_task(num_warps=4):
            if FAULT == "other count":
                tlx.named_barrier_wait(1, 288)
            elif FAULT != "no wait":
                tlx.named_barrier_wait(1, 256)
            x = tlx.local_load(tile[0])
            tl.store(OUT + i, x)
            tlx.named_barrier_arrive(2, 256)
    tl.store(OUT + 64 + i, tlx.local_load(tile[0]) + count)


@triton.jit
def copy_kernel(desc_in, desc_out, row, column, REDUCE: tl.constexpr, FAULT: tl.constexpr = ""):
    """A box from one descriptor to another."""
    tile = tlx.local_alloc((16, 32), tlx.dtype_of(desc_in), 1)
    full = tlx.alloc_barriers(1)
    SIZE: tl.constexpr = tlx.size_of(tlx.dtype_of(desc_in))
    tlx.barrier_expect_bytes(full[0], 16 * 32 * SIZE)
    tlx.async_descriptor_load(desc_in, tile[0], [row, column], full[0])
    if FAULT != "no wait":
        tlx.barrier_wait(full[0], 0)
    if FAULT != "no store":
        tlx.async_descriptor_store(desc_out, tile[0], [row, column], store_reduce=REDUCE)
        tlx.async_descriptor_store_wait(0)


@triton.jit
def arithmetic_kernel(A, B, OUT, N: tl.constexpr):
    """C's division, wrapping integers, shifts, comparisons."""
    i = tl.arange(0, N)
    a = tl.load(A + i)
    b = tl.load(B + i)
    tl.store(OUT + i, a // b)
    tl.store(OUT + N + i, a % b)
    tl.store(OUT + 2 * N + i, a * b)
    tl.store(OUT + 3 * N + i, tl.where(a < b, a ^ b, a & b))
    total = 0
    for x in tl.range(0, N):
        total += tl.load(A + x) // tl.load(B + x)
        total = total * 65537
    tl.store(OUT + 4 * N + i, total)


@triton.jit
def reduce_kernel(X, OUT, COUNTER, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Reductions, shapes, atomics and a masked store."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    x = tl.load(X + i[:, None] * COLUMNS + j[None, :])
    mask = i < ROWS - 1
    tl.store(OUT + i, tl.sum(x, 1), mask=mask)
    tl.store(OUT + ROWS + i, tl.max(x, 1), mask=mask)
    y = tl.trans(x).to(tl.bfloat16)
    tl.store(OUT + 2 * ROWS + i, tl.sum(y.to(tl.float32), 0))
    tl.store(OUT + 3 * ROWS + i, tl.sum(tl.math.exp2(tl.reshape(x, [ROWS, COLUMNS])), 1))
    before = tl.atomic_add(COUNTER + i % 2, i, mask=i < ROWS - 2)
    tl.store(OUT + 4 * ROWS + i, before.to(tl.float32))
    tl.atomic_add(COUNTER + 2, tl.num_programs(0))
    tl.atomic_max(COUNTER + 3 + i, i - 3)


@triton.jit
def resources_kernel(
    NUM: tl.constexpr, WARPS: tl.constexpr, REGISTERS: tl.constexpr, REPLICAS: tl.constexpr
):
    """Takes what it is told to."""
    tlx.local_alloc((128, 128), tl.float16, NUM)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.static_assert(NUM > 0)
        with tlx.async_task(num_warps=WARPS, registers=REGISTERS, replicate=REPLICAS):
            tl.static_assert(NUM > 0)


@triton.jit
def outside_kernel(X, OUT, LAST: tl.constexpr, KIND: tl.constexpr):
    """Operations that are out of place."""
    i = tl.arange(0, 64)
    if KIND == "load":
        tl.store(OUT + i, tl.load(X + i + LAST))
    elif KIND == "masked":
        tl.store(OUT + i, tl.load(X + i + LAST, mask=i + LAST < 64, other=-1.0))
    elif KIND == "tensor memory":
        tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)
    elif KIND == "unknown":
        tl.store(OUT + i, tl.sort(tl.load(X + i)))
    elif KIND == "spin":
        x = 0
        while x < 1:
            tlx.async_descriptor_store_wait(0)

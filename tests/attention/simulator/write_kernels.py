"""TLX kernels that write global memory by TMA and need what they have written there."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import wait_for_writes


@triton.jit
def wait(WAIT: tl.constexpr):
    """For all copies to global memory, in one way or another."""
    if WAIT == "full":
        wait_for_writes()
    elif WAIT == "read":
        tlx.async_descriptor_store_wait(0)
    elif WAIT == "read, in assembly":
        READ: tl.constexpr = "cp.async.bulk.wait_group.read 0;\n mov.u32 $0, 0;"
        tl.inline_asm_elementwise(READ, "=r", [], tl.int32, is_pure=False, pack=1)
    elif WAIT == "full but one":
        tlx.async_descriptor_store_wait(0)
        ALL: tl.constexpr = "cp.async.bulk.wait_group 1; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(ALL, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def twice_kernel(X, OUT, desc_out, tiles, WAIT: tl.constexpr, BULK: tl.constexpr = False):
    """OUT is twice X, of tiles of 64: they are stored, then added at the same places."""
    stage = tlx.local_alloc((64,), tl.float32, 1)
    i = tl.arange(0, 64)
    for x in tl.range(0, tiles):
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(stage[0], tl.load(X + x * 64 + i))
        tlx.fence("async_shared")
        if BULK:
            tlx.async_store(OUT + x * 64, stage[0], 256)
        else:
            tlx.async_descriptor_store(desc_out, stage[0], [x * 64])
    wait(WAIT)
    for x in tl.range(0, tiles):
        tlx.local_store(stage[0], tl.load(X + x * 64 + i))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(desc_out, stage[0], [x * 64], store_reduce="add")
        tlx.async_descriptor_store_wait(0)


@triton.jit
def tasks_kernel(X, desc_out, WAIT: tl.constexpr):
    """OUT is twice X, of one tile of 64: a task stores it, another one adds it."""
    stages = tlx.local_alloc((64,), tl.float32, 2)
    i = tl.arange(0, 64)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(stages[0], tl.load(X + i))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_out, stages[0], [0])
            wait(WAIT)
            tlx.named_barrier_arrive(1, 256)
        with tlx.async_task(num_warps=4):
            tlx.local_store(stages[1], tl.load(X + i))
            tlx.fence("async_shared")
            tlx.named_barrier_wait(1, 256)
            tlx.async_descriptor_store(desc_out, stages[1], [0], store_reduce="add")
            tlx.async_descriptor_store_wait(0)


@triton.jit
def poll_kernel(OUT, desc_out):
    """A task polls what another one stores and does not wait for."""
    stage = tlx.local_alloc((64,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(stage[0], tl.full([64], 1.0, tl.float32))
            tlx.fence("async_shared")
            tlx.async_descriptor_store(desc_out, stage[0], [0])
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=4):
            there = tl.load(OUT)
            while there == 0.0:
                there = tl.load(OUT)


@triton.jit
def assembly_kernel(ASSEMBLY: tl.constexpr, CONSTRAINTS: tl.constexpr, PURE: tl.constexpr):
    """Any assembly without operands."""
    tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [], tl.int32, is_pure=PURE, pack=1)

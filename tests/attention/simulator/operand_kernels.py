"""Products with the left operand in registers, made anew at every turn."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def powers_kernel(desc_b, X, OUT, turns, HOW: tl.constexpr, STATIC: tl.constexpr = 0):
    """OUT = sum over turns t of (X / 2^t) @ B."""
    b = tlx.local_alloc((64, 64), tl.float16, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 64 * 64 * 2)
    tlx.async_descriptor_load(desc_b, b[0], [0, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    i = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(X + i)
    acc = tl.zeros([64, 64], tl.float32)
    p = x.to(tl.float16)
    if STATIC > 0:
        for _ in tl.static_range(STATIC):
            acc = tlx.async_dot(x.to(tl.float16), b[0], acc)
            x = x * 0.5
    for _ in tl.range(0, turns):
        if HOW == "float32 carried":
            p = x.to(tl.float16)
        if HOW == "made before the wait":
            acc = tlx.async_dot_wait(1, acc)
            p = x.to(tl.float16)
        acc = tlx.async_dot(p, b[0], acc)
        x = x * 0.5
        if HOW == "carried before the wait":
            p = x.to(tl.float16)
        if HOW != "made before the wait":
            acc = tlx.async_dot_wait(0, acc)
        if HOW == "carried after the wait":
            p = x.to(tl.float16)
    acc = tlx.async_dot_wait(0, acc)
    tl.store(OUT + i, acc)

"""Small TLX kernels with loops that poll, some for what never comes."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def _wait_for(FLAG, number):
    """Returns how many turns it took at the least: 1."""
    while tl.load(FLAG) != number:
        pass
    return 1


@triton.jit
def flag_kernel(FLAG, OUT, TASKS: tl.constexpr, HOW: tl.constexpr):
    """The default task polls a flag that another task sets."""
    tile = tlx.local_alloc((64,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    if TASKS:
        with tlx.async_tasks():
            with tlx.async_task("default"):
                if HOW == "function":
                    _wait_for(FLAG, 1)
                elif HOW == "lock":
                    while tl.atomic_cas(FLAG, 1, 2) != 1:
                        pass
                else:
                    while tl.load(FLAG) != 1:
                        pass
                tl.store(OUT, 5)
            with tlx.async_task(num_warps=4):
                if HOW == "both poll":
                    while tl.load(OUT) != 5:
                        pass
                if HOW == "waits":
                    tlx.barrier_wait(full[0], 0)
                if HOW != "never set":
                    tl.store(FLAG, 1)
    elif HOW == "two turns":
        x = 0
        while tl.load(FLAG) == 0:
            x = 1 - x
    elif HOW == "counts":
        x = 0
        while tl.load(FLAG) == 0:
            x += 1
    elif HOW == "for":
        for _ in tl.range(0, 1 << 30):
            tl.load(FLAG)
    elif HOW == "stores":
        while tl.load(FLAG) == 0:
            tl.atomic_add(OUT, 1)
    elif HOW == "arithmetic":
        x = 1
        while x < 10:
            x = x * 3 % 8
    elif HOW == "barrier":
        while tl.load(FLAG) == 0:
            tlx.barrier_wait(full[0], 1)
    elif HOW == "shared":
        tlx.local_store(tile[0], tl.zeros([64], tl.float32))
        while tl.sum(tlx.local_load(tile[0])) == 0.0:
            pass


@triton.jit
def busy_kernel(OUT, HOW: tl.constexpr):
    """Loops that go round often, and end."""
    x = 0
    if HOW == "clock":
        start = tlx.clock64()
        while tlx.clock64() - start < 2000:
            pass
    elif HOW == "calls":
        for _ in tl.range(0, 2000):
            x += _wait_for(OUT, 0)
    else:
        while x < 5000:
            tl.load(OUT)
            x += 1
    tl.store(OUT, x + 1)

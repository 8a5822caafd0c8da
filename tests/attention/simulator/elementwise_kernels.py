"""Functions of single numbers, over tensors, and a pinned layout."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def _clipped(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _leaky(x, slope):
    if x > 0:
        return x, x
    else:
        return x * slope, -x


@triton.jit
def _halves(x, PARTS: tl.constexpr):
    if PARTS == 1:
        return (x,)
    else:
        a, b = x.reshape([2, x.shape[0] // 2]).permute(1, 0).split()
        return _halves(a, PARTS // 2) + _halves(b, PARTS // 2)


@triton.jit
def mapped_kernel(X, OUT, N: tl.constexpr, PARTS: tl.constexpr):
    """Rows: clipped by index, leaky and magnitude (both by branches), sums of parts."""
    i = tl.arange(0, N)
    x = tl.load(X + i)
    tl.store(OUT + i, tl.map_elementwise(_clipped, x, -1.0, i.to(tl.float32) / N))
    leaky, magnitude = tl.map_elementwise(_leaky, x, 0.25)
    tl.store(OUT + N + i, leaky)
    tl.store(OUT + 2 * N + i, magnitude)
    parts = _halves(x, PARTS)
    for k in tl.static_range(PARTS):
        tl.store(OUT + 3 * N + k, parts[k].sum())
        tl.store(OUT + 3 * N + PARTS + k, (1 << parts[k].max().to(tl.int32)).to(tl.float32))


@triton.jit
def pairs_kernel(
    X, Y, OUT, N: tl.constexpr, ASSEMBLY: tl.constexpr, TYPES: tl.constexpr, PACK: tl.constexpr
):
    """Pairs of X and Y by inline assembly, in 32 bits each."""
    i = tl.arange(0, N)
    x, y = tl.load(X + i), tl.load(Y + i)
    z = tl.inline_asm_elementwise(ASSEMBLY, TYPES, [x, y], tl.int32, is_pure=True, pack=PACK)
    tl.store(OUT + i, z)


@triton.jit
def pinned_kernel(OUT, VALUES: tl.constexpr):
    LAYOUT: tl.constexpr = tlx.layout(shape=((32, 4), (VALUES,)), stride=((1, 32), (128,)))
    i = tlx.require_layout(tl.arange(0, 256), LAYOUT)
    tl.store(OUT + i, i)

"""What `tlx_hopper_forward` makes of a block's scores: probabilities and their sums, row by row.

`top` is what a row's scores are held against, by exp2(score - top), `total` the sum of that over
the keys so far, `shrink` what sums and output of before are multiplied by when `top` is raised.

With OPTIONS.LAZY a block is first held against the `top` of before. Every `top` gives the same
output, as long as neither probabilities nor sums overflow or vanish, and a tile's first block gives
one of the right size. So it seldom needs raising: a block's maxima are not asked for, nor is the
output multiplied. Only where a row's probabilities outgrow a bound is the block worked off again.
(FlashAttention-4 leaves out multiplications likewise, but asks for every block's maxima.)
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def seen(consumer, tile, j, TAIL: tl.constexpr, LEFT_EDGE: tl.constexpr, RIGHT_EDGE: tl.constexpr):
    """Whether a query sees key j `[BLOCK_K]`: `[64, BLOCK_K]`, or `[1, BLOCK_K]`.

    Only what can fail is asked: TAIL, whether the key is there, and the edges of the window.
    """
    i, keys, queries = tile.i, tile.keys, tile.queries
    if RIGHT_EDGE:
        end = i + keys - queries + consumer.right + 1
        if TAIL:
            end = tl.minimum(end, keys)
        seen = j[None, :] < end[:, None]
    else:
        seen = (j < keys)[None, :]
    if LEFT_EDGE:
        seen = seen & (j[None, :] >= (i + keys - queries - consumer.left)[:, None])
    return seen


@triton.jit
def masked(s, seen, top, total, scale, BLIND: tl.constexpr):
    """(top, total, p, shrink) after a block of which only the pairs `seen` count.

    BLIND: a query may have seen no key, in this block neither.
    """
    s = tl.where(seen, s * scale, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    finite = new_top
    if BLIND:
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.math.exp2(s - finite[:, None])
    shrink = tl.math.exp2(top - finite)
    return new_top, total * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def hidden(s, seen, FLIPPED: tl.constexpr):
    """The scores, not yet scaled, with such for pairs not `seen` that their probability is 0."""
    return tl.where(seen, s, float("inf") if FLIPPED else -float("inf"))


@triton.jit
def raised(s, top, total, scale, FLIPPED: tl.constexpr, BLIND: tl.constexpr):
    """(top, total, p, shrink) after a block whose masked pairs, if any, are `hidden`.

    BLIND: a query may have seen no key, in this block neither.
    """
    highest = (tl.min(s, 1) if FLIPPED else tl.max(s, 1)) * scale
    new_top = tl.maximum(top, highest)
    finite = new_top
    if BLIND:
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.math.exp2(s * scale - finite[:, None])
    shrink = tl.math.exp2(top - finite)
    return new_top, total * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def lazy(s, top, scale):
    """(p, sums of p) of a block with the `top` of before."""
    p = tl.math.exp2(s * scale - top[:, None])
    return p, tl.sum(p, 1)


@triton.jit
def report(flags, top, added, OPTIONS: tl.constexpr):
    """Says in shared memory, `[4]` int8, in which warps a row needs a higher `top`.

    `added` `[64]` are the sums that `lazy` gave.
    """
    # float16 holds no more. Otherwise products with values of up to 2^80 leave the sums finite.
    LIMIT: tl.constexpr = 2.0**15 if OPTIONS.DTYPE == tl.float16 else 2.0**32
    too_low = added > LIMIT
    if OPTIONS.WINDOW:  # a query may have seen no key yet
        too_low = too_low | (top == -float("inf"))
    tlx.local_store(flags, tl.max(tl.reshape(too_low.to(tl.int8), [4, 16]), 1).to(tl.int8))


@triton.jit
def reported(flags):
    """Whether a warp did so.

    All threads load one place, so that the compiler sees that they branch alike. Else it keeps the
    addresses of later products in every thread's registers and moves them for each product.
    """
    return tl.max(tlx.local_load(tlx.local_reinterpret(flags, tl.int32, [1])), 0) != 0

"""What a consumer of `tlx_hopper_forward` does with blocks of keys.

A step has the scores of a block and, meanwhile, the product of the probabilities and values of the
block before.

The accumulator of a product is in registers, and the probabilities are its left operand from there.
Their registers are not written again before the product has been waited for (triton-lang/triton
issue 9433; ptxas before 13.3 gets this wrong by itself, issue 11781). P_SHARED takes them through
shared memory instead, to hold the two against each other.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_forward_softmax import (
    hidden,
    lazy,
    masked,
    raised,
    report,
    reported,
    seen,
)


class Options(NamedTuple):
    """Constants of a consumer: its number, the kernel's constants, and what follows from them.

    Attributes:
        PIECES: products that an output of BLOCK_D columns takes, see `_weigh`.
        PACKED: probabilities are carried to the next step as pairs of 16 bits.
        LAZY: `top` is raised only where a block outgrows it, see `tlx_forward_softmax`.
        EARLY: the next turn to issue products is taken at a step's end.
    """

    cid: tl.constexpr
    CONSUMERS: tl.constexpr
    BLOCK_K: tl.constexpr
    PIECES: tl.constexpr
    STAGES: tl.constexpr
    WINDOW: tl.constexpr
    HAS_LEFT: tl.constexpr
    HAS_RIGHT: tl.constexpr
    NARROW: tl.constexpr
    NEAR: tl.constexpr
    FLIPPED: tl.constexpr
    PING_PONG: tl.constexpr
    P_SHARED: tl.constexpr
    P_WIDE: tl.constexpr
    PACKED: tl.constexpr
    LAZY: tl.constexpr
    EARLY: tl.constexpr
    DTYPE: tl.constexpr


class Consumer(NamedTuple):
    """What a consumer works with in every tile.

    Attributes:
        k_tiles, v_tiles: STAGES blocks of keys and values `[BLOCK_K, BLOCK_D]`, and their barriers.
        p_tile: `[64, BLOCK_K]`, for the probabilities with P_SHARED.
        outgrown: `[4]` int8, with LAZY: whether a block outgrew `top` in a row of each warp.
        columns: the numbers below BLOCK_K.
        left, right: of the window.
        scale: of scores.
    """

    k_tiles: tlx.buffered_tensor
    k_full: tlx.mbarrier
    k_empty: tlx.mbarrier
    v_tiles: tlx.buffered_tensor
    v_full: tlx.mbarrier
    v_empty: tlx.mbarrier
    p_tile: tlx.buffered_tensor
    outgrown: tlx.buffered_tensor
    columns: tl.tensor
    left: tl.tensor
    right: tl.tensor
    scale: tl.tensor


class Tile(NamedTuple):
    """A consumer's queries of a tile and what they see.

    Not to be carried by a loop: the compiler would find other layouts for what does not change.
    Triton's cache does not see this class: its fields change together with the calls that fill them
    by position.

    Attributes:
        i: the 64 queries, counted in the sample.
        begin, blocks: the first key that the tile sees, and blocks of keys from there on.
        keys, queries: of the sample.
    """

    i: tl.tensor
    begin: tl.tensor
    blocks: tl.tensor
    keys: tl.tensor
    queries: tl.tensor


@triton.jit
def _take_turn(OPTIONS: tl.constexpr):
    """Waits until it is this consumer's turn to issue products."""
    if OPTIONS.PING_PONG:
        tlx.named_barrier_wait(9 + OPTIONS.cid, 256)


@triton.jit
def _pass_turn(OPTIONS: tl.constexpr):
    """Lets the next consumer issue its products."""
    if OPTIONS.PING_PONG:
        tlx.named_barrier_arrive(9 + (OPTIONS.cid + 1) % OPTIONS.CONSUMERS, 256)


@triton.jit
def _keys(consumer, tile, x, BLOCK_K: tl.constexpr):
    """The keys `[BLOCK_K]` of the block x before a tile's last, counted in the sample."""
    return tile.begin + (tile.blocks - 1 - x) * BLOCK_K + consumer.columns


@triton.jit
def _weigh(p, v_tile, out0, out1, OPTIONS: tl.constexpr):
    """(out0, out1) with the product of probabilities and values added, by halves of the columns.

    Products of one width have one layout. With scores of 64 columns and an output of 128 the
    compiler would carry the output in two layouts and copy it at every step.
    """
    if OPTIONS.PIECES == 1:
        out0 = tlx.async_dot(p, v_tile, out0)
    else:
        out0 = tlx.async_dot(p, tlx.local_slice(v_tile, [0, 0], [OPTIONS.BLOCK_K, 64]), out0)
        out1 = tlx.async_dot(p, tlx.local_slice(v_tile, [0, 64], [OPTIONS.BLOCK_K, 64]), out1)
    return out0, out1


@triton.jit
def _shrunk(out0, out1, shrink, OPTIONS: tl.constexpr):
    """(out0, out1) relative to another `top`."""
    out0 = out0 * shrink[:, None]
    if OPTIONS.PIECES == 2:
        out1 = out1 * shrink[:, None]
    return out0, out1


@triton.jit
def _carried(p, OPTIONS: tl.constexpr):
    """Probabilities `[64, BLOCK_K]` as a step hands them to the next; PACKED: `[64, BLOCK_K / 2]`,
    int32 numbers with an even column's in the lower half.

    Not to be called before the wait for the product of those before: it reads their registers.
    """
    if OPTIONS.PACKED:
        even, odd = tl.split(tl.reshape(p, [64, OPTIONS.BLOCK_K // 2, 2]))
        # By hand: the compiler would take 16-bit numbers apart again.
        KIND: tl.constexpr = "bf16x2" if OPTIONS.DTYPE == tl.bfloat16 else "f16x2"
        CONVERT: tl.constexpr = "cvt.rn." + KIND + ".f32 $0, $2, $1;"
        p = tl.inline_asm_elementwise(
            CONVERT, "=r,f,f", [even, odd], tl.int32, is_pure=False, pack=1
        )
    elif not OPTIONS.P_WIDE:
        p = p.to(OPTIONS.DTYPE)
    return p


@triton.jit
def _left_operand(weights, OPTIONS: tl.constexpr):
    """The probabilities `[64, BLOCK_K]` that `_carried` was given, in 16 bits."""
    if OPTIONS.PACKED:
        even = (weights & 0xFFFF).to(tl.int16).to(OPTIONS.DTYPE, bitcast=True)
        odd = (weights >> 16).to(tl.int16).to(OPTIONS.DTYPE, bitcast=True)
        p = tl.reshape(tl.join(even, odd), [64, OPTIONS.BLOCK_K])
    else:
        p = weights.to(OPTIONS.DTYPE)
    return p


@triton.jit
def first_step(consumer, q_tile, tile, top, total, OPTIONS: tl.constexpr):
    """(weights, top, total) after a CTA's first block; no product runs meanwhile.

    `top` and `total` are those of no keys.
    """
    tlx.barrier_wait(consumer.k_full[0], 0)
    _take_turn(OPTIONS)
    s = tlx.async_dot(q_tile, tlx.local_trans(consumer.k_tiles[0]))
    _pass_turn(OPTIONS)
    s = tlx.async_dot_wait(0, s)
    tlx.barrier_arrive(consumer.k_empty[0])
    j = _keys(consumer, tile, 0, OPTIONS.BLOCK_K)
    pairs = seen(consumer, tile, j, True, OPTIONS.NEAR, OPTIONS.HAS_RIGHT)
    top, total, weights, shrink = masked(s, pairs, top, total, consumer.scale, OPTIONS.WINDOW)
    weights = _carried(weights, OPTIONS)
    if OPTIONS.EARLY:
        _take_turn(OPTIONS)
    return weights, top, total


@triton.jit
def step(
    consumer,
    q_tile,
    tile,
    x,
    weights,
    out0,
    out1,
    top,
    total,
    count,
    OPTIONS: tl.constexpr,
    TAIL: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr,
):
    """Scores of the block x before a tile's last and, meanwhile, the output of the block before,
    whose probabilities `weights` has. `count` is the number of the consumer's blocks before.

    Returns (weights, out0, out1, top, total); with TAIL the output is that of the tile before.
    """
    STAGES: tl.constexpr = OPTIONS.STAGES
    j = _keys(consumer, tile, x, OPTIONS.BLOCK_K)
    st = count % STAGES
    before = (count - 1) % STAGES
    k_tile, k_full, k_empty = consumer.k_tiles[st], consumer.k_full[st], consumer.k_empty[st]
    k_phase = (count // STAGES) & 1
    v_tile, v_full = consumer.v_tiles[before], consumer.v_full[before]
    v_empty, v_phase = consumer.v_empty[before], ((count - 1) // STAGES) & 1
    tlx.barrier_wait(k_full, k_phase)
    if not OPTIONS.EARLY:
        _take_turn(OPTIONS)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tile))
    tlx.barrier_wait(v_full, v_phase)
    p = _left_operand(weights, OPTIONS)
    if OPTIONS.P_SHARED:
        tlx.local_store(consumer.p_tile, p)
        tlx.fence("async_shared")
        out0, out1 = _weigh(consumer.p_tile, v_tile, out0, out1, OPTIONS)
    else:
        out0, out1 = _weigh(p, v_tile, out0, out1, OPTIONS)
    _pass_turn(OPTIONS)
    s = tlx.async_dot_wait(OPTIONS.PIECES, s)
    tlx.barrier_arrive(k_empty)
    MASKED: tl.constexpr = TAIL or LEFT_EDGE or RIGHT_EDGE
    LAZY: tl.constexpr = OPTIONS.LAZY and not TAIL
    BLIND: tl.constexpr = MASKED and OPTIONS.WINDOW
    FLIPPED: tl.constexpr = OPTIONS.FLIPPED
    scale = consumer.scale
    if MASKED:
        pairs = seen(consumer, tile, j, TAIL, LEFT_EDGE, RIGHT_EDGE)
        if OPTIONS.LAZY:
            s = hidden(s, pairs, FLIPPED)
    if LAZY:
        weights, added = lazy(s, top, scale)
    elif MASKED and not OPTIONS.LAZY:
        top, total, weights, shrink = masked(s, pairs, top, total, scale, BLIND)
    else:
        top, total, weights, shrink = raised(s, top, total, scale, FLIPPED, BLIND)
    out0 = tlx.async_dot_wait(0, out0)
    if OPTIONS.PIECES == 2:
        out1 = tlx.async_dot_wait(0, out1)
    tlx.barrier_arrive(v_empty)
    weights = _carried(weights, OPTIONS)
    if LAZY:
        report(consumer.outgrown, top, added, OPTIONS)
    if OPTIONS.EARLY:  # between, as warps wait for each other here too
        _take_turn(OPTIONS)
    if LAZY:
        if reported(consumer.outgrown):
            top, total, again, shrink = raised(s, top, total, scale, FLIPPED, BLIND)
            weights = _carried(again, OPTIONS)
            out0, out1 = _shrunk(out0, out1, shrink, OPTIONS)
        else:
            total += added
    elif not TAIL:  # else it is the output of another tile
        out0, out1 = _shrunk(out0, out1, shrink, OPTIONS)
    return weights, out0, out1, top, total


@triton.jit
def _steps(
    x_begin,
    x_end,
    consumer,
    q_tile,
    tile,
    weights,
    out0,
    out1,
    top,
    total,
    count,
    OPTIONS: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr,
):
    """The steps from x_begin to x_end of a tile, after its first; step x has the block x before
    the last. An edge says that the window may end there within the block.
    """
    for x in tl.range(x_begin, x_end):
        weights, out0, out1, top, total = step(
            consumer, q_tile, tile, x, weights, out0, out1, top, total, count, OPTIONS, False,
            LEFT_EDGE, RIGHT_EDGE,
        )  # fmt: skip
        count += 1
    return weights, out0, out1, top, total, count


@triton.jit
def rest_of_tile(
    consumer,
    q_tile,
    tile,
    first,
    weights,
    out0,
    out1,
    top,
    total,
    count,
    OPTIONS: tl.constexpr,
):
    """All steps of a tile but the first: those at an edge of the window masked, the others not.

    `first` is the consumer's first query.
    """
    # Blocks before `inner` have keys that are right of the window of some query, from `outer` on
    # keys that are left of it.
    begin, blocks, keys, queries = tile.begin, tile.blocks, tile.keys, tile.queries
    inner = 1
    outer = blocks
    if OPTIONS.HAS_RIGHT:
        all_to = tl.minimum(first + keys - queries + consumer.right + 1, keys)
        inside = tl.maximum(all_to - begin, 0) // OPTIONS.BLOCK_K
        inner = tl.minimum(tl.maximum(blocks - inside, 1), blocks)
    if OPTIONS.HAS_LEFT:
        last = tl.minimum(first + 64, queries) - 1
        outside = tl.maximum(last + keys - queries - consumer.left - begin, 0) + OPTIONS.BLOCK_K - 1
        outer = tl.minimum(tl.maximum(blocks - outside // OPTIONS.BLOCK_K, 1), blocks)
    if OPTIONS.HAS_RIGHT:
        weights, out0, out1, top, total, count = _steps(
            1, tl.minimum(inner, outer), consumer, q_tile, tile, weights, out0, out1, top, total,
            count, OPTIONS, False, True,
        )  # fmt: skip
    if OPTIONS.NARROW:
        weights, out0, out1, top, total, count = _steps(
            outer, inner, consumer, q_tile, tile, weights, out0, out1, top, total, count, OPTIONS,
            True, True,
        )  # fmt: skip
    weights, out0, out1, top, total, count = _steps(
        inner, outer, consumer, q_tile, tile, weights, out0, out1, top, total, count, OPTIONS,
        False, False,
    )  # fmt: skip
    if OPTIONS.HAS_LEFT:
        weights, out0, out1, top, total, count = _steps(
            tl.maximum(inner, outer), blocks, consumer, q_tile, tile, weights, out0, out1, top,
            total, count, OPTIONS, True, False,
        )  # fmt: skip
    return weights, out0, out1, top, total, count


@triton.jit
def last_product(consumer, weights, out0, out1, count, OPTIONS: tl.constexpr):
    """(out0, out1) of a CTA's last tile, all of whose scores are worked off."""
    before = (count - 1) % OPTIONS.STAGES
    tlx.barrier_wait(consumer.v_full[before], ((count - 1) // OPTIONS.STAGES) & 1)
    p = _left_operand(weights, OPTIONS)
    out0, out1 = _weigh(p, consumer.v_tiles[before], out0, out1, OPTIONS)
    if OPTIONS.EARLY:
        _pass_turn(OPTIONS)
    out0 = tlx.async_dot_wait(0, out0)
    if OPTIONS.PIECES == 2:
        out1 = tlx.async_dot_wait(0, out1)
    return out0, out1

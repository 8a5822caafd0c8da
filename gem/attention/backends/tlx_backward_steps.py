"""What a consumer of `tlx_hopper_backward` does with tiles of queries.

A step has the queries of one barrier: one tile of 64 or, at dim 64, two of them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_backward_sums import in_registers_order


class Consumer(NamedTuple):
    """What consumers work with in every tile.

    Attributes:
        k_tiles: stages of the keys of both `[128, BLOCK_D]`; v_tiles: values `[64, BLOCK_D]`, one
            tile each.
        q_tiles, do_tiles: TILES * Q_STAGES tiles of queries and dout `[64, BLOCK_D]`.
        lse_tiles, delta_tiles: `[64]` for each of these; Q_STAGES barriers are for all four.
        ds_tiles: dS^T `[128, 64]` of both consumers, TILES for either of two steps.
        ds_stages: the same, `[64, 64]` of a consumer, to be written.
        dv_stages: for dV `[64, BLOCK_D]` and, with TILES 2, dK, in place of dS.
        left_full, left_empty: the barriers of dK and dV, one for each consumer; dS is written
            after the latter.
        sum_stages: for dQ, TILES stages of float32, and their barriers.
        dq_stages: in the same place, `[64, BLOCK_D]`, for dQ without sums.
        dk_stages: for dK, see `dk_place`; with TILES 1 after `k_read`: nobody reads the keys again.
        left, right: of the window.
        scale: of scores; natural_scale: of dK, and of dQ without sums.
    """

    k_tiles: tlx.buffered_tensor
    v_tiles: tlx.buffered_tensor
    k_full: tlx.mbarrier
    k_read: tlx.mbarrier
    v_full: tlx.mbarrier
    v_empty: tlx.mbarrier
    q_tiles: tlx.buffered_tensor
    do_tiles: tlx.buffered_tensor
    lse_tiles: tlx.buffered_tensor
    delta_tiles: tlx.buffered_tensor
    q_full: tlx.mbarrier
    q_empty: tlx.mbarrier
    ds_tiles: tlx.buffered_tensor
    ds_stages: tlx.buffered_tensor
    dv_stages: tlx.buffered_tensor
    left_full: tlx.mbarrier
    left_empty: tlx.mbarrier
    sum_stages: tlx.buffered_tensor
    dq_stages: tlx.buffered_tensor
    dk_stages: tlx.buffered_tensor
    sum_full: tlx.mbarrier
    sum_empty: tlx.mbarrier
    left: tl.tensor
    right: tl.tensor
    scale: tl.tensor
    natural_scale: tl.tensor


class Tile(NamedTuple):
    """A tile of keys, and a head whose queries see it.

    Not to be carried by a loop. Triton's cache does not see this class: its fields change together
    with the calls that fill them by position.

    Attributes:
        k_tile: the keys of both consumers `[128, BLOCK_D]`.
        j: this consumer's keys `[64]`, counted from the first query of step 0.
        number: of the consumer's tiles before.
        x_last: the tile's last step, or -1 where it is another head's.
        alone: whether dQ has no sums.
    """

    k_tile: tlx.buffered_tensor
    j: tl.tensor
    number: tl.tensor
    x_last: tl.tensor
    alone: tl.tensor


@triton.jit
def _probabilities(s, lse, begin, end, scale, EDGES: tl.constexpr):
    """P^T of scores `[64 keys, 64 queries]`: at most 1, whatever rounding does to the scores.

    EDGES: 1, with the queries before begin 0, 2, with those from end on, 3 for both; begin and end
    are `[64]` for each key, counted from the tile's first query.
    """
    p = tl.math.exp2(tl.minimum(s * scale - lse[None, :], 0.0))
    i = tl.arange(0, 64)[None, :]
    if EDGES % 2 == 1:
        p = tl.where(i >= begin[:, None], p, 0.0)
    if EDGES >= 2:
        p = tl.where(i < end[:, None], p, 0.0)
    return p


@triton.jit
def _window(consumer, tile, x, OPTIONS: tl.constexpr):
    """(begin, end) `[64]`: the queries that see each key, counted from the first one of step x."""
    j = tile.j - x * (64 * OPTIONS.TILES)
    return j - consumer.right, j + consumer.left + 1


@triton.jit
def _written_ds(consumer, ds_at):
    """dS `[64 queries, 128 keys]` for a product, once both consumers have written their part.

    The fence is here, for both: they go on without one.
    """
    ds = tlx.local_trans(consumer.ds_tiles[ds_at])
    tlx.fence("async_shared")
    return ds


@triton.jit
def _dq(consumer, tile, step, ds_at, u, last, OPTIONS: tl.constexpr):
    """Computes dQ of the consumer's step `step`, its tile u, whose dS is at ds_at.

    last: whether it is the tile's last step.
    """
    dq = tlx.async_dot(_written_ds(consumer, ds_at), tile.k_tile)
    dq = tlx.async_dot_wait(0, dq)
    if OPTIONS.TILES == 1:
        tlx.barrier_arrive(consumer.k_read[0], pred=last)
    _hand_over_dq(consumer, tile, step, dq, u, OPTIONS)


@triton.jit
def _hand_over_dq(consumer, tile, step, dq, u, OPTIONS: tl.constexpr):
    """Leaves dQ of the consumer's step `step`, its tile u, to `tlx_backward_copies.store_dq`."""
    tlx.barrier_wait(consumer.sum_empty[u], (step & 1) ^ 1)
    alone = tile.alone if OPTIONS.ALONE else False
    if alone:
        tlx.local_store(consumer.dq_stages[2 * u], (dq * consumer.natural_scale).to(OPTIONS.DTYPE))
    else:
        tlx.local_store(consumer.sum_stages[u], in_registers_order(dq, OPTIONS.BLOCK_D))
    tlx.barrier_arrive(consumer.sum_full[u])


@triton.jit
def _step_of_one(
    consumer, tile, x, dk, dv, count, cid: tl.constexpr, OPTIONS: tl.constexpr, EDGES: tl.constexpr
):
    """(dk, dv) after step x, the consumer's step `count`, with a tile of 64 queries.

    After a tile's last step the values are not needed. dQ is the consumers' task by turns.
    EDGES: as in `_probabilities`.
    """
    at, ds_at = count % OPTIONS.Q_STAGES, count % 2
    begin, end = _window(consumer, tile, x, OPTIONS)
    phase = (count // OPTIONS.Q_STAGES) & 1
    q_full, q_empty = consumer.q_full[at], consumer.q_empty[at]
    last, mine = x == tile.x_last, count % 2 == cid
    q_tiles, do_tiles = consumer.q_tiles, consumer.do_tiles
    keys = tlx.local_slice(tile.k_tile, [64 * cid, 0], [64, OPTIONS.BLOCK_D])
    tlx.barrier_wait(q_full, phase)
    if not EDGES:  # the load's time is that of the products
        lse = tlx.local_load(consumer.lse_tiles[at])
    s = tlx.async_dot(keys, tlx.local_trans(q_tiles[at]))
    dp = tlx.async_dot(consumer.v_tiles[cid], tlx.local_trans(do_tiles[at]))
    s = tlx.async_dot_wait(1, s)
    if EDGES:  # registers are short
        lse = tlx.local_load(consumer.lse_tiles[at])
    p = _probabilities(s, lse, begin, end, consumer.scale, EDGES)
    dv = tlx.async_dot(p.to(OPTIONS.DTYPE), do_tiles[at], dv)
    dp = tlx.async_dot_wait(1, dp)
    tlx.barrier_arrive(consumer.v_empty[cid], pred=last)
    ds = (p * (dp - tlx.local_load(consumer.delta_tiles[at])[None, :])).to(OPTIONS.DTYPE)
    if OPTIONS.WITH_DQ:
        tlx.barrier_wait(consumer.left_empty[ds_at], (tile.number & 1) ^ 1)
        tlx.local_store(consumer.ds_stages[2 * ds_at + cid], ds)
        if not mine:
            tlx.named_barrier_arrive(10 - cid, 256)
    dk = tlx.async_dot(ds, q_tiles[at], dk)
    dv = tlx.async_dot_wait(0, dv)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(q_empty)
    if OPTIONS.WITH_DQ:
        if mine:
            tlx.named_barrier_wait(9 + cid, 256)  # the other has written its dS
            _dq(consumer, tile, count, ds_at, 0, last, OPTIONS)
    return dk, dv


@triton.jit
def _step_of_two(
    consumer, tile, x, dk, dv, count, cid: tl.constexpr, OPTIONS: tl.constexpr, EDGES: tl.constexpr
):
    """As `_step_of_one`, with two tiles of 64 queries; each consumer computes dQ of one."""
    st, ds_at = count % OPTIONS.Q_STAGES, 2 * (count % 2)
    begin, end = _window(consumer, tile, x, OPTIONS)
    phase = (count // OPTIONS.Q_STAGES) & 1
    q_full, q_empty, at = consumer.q_full[st], consumer.q_empty[st], 2 * st
    last = x == tile.x_last
    q_tiles, do_tiles = consumer.q_tiles, consumer.do_tiles
    lse_tiles, delta_tiles = consumer.lse_tiles, consumer.delta_tiles
    ds_stages, scale = consumer.ds_stages, consumer.scale
    keys = tlx.local_slice(tile.k_tile, [64 * cid, 0], [64, OPTIONS.BLOCK_D])
    tlx.barrier_wait(q_full, phase)
    if not EDGES:
        lse0 = tlx.local_load(lse_tiles[at])
    s0 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at]))
    dp0 = tlx.async_dot(consumer.v_tiles[cid], tlx.local_trans(do_tiles[at]))
    s1 = tlx.async_dot(keys, tlx.local_trans(q_tiles[at + 1]))
    dp1 = tlx.async_dot(consumer.v_tiles[cid], tlx.local_trans(do_tiles[at + 1]))
    s0 = tlx.async_dot_wait(3, s0)
    if EDGES:
        lse0 = tlx.local_load(lse_tiles[at])
    else:
        delta0 = tlx.local_load(delta_tiles[at])
    p0 = _probabilities(s0, lse0, begin, end, scale, EDGES)
    dp0 = tlx.async_dot_wait(2, dp0)
    if EDGES:
        delta0 = tlx.local_load(delta_tiles[at])
    ds0 = (p0 * (dp0 - delta0[None, :])).to(OPTIONS.DTYPE)
    if OPTIONS.WITH_DQ:
        tlx.barrier_wait(consumer.left_empty[0], (tile.number & 1) ^ 1)
        tlx.local_store(ds_stages[2 * ds_at + cid], ds0)
    dv = tlx.async_dot(p0.to(OPTIONS.DTYPE), do_tiles[at], dv)
    dk = tlx.async_dot(ds0, q_tiles[at], dk)
    s1 = tlx.async_dot_wait(3, s1)
    lse1 = tlx.local_load(lse_tiles[at + 1])
    p1 = _probabilities(s1, lse1, begin - 64, end - 64, scale, EDGES)
    dp1 = tlx.async_dot_wait(2, dp1)
    tlx.barrier_arrive(consumer.v_empty[cid], pred=last)
    ds1 = (p1 * (dp1 - tlx.local_load(delta_tiles[at + 1])[None, :])).to(OPTIONS.DTYPE)
    if OPTIONS.WITH_DQ:
        tlx.barrier_wait(consumer.left_empty[1], (tile.number & 1) ^ 1)
        tlx.local_store(ds_stages[2 * ds_at + 2 + cid], ds1)
    dv = tlx.async_dot(p1.to(OPTIONS.DTYPE), do_tiles[at + 1], dv)
    dk = tlx.async_dot(ds1, q_tiles[at + 1], dk)
    if OPTIONS.WITH_DQ:
        tlx.named_barrier_wait(9, 256)  # both have written dS
        dq = tlx.async_dot(_written_ds(consumer, ds_at + cid), tile.k_tile)
        dv = tlx.async_dot_wait(1, dv)
        dk = tlx.async_dot_wait(1, dk)
        tlx.barrier_arrive(q_empty)
        dq = tlx.async_dot_wait(0, dq)
        _hand_over_dq(consumer, tile, count, dq, cid, OPTIONS)
    else:
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_empty)
    return dk, dv


@triton.jit
def steps(
    x_begin,
    x_end,
    consumer,
    tile,
    dk,
    dv,
    count,
    cid: tl.constexpr,
    OPTIONS: tl.constexpr,
    EDGES: tl.constexpr,
):
    """(dk, dv) after a head's steps from x_begin to x_end.

    count: of the consumer's steps before the head's first. EDGES: the window may begin (1) or end
    (2) for a key there.
    """
    for x in tl.range(x_begin, x_end):
        if OPTIONS.TILES == 1:
            dk, dv = _step_of_one(consumer, tile, x, dk, dv, count + x, cid, OPTIONS, EDGES)
        else:
            dk, dv = _step_of_two(consumer, tile, x, dk, dv, count + x, cid, OPTIONS, EDGES)
    return dk, dv


@triton.jit
def steps_without_keys(
    x_begin, x_end, consumer, tile, count, cid: tl.constexpr, OPTIONS: tl.constexpr
):
    """Steps of a consumer whose keys are past the sample's end, else as `steps`.

    It keeps to all barriers and takes its turns at dQ, to which its own dS adds 0.
    """
    TILES: tl.constexpr = OPTIONS.TILES
    for x in tl.range(x_begin, x_end):
        step = count + x
        st = step % OPTIONS.Q_STAGES
        ds_at = TILES * (step % 2)
        tlx.barrier_wait(consumer.q_full[st], (step // OPTIONS.Q_STAGES) & 1)
        last = x == tile.x_last
        tlx.barrier_arrive(consumer.v_empty[cid], pred=last)
        tlx.barrier_arrive(consumer.q_empty[st])
        if OPTIONS.WITH_DQ:
            zeros = tl.zeros([64, 64], OPTIONS.DTYPE)
            for u in tl.static_range(TILES):
                left = consumer.left_empty[u if TILES == 2 else ds_at]
                tlx.barrier_wait(left, (tile.number & 1) ^ 1)
                tlx.local_store(consumer.ds_stages[2 * (ds_at + u) + cid], zeros)
            if TILES == 2:
                tlx.named_barrier_wait(9, 256)
                _dq(consumer, tile, step, ds_at + cid, cid, last, OPTIONS)
            elif step % 2 == cid:
                tlx.named_barrier_wait(9 + cid, 256)
                _dq(consumer, tile, step, ds_at, 0, last, OPTIONS)
            else:
                tlx.named_barrier_arrive(10 - cid, 256)

"""What three single warps of `tlx_hopper_backward` do: one copies tiles in, the others results out.

A consumer that issued its copies itself would wait for the copy engine, which takes one at a time
and has those to shared memory to do as well: 1200 cycles at the end of every tile. One warp for all
results would keep dK and dV, in whose place dS comes next, until the last dQ has left.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_backward_tiles import dk_place, queries_of, steps_of, unit
from gem.attention.backends.tlx_common import (
    answer,
    ask,
    copy_rows,
    dealt_place,
    hand_over,
    handed_over,
    rows_of,
    store_rows,
    wait_for_writes,
)


@triton.jit
def _copy_statistics(x, buffer, barrier):
    """Copies a number of each of 64 queries."""
    tlx.async_load(x, buffer, bulk=True, bulk_size=256, barrier=barrier)


class Loads(NamedTuple):
    """Where tiles come from and go to, with the barriers of their stages.

    Attributes:
        k_tiles: K_STAGES of both consumers' keys; v_tiles: a consumer's values, for each.
        q_tiles, do_tiles, lse_tiles, delta_tiles: TILES * Q_STAGES.
    """

    desc_q: tl.tensor_descriptor
    desc_k: tl.tensor_descriptor
    desc_v: tl.tensor_descriptor
    desc_do: tl.tensor_descriptor
    LSE2: tl.tensor
    DELTA: tl.tensor
    k_tiles: tlx.buffered_tensor
    v_tiles: tlx.buffered_tensor
    q_tiles: tlx.buffered_tensor
    do_tiles: tlx.buffered_tensor
    lse_tiles: tlx.buffered_tensor
    delta_tiles: tlx.buffered_tensor
    k_full: tlx.mbarrier
    k_empty: tlx.mbarrier
    v_full: tlx.mbarrier
    v_empty: tlx.mbarrier
    q_full: tlx.mbarrier
    q_empty: tlx.mbarrier


@triton.jit
def load(to, ring, TABLE, COUNTER, single, pairs, units, stats, OPTIONS: tl.constexpr):
    """Copies all tiles in, and hands their numbers on."""
    TILE_BYTES: tl.constexpr = 64 * OPTIONS.BLOCK_D * 2
    BLOCK_Q: tl.constexpr = 64 * OPTIONS.TILES
    Q_BYTES: tl.constexpr = 2 * OPTIONS.TILES * (TILE_BYTES + 256)
    count = 0
    tile = 0
    number = tl.program_id(0)
    if OPTIONS.BY_COUNTER:
        taken = ask(COUNTER, True, 1, 32)
    turn = 0
    while number >= 0:
        first_row, rows = unit(number, single, pairs)
        if OPTIONS.BY_COUNTER:
            number = answer(taken, 1, 32)
            taken = ask(COUNTER, True, 1, 32)
        else:
            turn += 1
            number = turn * tl.num_programs(0) + dealt_place(turn, 1)
        number = tl.where(number < units, number, -1)
        next_row, _ = unit(number, single, pairs)
        for r in tl.range(first_row, first_row + rows):
            after = tl.where(r + 1 < first_row + rows, r + 1, next_row)
            hand_over(ring.numbers, ring.full, ring.empty, tile, after)
            row = TABLE + r * 10
            k_first, keys, first_j, kv_head = rows_of(row)
            out_first, queries, stats_first, q_begin, q_end = queries_of(row)
            q_first = 0 if OPTIONS.BROADCAST else out_first
            ks = tile % OPTIONS.K_STAGES
            tlx.barrier_wait(to.k_empty[ks], ((tile // OPTIONS.K_STAGES) & 1) ^ 1)
            tlx.barrier_expect_bytes(to.k_full[ks], 2 * TILE_BYTES)
            copy_rows(to.desc_k, to.k_tiles[ks], to.k_full[ks], k_first, keys, first_j, kv_head)
            blocks = steps_of(q_begin, q_end, OPTIONS)
            for g in tl.range(0, OPTIONS.GROUP):
                head = kv_head * OPTIONS.GROUP + g
                for x in tl.range(0, blocks):
                    m = q_begin + x * BLOCK_Q
                    st = count % OPTIONS.Q_STAGES
                    tlx.barrier_wait(to.q_empty[st], ((count // OPTIONS.Q_STAGES) & 1) ^ 1)
                    full = to.q_full[st]
                    tlx.barrier_expect_bytes(full, Q_BYTES)
                    for u in tl.static_range(OPTIONS.TILES):
                        at = OPTIONS.TILES * st + u
                        i = m + 64 * u
                        copy_rows(to.desc_q, to.q_tiles[at], full, q_first, queries, i, head)
                        copy_rows(to.desc_do, to.do_tiles[at], full, out_first, queries, i, head)
                        place = head.to(tl.int64) * stats + stats_first + i
                        _copy_statistics(to.LSE2 + place, to.lse_tiles[at], full)
                        _copy_statistics(to.DELTA + place, to.delta_tiles[at], full)
                    # The values' one stage becomes free later than that of these queries.
                    if (g == 0) & (x == 0):
                        for c in tl.static_range(2):
                            tlx.barrier_wait(to.v_empty[c], (tile & 1) ^ 1)
                            tlx.barrier_expect_bytes(to.v_full[c], TILE_BYTES)
                            copy_rows(
                                to.desc_v, to.v_tiles[c], to.v_full[c], k_first, keys,
                                first_j + 64 * c, kv_head,
                            )  # fmt: skip
                    count += 1
            tile += 1


class Stores(NamedTuple):
    """Where results are and go to, with the barriers of their stages.

    Attributes:
        sum_stages: dQ of a step, TILES, in float32, with sum_full and sum_empty.
        dq_stages: in the same place, 2 * TILES `[64, BLOCK_D]`: dQ without sums, every other one.
        dv_stages: in place of dS: TILES for each consumer, of dV and, with TILES 2, of dK.
        dk_stages: elsewhere with TILES 1, see `dk_place`.
        k_empty: the barriers of the keys, in whose place dK may be.
        left_full, left_empty: of dK and dV, one for each consumer.
    """

    desc_dk: tl.tensor_descriptor
    desc_dv: tl.tensor_descriptor
    desc_dq: tl.tensor_descriptor
    desc_sums: tl.tensor_descriptor
    sum_stages: tlx.buffered_tensor
    dq_stages: tlx.buffered_tensor
    dv_stages: tlx.buffered_tensor
    dk_stages: tlx.buffered_tensor
    sum_full: tlx.mbarrier
    sum_empty: tlx.mbarrier
    k_empty: tlx.mbarrier
    left_full: tlx.mbarrier
    left_empty: tlx.mbarrier


@triton.jit
def store_dq(of, ring, TABLE, single, pairs, OPTIONS: tl.constexpr):
    """Copies dQ of all tiles out.

    dQ of whole samples is written by the first tile of keys, to which the second adds; of one that
    is alone, with ALONE, there are no sums.
    """
    TILES: tl.constexpr = OPTIONS.TILES
    count = 0
    tile = 0
    number, _ = unit(tl.program_id(0), single, pairs)
    while number >= 0:
        row = TABLE + number * 10
        _, _, _, kv_head = rows_of(row)
        out_first, queries, stats_first, q_begin, q_end = queries_of(row)
        order = tl.load(row + 9) if OPTIONS.WHOLE else 0
        blocks = steps_of(q_begin, q_end, OPTIONS)
        if OPTIONS.WHOLE:
            if order == 2:  # the sums that the tile before has written are in place
                wait_for_writes()
        for g in tl.range(0, OPTIONS.GROUP):
            head = kv_head * OPTIONS.GROUP + g
            sums = q_begin if OPTIONS.BROADCAST else stats_first + q_begin
            sums = sums // 64 * OPTIONS.HEADS + head
            for x in tl.range(0, blocks):
                for u in tl.static_range(TILES):
                    tlx.barrier_wait(of.sum_full[u], count & 1)
                    tlx.fence("async_shared")  # the consumer leaves it to this warp
                    _store_dq(of, u, x * TILES + u, sums, out_first, queries, head, order, OPTIONS)
                tlx.async_descriptor_store_wait(0)
                for u in tl.static_range(TILES):
                    tlx.barrier_arrive(of.sum_empty[u])
                count += 1
        number = handed_over(ring.numbers, ring.full, ring.empty, tile)
        tile += 1


@triton.jit
def store_keys(of, ring, TABLE, single, pairs, OPTIONS: tl.constexpr):
    """Copies dK and dV of all tiles out; those of the first consumer do not wait for a last dQ."""
    TILES: tl.constexpr = OPTIONS.TILES
    tile = 0
    number, _ = unit(tl.program_id(0), single, pairs)
    while number >= 0:
        k_first, keys, first_j, kv_head = rows_of(TABLE + number * 10)
        for c in tl.static_range(2):
            j = first_j + 64 * c
            tlx.barrier_wait(of.left_full[c], tile & 1)
            tlx.fence("async_shared")  # as in `store_dq`
            store_rows(of.desc_dv, of.dv_stages[TILES * c], k_first, keys, j, kv_head)
            dk_stage = of.dk_stages[dk_place(tile, c, OPTIONS)]
            store_rows(of.desc_dk, dk_stage, k_first, keys, j, kv_head)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(of.left_empty[c])
        tlx.barrier_arrive(of.k_empty[tile % OPTIONS.K_STAGES])
        number = handed_over(ring.numbers, ring.full, ring.empty, tile)
        tile += 1


@triton.jit
def _store_dq(of, u, number, sums, out_first, queries, head, order, OPTIONS: tl.constexpr):
    """Adds a tile of 64 queries' dQ, the head's `number`, to the sums, or writes them, or dQ."""
    alone = order == 3 if OPTIONS.ALONE else False
    if alone:
        store_rows(of.desc_dq, of.dq_stages[2 * u], out_first, queries, 64 * number, head)
    else:
        place = (sums + number * OPTIONS.HEADS) * (2 * OPTIONS.BLOCK_D)
        # Without ALONE the only tile (3) is a first one too.
        fresh = order == 1 if OPTIONS.ALONE else order % 2 == 1
        if fresh:
            tlx.async_descriptor_store(of.desc_sums, of.sum_stages[u], [place, 0])
        else:
            tlx.async_descriptor_store(
                of.desc_sums, of.sum_stages[u], [place, 0], store_reduce="add"
            )

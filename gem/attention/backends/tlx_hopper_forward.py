"""The forward kernel for Hopper (sm_90a) in TLX: warp-specialised and persistent.

A CTA has one producer, which copies tiles to shared memory by TMA, and CONSUMERS warp groups, each
with 64 queries of a tile. It walks its share of the tiles (`dealing.dealt_tiles`) as one stream of
key blocks: the product of a block's scores is issued before the previous block's product of
probabilities and values, also where the block belongs to the next tile, so that a tile's last
product and the next one's first softmax run at the same time.

Key blocks go from the last to the first. The first step of a tile has the sample's tail and is
masked; without a window no other step is. TMA descriptors are ragged (`tlx_common`): what lies past
a sample's end reads as 0 and is never written, so that no step touches a neighbour's rows.

With COUNTER a CTA does not know its tiles in advance: the producer takes the next one from a
counter in global memory when it is near, and hands its number to the consumers. This is what
Cluster Launch Control does on Blackwell.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import (
    TILE_STAGES,
    answer,
    ask,
    copy_rows,
    dealt_turns,
    hand_over,
    handed_over,
    rows_of,
    store_rows,
)
from gem.attention.backends.tlx_forward_steps import (
    Consumer,
    Options,
    Tile,
    first_step,
    last_product,
    rest_of_tile,
    step,
)
from gem.attention.backends.tlx_forward_tiles import keys_of, most_turns, row_of


@triton.jit
def _finish(
    out0,
    out1,
    top,
    total,
    desc_out,
    stage,
    LSE,
    PARTS,
    PART_LSE,
    row,
    skip,
    HEADS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Writes the output and the log-sum-exp of a tile's 64 queries from `skip` on.

    A part's go to PARTS and PART_LSE, float32 `[parts, 64 * CONSUMERS, BLOCK_D]` and `[parts, 64 *
    CONSUMERS]`, which are None if no tile is in parts.
    """
    # Loaded again rather than kept in registers through the tile.
    out_first, queries, first_i, head = rows_of(row)
    lse = (top + tl.math.log2(total)) * 0.6931471805599453
    if OPTIONS.WINDOW:
        lse = tl.where(total == 0.0, -float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    inverse = (1.0 / total)[:, None]
    rows = skip + tl.arange(0, 64)
    if PARTS is not None:
        part = tl.load(row + 8)
        is_part = part >= 0
        WIDTH: tl.constexpr = out0.shape[1]
        place = part.to(tl.int64) * (64 * OPTIONS.CONSUMERS) + rows
        at = PARTS + place[:, None] * (OPTIONS.PIECES * WIDTH) + tl.arange(0, WIDTH)[None, :]
        # As a product's threads have it: any other layout would be made in shared memory.
        THREADS: tl.constexpr = tlx.layout(
            shape=((4, 8, 4), (2, 2, WIDTH // 8)),
            stride=((2, WIDTH, 16 * WIDTH), (1, 8 * WIDTH, 8)),
        )
        at = tlx.require_layout(at, THREADS)
        tl.store(at, tlx.require_layout(out0 * inverse, THREADS), mask=is_part)
        if OPTIONS.PIECES == 2:
            tl.store(at + WIDTH, tlx.require_layout(out1 * inverse, THREADS), mask=is_part)
        tl.store(PART_LSE + place, lse, mask=is_part)
        queries = tl.where(is_part, 0, queries)  # so that nothing of it is written below
    tlx.async_descriptor_store_wait(0)  # the last tile's copy has left the stage
    if OPTIONS.PIECES == 1:
        tlx.local_store(stage, (out0 * inverse).to(tlx.dtype_of(desc_out)))
    else:
        half0 = tlx.local_slice(stage, [0, 0], [64, 64])
        half1 = tlx.local_slice(stage, [0, 64], [64, 64])
        tlx.local_store(half0, (out0 * inverse).to(tlx.dtype_of(desc_out)))
        tlx.local_store(half1, (out1 * inverse).to(tlx.dtype_of(desc_out)))
    tlx.fence("async_shared")
    store_rows(desc_out, stage, out_first, queries, first_i + skip, head)
    i = first_i + rows
    tl.store(LSE + (out_first + i).to(tl.int64) * HEADS + head, lse, mask=i < queries)


@triton.jit(do_not_specialize=["tiles", "left", "right"])
def hopper_forward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_out,
    LSE,
    PARTS,
    PART_LSE,
    TILES,
    COUNTERS,
    tiles,
    scale,
    left,
    right,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BROADCAST: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    NARROW: tl.constexpr,
    NEAR: tl.constexpr,
    FLIPPED: tl.constexpr,
    CONSUMERS: tl.constexpr,
    TEAM: tl.constexpr,
    KEEP_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    Q_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    PING_PONG: tl.constexpr,
    P_SHARED: tl.constexpr,
    P_WIDE: tl.constexpr,
    PACKED: tl.constexpr,
    LAZY: tl.constexpr,
    COUNTER: tl.constexpr,
):
    """out and lse of all tiles. `scale` holds log2(e) too; FLIPPED says that it is negative.

    Grid: as many CTAs as run at once, a multiple of TEAM. Every tile sees a key. With KEEP_Q every
    TEAM-th tile has the same queries and head, which a CTA then keeps for its life. With COUNTER
    `COUNTERS` are TEAM int32 zeros, one for each of these queries and heads. NARROW: a window may
    begin and end in one block of keys; NEAR: it may begin in the last block that a tile sees. PARTS
    and PART_LSE are the results of tiles in parts, see `_finish`.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    WINDOW: tl.constexpr = HAS_LEFT or HAS_RIGHT
    SOME_KEYS: tl.constexpr = WINDOW or PARTS is not None
    PIECES: tl.constexpr = BLOCK_D // BLOCK_K if BLOCK_D > BLOCK_K else 1
    WIDTH: tl.constexpr = BLOCK_D // PIECES
    # With one tile of queries in shared memory a consumer would wait for the next tile's while the
    # other, which still reads them, waits for its turn.
    EARLY: tl.constexpr = LAZY and Q_STAGES > 1
    KV_BYTES: tl.constexpr = BLOCK_K * BLOCK_D * 2
    Q_BYTES: tl.constexpr = 64 * CONSUMERS * BLOCK_D * 2
    q_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS * Q_STAGES)
    k_tiles = tlx.local_alloc((BLOCK_K, BLOCK_D), DTYPE, STAGES)
    v_tiles = tlx.local_alloc((BLOCK_K, BLOCK_D), DTYPE, STAGES)
    out_tiles = tlx.local_alloc((64, BLOCK_D), DTYPE, CONSUMERS)
    if P_SHARED:
        p_tiles = tlx.local_alloc((64, BLOCK_K), DTYPE, CONSUMERS)
    else:  # not used
        p_tiles = q_tiles
    if LAZY:
        outgrown = tlx.local_alloc((4,), tl.int8, CONSUMERS)
    else:  # not used
        outgrown = q_tiles
    q_full = tlx.alloc_barriers(Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_barriers(Q_STAGES, arrive_count=CONSUMERS)
    k_full = tlx.alloc_barriers(STAGES, arrive_count=1)
    v_full = tlx.alloc_barriers(STAGES, arrive_count=1)
    # Every thread arrives: a barrier with one arrival per warp group costs two more of its own.
    k_empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)
    v_empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)
    if COUNTER:
        numbers = tlx.local_alloc((1,), tl.int32, TILE_STAGES)
        tile_full = tlx.alloc_warp_barrier(TILE_STAGES, 4)
        tile_empty = tlx.alloc_warp_barrier(TILE_STAGES, 4, CONSUMERS)
        turns = most_turns(tiles)
    else:  # the ring is not used
        numbers, tile_full, tile_empty = q_tiles, q_full, q_empty
        turns = dealt_turns(tiles, TEAM)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            count = 0
            number = tl.program_id(0)
            if COUNTER:
                taken = ask(COUNTERS, True, TEAM, 128)
            row = row_of(TILES, 0, turns, number, TEAM, COUNTER)
            k_first, keys, begin, end = keys_of(row, SOME_KEYS)
            out_first, queries, first_i, head = rows_of(row)
            for turn in tl.range(0, turns):
                for _ in tl.range(0, (number >= 0).to(tl.int32) if COUNTER else 1):
                    # Loaded one turn ahead: the table's latency would hold up a tile's first copy.
                    if COUNTER:
                        number = answer(taken, TEAM, 128)
                        number = tl.where(number < tiles, number, -1)
                        # Nobody would work on what the bound leaves no turn for.
                        taken = ask(COUNTERS, turn + 2 < turns, TEAM, 128)
                        hand_over(numbers, tile_full, tile_empty, turn, number)
                    row = row_of(TILES, turn + 1, turns, number, TEAM, COUNTER)
                    n_k_first, n_keys, n_begin, n_end = keys_of(row, SOME_KEYS)
                    n_out_first, n_queries, n_first_i, n_head = rows_of(row)
                    q_first = 0 if BROADCAST else out_first
                    qs = turn % Q_STAGES
                    if not KEEP_Q or turn == 0:
                        tlx.barrier_wait(q_empty[qs], ((turn // Q_STAGES) & 1) ^ 1)
                        tlx.barrier_expect_bytes(q_full[qs], Q_BYTES)
                        for c in tl.static_range(CONSUMERS):
                            copy_rows(
                                desc_q,
                                q_tiles[qs * CONSUMERS + c],
                                q_full[qs],
                                q_first,
                                queries,
                                first_i + 64 * c,
                                head,
                            )
                    blocks = (end - begin + BLOCK_K - 1) // BLOCK_K
                    for x in tl.range(0, blocks):
                        j = begin + (blocks - 1 - x) * BLOCK_K
                        st = count % STAGES
                        phase = ((count // STAGES) & 1) ^ 1
                        tlx.barrier_wait(k_empty[st], phase)
                        tlx.barrier_expect_bytes(k_full[st], KV_BYTES)
                        copy_rows(desc_k, k_tiles[st], k_full[st], k_first, keys, j, head // GROUP)
                        tlx.barrier_wait(v_empty[st], phase)
                        tlx.barrier_expect_bytes(v_full[st], KV_BYTES)
                        copy_rows(desc_v, v_tiles[st], v_full[st], k_first, keys, j, head // GROUP)
                        count += 1
                    k_first, keys, begin, end = n_k_first, n_keys, n_begin, n_end
                    out_first, queries, first_i, head = n_out_first, n_queries, n_first_i, n_head

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS):
            cid: tl.constexpr = tlx.async_task_replica_id()
            OPTIONS: tl.constexpr = Options(
                cid=cid, CONSUMERS=CONSUMERS, BLOCK_K=BLOCK_K, PIECES=PIECES, STAGES=STAGES,
                WINDOW=WINDOW, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, NARROW=NARROW, NEAR=NEAR,
                FLIPPED=FLIPPED, PING_PONG=PING_PONG, P_SHARED=P_SHARED, P_WIDE=P_WIDE,
                PACKED=PACKED, LAZY=LAZY, EARLY=EARLY, DTYPE=DTYPE,
            )  # fmt: skip
            consumer = Consumer(
                k_tiles=k_tiles, k_full=k_full, k_empty=k_empty,
                v_tiles=v_tiles, v_full=v_full, v_empty=v_empty,
                p_tile=p_tiles[cid if P_SHARED else 0], outgrown=outgrown[cid if LAZY else 0],
                columns=tl.arange(0, BLOCK_K), left=left, right=right, scale=scale,
            )  # fmt: skip
            if PING_PONG and cid == CONSUMERS - 1:
                tlx.named_barrier_arrive(9, 256)
            number = tl.program_id(0)
            done, next_number = number, number
            if COUNTER:
                next_number = handed_over(numbers, tile_full, tile_empty, 0)
            row = row_of(TILES, 0, turns, number, TEAM, COUNTER)
            k_first, keys, begin, end = keys_of(row, SOME_KEYS)
            next_k_first, next_keys, next_begin, next_end = keys_of(
                row_of(TILES, 1, turns, next_number, TEAM, COUNTER), SOME_KEYS
            )
            out_first, queries, first_i, head = rows_of(row)
            i = first_i + cid * 64 + tl.arange(0, 64)
            blocks = (end - begin + BLOCK_K - 1) // BLOCK_K
            nothing = tl.full([64], -float("inf"), tl.float32)
            zero = tl.zeros([64], tl.float32)
            tlx.barrier_wait(q_full[0], 0)
            weights, top, total = first_step(
                consumer,
                q_tiles[cid],
                Tile(i, begin, blocks, keys, queries),
                nothing,
                zero,
                OPTIONS,
            )
            out0 = tl.zeros([64, WIDTH], tl.float32)
            out1 = tl.zeros([64, WIDTH], tl.float32)
            count = 1  # key blocks whose scores have been worked off
            qs = 0
            for turn in tl.range(1, turns):
                # A loop for a condition: in a `while` products and their results would get other
                # layouts and be copied between them at every step.
                for _ in tl.range(0, (next_number >= 0).to(tl.int32) if COUNTER else 1):
                    weights, out0, out1, top, total, count = rest_of_tile(
                        consumer, q_tiles[qs * CONSUMERS + cid],
                        Tile(i, begin, blocks, keys, queries), first_i + cid * 64, weights, out0,
                        out1, top, total, count, OPTIONS,
                    )  # fmt: skip
                    # The next tile's first block, while this tile's last product runs.
                    if not KEEP_Q:
                        tlx.barrier_arrive(q_empty[qs])
                    if COUNTER:
                        done, number = number, next_number
                        next_number = handed_over(numbers, tile_full, tile_empty, turn)
                    row = row_of(TILES, turn, turns, number, TEAM, COUNTER)
                    keys, begin, end = next_keys, next_begin, next_end
                    next_k_first, next_keys, next_begin, next_end = keys_of(
                        row_of(TILES, turn + 1, turns, next_number, TEAM, COUNTER), SOME_KEYS
                    )
                    blocks = (end - begin + BLOCK_K - 1) // BLOCK_K
                    if WINDOW:
                        out_first, queries, first_i, head = rows_of(row)
                        i = first_i + cid * 64 + tl.arange(0, 64)
                    if not KEEP_Q:
                        qs = turn % Q_STAGES
                        tlx.barrier_wait(q_full[qs], (turn // Q_STAGES) & 1)
                    weights, out0, out1, new_top, new_total = step(
                        consumer, q_tiles[qs * CONSUMERS + cid],
                        Tile(i, begin, blocks, keys, queries), 0, weights, out0, out1, nothing,
                        zero, count, OPTIONS, True, NEAR, HAS_RIGHT,
                    )  # fmt: skip
                    count += 1
                    _finish(
                        out0, out1, top, total, desc_out, out_tiles[cid], LSE, PARTS, PART_LSE,
                        row_of(TILES, turn - 1, turns, done, TEAM, COUNTER), 64 * cid, HEADS,
                        OPTIONS,
                    )  # fmt: skip
                    top, total = new_top, new_total
                    out0 = tl.zeros([64, WIDTH], tl.float32)
                    out1 = tl.zeros([64, WIDTH], tl.float32)
            weights, out0, out1, top, total, count = rest_of_tile(
                consumer, q_tiles[qs * CONSUMERS + cid], Tile(i, begin, blocks, keys, queries),
                first_i + cid * 64, weights, out0, out1, top, total, count, OPTIONS,
            )  # fmt: skip
            out0, out1 = last_product(consumer, weights, out0, out1, count, OPTIONS)
            _finish(
                out0, out1, top, total, desc_out, out_tiles[cid], LSE, PARTS, PART_LSE,
                row_of(TILES, turns - 1, turns, number, TEAM, COUNTER), 64 * cid, HEADS, OPTIONS,
            )  # fmt: skip
            tlx.async_descriptor_store_wait(0)

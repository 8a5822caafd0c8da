"""The forward kernel for Hopper (sm_90a) in TLX: warp-specialised and persistent.

A CTA has one producer, which copies tiles to shared memory by TMA, and CONSUMERS warp groups, each
with 64 queries of a tile. It walks its share of the tiles (`schedule.dealt_tiles`) as one stream of
key blocks: the product of a block's scores is issued before the previous block's product of
probabilities and values, also where the block belongs to the next tile, so that a tile's last
product and the next one's first softmax run at the same time.

Key blocks go from the last to the first. The first step of a tile has the sample's tail and is
masked; without a window no other step is. TMA descriptors are ragged (`tlx_common`): what lies past
a sample's end reads as 0 and is never written, so that no step touches a neighbour's rows.

The accumulator of a product is in registers, and the probabilities are its left operand from there.
Their registers are not written again before the product has been waited for (triton-lang/triton
issue 9433; ptxas before 13.3 gets this wrong by itself, issue 11781). P_SHARED takes them through
shared memory instead, to hold the two against each other.

With COUNTER a CTA does not know its tiles in advance: the producer takes the next one from a
counter in global memory when it is near, and hands its number to the consumers. This is what
Cluster Launch Control does on Blackwell.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import copy_rows, dealt_place, dealt_turns, store_rows


@triton.jit
def _row(TILES, turn, turns, tile, TEAM: tl.constexpr, COUNTER: tl.constexpr):
    """The table's row of a turn, or of the counter's tile; some row where there is no other."""
    if COUNTER:
        place = tl.maximum(tile, 0)
    else:
        turn = tl.minimum(turn, turns - 1)
        place = turn * tl.num_programs(0) + dealt_place(turn, TEAM)
    return TILES + place * 8


@triton.jit
def _most_turns(tiles):
    """How many tiles a CTA may take by the counter: half as many again as its share, and two.

    A loop needs a bound, up to which it then idles; all CTAs' bounds together are above `tiles`.
    """
    share = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    return share + share // 2 + 2


@triton.jit
def _ask(COUNTERS, wanted, TEAM: tl.constexpr):
    """Asks for another tile; nothing waits until `_answer` reads what the first thread got.

    That is why it is a tensor: Triton waits for a scalar at once, to hand it to all threads.
    """
    lanes = tl.arange(0, 128)
    counter = COUNTERS + tl.program_id(0) % TEAM + lanes * 0
    return tl.atomic_add(counter, 1, mask=(lanes == 0) & wanted, sem="relaxed")


@triton.jit
def _answer(taken, TEAM: tl.constexpr):
    """The number of the tile that `_ask` took. The first tile of each CTA is not counted."""
    number = tl.sum(tl.where(tl.arange(0, 128) == 0, taken, 0), 0)
    return (tl.num_programs(0) // TEAM + number) * TEAM + tl.program_id(0) % TEAM


@triton.jit
def _handed_over(numbers, full, empty, turn, TILE_STAGES: tl.constexpr):
    """The tile after that of this turn, from the producer; -1 if there is none."""
    slot = turn % TILE_STAGES
    tlx.barrier_wait(full[slot], (turn // TILE_STAGES) & 1)
    number = tl.max(tlx.local_load(numbers[slot]), 0)
    tlx.barrier_arrive(empty[slot])
    return number


@triton.jit
def _keys(row, WINDOW: tl.constexpr):
    """(first row, number) of the sample's keys, and (first, end) of those that the tile sees."""
    keys = tl.load(row + 1)
    if WINDOW:
        return tl.load(row), keys, tl.load(row + 2), tl.load(row + 3)
    return tl.load(row), keys, 0, keys


@triton.jit
def _queries(row):
    """(first output row, queries) of the sample, (first query, head) of the tile."""
    return tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)


@triton.jit
def _take_turn(PING_PONG: tl.constexpr, cid: tl.constexpr):
    """Waits until it is this consumer's turn to issue products."""
    if PING_PONG:
        tlx.named_barrier_wait(9 + cid, 256)


@triton.jit
def _pass_turn(PING_PONG: tl.constexpr, cid: tl.constexpr, CONSUMERS: tl.constexpr):
    """Lets the next consumer issue its products."""
    if PING_PONG:
        tlx.named_barrier_arrive(9 + (cid + 1) % CONSUMERS, 256)


@triton.jit
def _seen(
    i,
    j,
    keys,
    queries,
    left,
    right,
    TAIL: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr,
):
    """Whether query i `[64]` sees key j `[BLOCK_K]`: `[64, BLOCK_K]`, or `[1, BLOCK_K]`.

    Only what can fail is asked: TAIL, whether the key is there, and the edges of the window.
    """
    if RIGHT_EDGE:
        end = i + keys - queries + right + 1
        if TAIL:
            end = tl.minimum(end, keys)
        seen = j[None, :] < end[:, None]
    else:
        seen = (j < keys)[None, :]
    if LEFT_EDGE:
        seen = seen & (j[None, :] >= (i + keys - queries - left)[:, None])
    return seen


@triton.jit
def _masked(s, seen, top, total, scale, WINDOW: tl.constexpr):
    """(top, total, p, shrink) after a block of which only the pairs `seen` count."""
    s = tl.where(seen, s * scale, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    finite = new_top
    if WINDOW:  # else every query has seen a key by now
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.math.exp2(s - finite[:, None])
    shrink = tl.math.exp2(top - finite)
    return new_top, total * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def _full(s, top, total, scale, FLIPPED: tl.constexpr):
    """(top, total, p, shrink) after a block of which every pair counts."""
    highest = (tl.min(s, 1) if FLIPPED else tl.max(s, 1)) * scale
    new_top = tl.maximum(top, highest)
    p = tl.math.exp2(s * scale - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    return new_top, total * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def _weigh(p, v_tile, out0, out1, BLOCK_K: tl.constexpr, PIECES: tl.constexpr):
    """(out0, out1) with the product of probabilities and values added, by halves of the columns.

    Products of one width have one layout. With scores of 64 columns and an output of 128 the
    compiler would carry the output in two layouts and copy it at every step.
    """
    if PIECES == 1:
        out0 = tlx.async_dot(p, v_tile, out0)
    else:
        out0 = tlx.async_dot(p, tlx.local_slice(v_tile, [0, 0], [BLOCK_K, 64]), out0)
        out1 = tlx.async_dot(p, tlx.local_slice(v_tile, [0, 64], [BLOCK_K, 64]), out1)
    return out0, out1


@triton.jit
def _step(
    q_tile,
    k_tile,
    k_full,
    k_empty,
    k_phase,
    v_tile,
    v_full,
    v_empty,
    v_phase,
    p_tile,
    weights,
    out0,
    out1,
    top,
    total,
    i,
    j,
    keys,
    queries,
    left,
    right,
    scale,
    cid: tl.constexpr,
    CONSUMERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
    TAIL: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr,
    FLIPPED: tl.constexpr,
    PING_PONG: tl.constexpr,
    P_SHARED: tl.constexpr,
    P_WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Scores of a block and, meanwhile, the output of the block before, whose probabilities p has.

    Returns (weights, out0, out1, top, total, shrink); the output is that of before, not yet shrunk.
    """
    tlx.barrier_wait(k_full, k_phase)
    _take_turn(PING_PONG, cid)
    s = tlx.async_dot(q_tile, tlx.local_trans(k_tile))
    tlx.barrier_wait(v_full, v_phase)
    p = weights.to(DTYPE)
    if P_SHARED:
        tlx.local_store(p_tile, p)
        tlx.fence("async_shared")
        out0, out1 = _weigh(p_tile, v_tile, out0, out1, BLOCK_K, PIECES)
    else:
        out0, out1 = _weigh(p, v_tile, out0, out1, BLOCK_K, PIECES)
    _pass_turn(PING_PONG, cid, CONSUMERS)
    s = tlx.async_dot_wait(PIECES, s)
    tlx.barrier_arrive(k_empty)
    if TAIL or LEFT_EDGE or RIGHT_EDGE:
        seen = _seen(i, j, keys, queries, left, right, TAIL, LEFT_EDGE, RIGHT_EDGE)
        top, total, weights, shrink = _masked(s, seen, top, total, scale, WINDOW)
    else:
        top, total, weights, shrink = _full(s, top, total, scale, FLIPPED)
    out0 = tlx.async_dot_wait(0, out0)
    if PIECES == 2:
        out1 = tlx.async_dot_wait(0, out1)
    tlx.barrier_arrive(v_empty)
    if not P_WIDE:  # not before the wait: the product reads the registers of these numbers
        weights = weights.to(DTYPE)
    return weights, out0, out1, top, total, shrink


@triton.jit
def _steps(
    x_begin,
    x_end,
    q_tile,
    k_tiles,
    k_full,
    k_empty,
    v_tiles,
    v_full,
    v_empty,
    p_tile,
    weights,
    out0,
    out1,
    top,
    total,
    count,
    i,
    begin,
    blocks,
    keys,
    queries,
    left,
    right,
    scale,
    columns,
    cid: tl.constexpr,
    CONSUMERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr,
    WINDOW: tl.constexpr,
    FLIPPED: tl.constexpr,
    PING_PONG: tl.constexpr,
    P_SHARED: tl.constexpr,
    P_WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The steps from x_begin to x_end of a tile, after its first; step x has the block x before
    the last. An edge says that the window may end there within the block.
    """
    for x in tl.range(x_begin, x_end):
        j = begin + (blocks - 1 - x) * BLOCK_K + columns
        st = count % STAGES
        before = (count - 1) % STAGES
        weights, out0, out1, top, total, shrink = _step(
            q_tile, k_tiles[st], k_full[st], k_empty[st], (count // STAGES) & 1,
            v_tiles[before], v_full[before], v_empty[before], ((count - 1) // STAGES) & 1,
            p_tile, weights, out0, out1, top, total, i, j, keys, queries, left, right, scale, cid,
            CONSUMERS, BLOCK_K, PIECES, WINDOW, False, LEFT_EDGE, RIGHT_EDGE, FLIPPED, PING_PONG,
            P_SHARED, P_WIDE, DTYPE,
        )  # fmt: skip
        out0 = out0 * shrink[:, None]
        if PIECES == 2:
            out1 = out1 * shrink[:, None]
        count += 1
    return weights, out0, out1, top, total, count


@triton.jit
def _rest_of_tile(
    q_tile,
    k_tiles,
    k_full,
    k_empty,
    v_tiles,
    v_full,
    v_empty,
    p_tile,
    weights,
    out0,
    out1,
    top,
    total,
    count,
    i,
    begin,
    blocks,
    keys,
    queries,
    left,
    right,
    scale,
    columns,
    first,
    cid: tl.constexpr,
    CONSUMERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    NARROW: tl.constexpr,
    FLIPPED: tl.constexpr,
    PING_PONG: tl.constexpr,
    P_SHARED: tl.constexpr,
    P_WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """All steps of a tile but the first: those at an edge of the window masked, the others not."""
    WINDOW: tl.constexpr = HAS_LEFT or HAS_RIGHT
    # Blocks before `inner` have keys that are right of the window of some query, from `outer` on
    # keys that are left of it.
    inner = 1
    outer = blocks
    if HAS_RIGHT:
        all_to = tl.minimum(first + keys - queries + right + 1, keys)
        inside = tl.maximum(all_to - begin, 0) // BLOCK_K
        inner = tl.minimum(tl.maximum(blocks - inside, 1), blocks)
    if HAS_LEFT:
        last = tl.minimum(first + 64, queries) - 1
        outside = tl.maximum(last + keys - queries - left - begin, 0) + BLOCK_K - 1
        outer = tl.minimum(tl.maximum(blocks - outside // BLOCK_K, 1), blocks)
    if HAS_RIGHT:
        weights, out0, out1, top, total, count = _steps(
            1, tl.minimum(inner, outer), q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty,
            p_tile, weights, out0, out1, top, total, count, i, begin, blocks, keys, queries, left,
            right, scale, columns, cid, CONSUMERS, BLOCK_K, PIECES, STAGES, False, True, WINDOW,
            FLIPPED, PING_PONG, P_SHARED, P_WIDE, DTYPE,
        )  # fmt: skip
    if NARROW:
        weights, out0, out1, top, total, count = _steps(
            outer, inner, q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, p_tile,
            weights, out0, out1, top, total, count, i, begin, blocks, keys, queries, left, right,
            scale, columns, cid, CONSUMERS, BLOCK_K, PIECES, STAGES, True, True, WINDOW, FLIPPED,
            PING_PONG, P_SHARED, P_WIDE, DTYPE,
        )  # fmt: skip
    weights, out0, out1, top, total, count = _steps(
        inner, outer, q_tile, k_tiles, k_full, k_empty, v_tiles, v_full, v_empty, p_tile, weights,
        out0, out1, top, total, count, i, begin, blocks, keys, queries, left, right, scale, columns,
        cid, CONSUMERS, BLOCK_K, PIECES, STAGES, False, False, WINDOW, FLIPPED, PING_PONG, P_SHARED,
        P_WIDE, DTYPE,
    )  # fmt: skip
    if HAS_LEFT:
        weights, out0, out1, top, total, count = _steps(
            tl.maximum(inner, outer), blocks, q_tile, k_tiles, k_full, k_empty, v_tiles, v_full,
            v_empty, p_tile, weights, out0, out1, top, total, count, i, begin, blocks, keys,
            queries, left, right, scale, columns, cid, CONSUMERS, BLOCK_K, PIECES, STAGES, True,
            False, WINDOW, FLIPPED, PING_PONG, P_SHARED, P_WIDE, DTYPE,
        )  # fmt: skip
    return weights, out0, out1, top, total, count


@triton.jit
def _finish(
    out0,
    out1,
    top,
    total,
    desc_out,
    stage,
    LSE,
    row,
    skip,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Writes the output and the log-sum-exp of a tile's 64 queries from `skip` on."""
    # Loaded again rather than kept in registers through the tile.
    out_first, queries, first_i, head = _queries(row)
    first_i += skip
    lse = (top + tl.math.log2(total)) * 0.6931471805599453
    if WINDOW:
        lse = tl.where(total == 0.0, -float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    inverse = (1.0 / total)[:, None]
    tlx.async_descriptor_store_wait(0)  # the last tile's copy has left the stage
    if PIECES == 1:
        tlx.local_store(stage, (out0 * inverse).to(tlx.dtype_of(desc_out)))
    else:
        half0 = tlx.local_slice(stage, [0, 0], [64, 64])
        half1 = tlx.local_slice(stage, [0, 64], [64, 64])
        tlx.local_store(half0, (out0 * inverse).to(tlx.dtype_of(desc_out)))
        tlx.local_store(half1, (out1 * inverse).to(tlx.dtype_of(desc_out)))
    tlx.fence("async_shared")
    store_rows(desc_out, stage, out_first, queries, first_i, head)
    i = first_i + tl.arange(0, 64)
    tl.store(LSE + (out_first + i).to(tl.int64) * HEADS + head, lse, mask=i < queries)


@triton.jit(do_not_specialize=["tiles", "left", "right"])
def hopper_forward_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_out,
    LSE,
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
    COUNTER: tl.constexpr,
):
    """out and lse of all tiles. `scale` holds log2(e) too; FLIPPED says that it is negative.

    Grid: as many CTAs as run at once, a multiple of TEAM. Every tile sees a key. With KEEP_Q every
    TEAM-th tile has the same queries and head, which a CTA then keeps for its life. With COUNTER
    `COUNTERS` are TEAM int32 zeros, one for each of these queries and heads. NARROW: a window may
    begin and end in one block of keys; NEAR: it may begin in the last block that a tile sees.
    """
    DTYPE: tl.constexpr = tlx.dtype_of(desc_q)
    WINDOW: tl.constexpr = HAS_LEFT or HAS_RIGHT
    PIECES: tl.constexpr = BLOCK_D // BLOCK_K if BLOCK_D > BLOCK_K else 1
    WIDTH: tl.constexpr = BLOCK_D // PIECES
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
    q_full = tlx.alloc_barriers(Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_barriers(Q_STAGES, arrive_count=CONSUMERS)
    k_full = tlx.alloc_barriers(STAGES, arrive_count=1)
    v_full = tlx.alloc_barriers(STAGES, arrive_count=1)
    # Every thread arrives: a barrier with one arrival per warp group costs two more of its own.
    k_empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)
    v_empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)
    TILE_STAGES: tl.constexpr = 2  # numbers of tiles that the producer is ahead at most
    if COUNTER:
        numbers = tlx.local_alloc((1,), tl.int32, TILE_STAGES)
        tile_full = tlx.alloc_warp_barrier(TILE_STAGES, 4)
        tile_empty = tlx.alloc_warp_barrier(TILE_STAGES, 4, CONSUMERS)
        turns = _most_turns(tiles)
    else:  # the ring is not used
        numbers, tile_full, tile_empty = q_tiles, q_full, q_empty
        turns = dealt_turns(tiles, TEAM)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            count = 0
            tile = tl.program_id(0)
            if COUNTER:
                taken = _ask(COUNTERS, True, TEAM)
            row = _row(TILES, 0, turns, tile, TEAM, COUNTER)
            k_first, keys, begin, end = _keys(row, WINDOW)
            out_first, queries, first_i, head = _queries(row)
            for turn in tl.range(0, turns):
                for _ in tl.range(0, (tile >= 0).to(tl.int32) if COUNTER else 1):
                    # Loaded one turn ahead: the table's latency would hold up a tile's first copy.
                    if COUNTER:
                        tile = _answer(taken, TEAM)
                        tile = tl.where(tile < tiles, tile, -1)
                        # Nobody would work on what the bound leaves no turn for.
                        taken = _ask(COUNTERS, turn + 2 < turns, TEAM)
                        slot = turn % TILE_STAGES
                        tlx.barrier_wait(tile_empty[slot], ((turn // TILE_STAGES) & 1) ^ 1)
                        tlx.local_store(numbers[slot], tl.full([1], tile, tl.int32))
                        tlx.barrier_arrive(tile_full[slot])
                    row = _row(TILES, turn + 1, turns, tile, TEAM, COUNTER)
                    n_k_first, n_keys, n_begin, n_end = _keys(row, WINDOW)
                    n_out_first, n_queries, n_first_i, n_head = _queries(row)
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
            p_at: tl.constexpr = cid if P_SHARED else 0
            columns = tl.arange(0, BLOCK_K)
            if PING_PONG and cid == CONSUMERS - 1:
                tlx.named_barrier_arrive(9, 256)
            tile = tl.program_id(0)
            done, next_tile = tile, tile
            if COUNTER:
                next_tile = _handed_over(numbers, tile_full, tile_empty, 0, TILE_STAGES)
            row = _row(TILES, 0, turns, tile, TEAM, COUNTER)
            k_first, keys, begin, end = _keys(row, WINDOW)
            next_k_first, next_keys, next_begin, next_end = _keys(
                _row(TILES, 1, turns, next_tile, TEAM, COUNTER), WINDOW
            )
            out_first, queries, first_i, head = _queries(row)
            i = first_i + cid * 64 + tl.arange(0, 64)
            blocks = (end - begin + BLOCK_K - 1) // BLOCK_K
            # The first block of the first tile: nothing else to do meanwhile.
            tlx.barrier_wait(q_full[0], 0)
            tlx.barrier_wait(k_full[0], 0)
            _take_turn(PING_PONG, cid)
            s = tlx.async_dot(q_tiles[cid], tlx.local_trans(k_tiles[0]))
            _pass_turn(PING_PONG, cid, CONSUMERS)
            s = tlx.async_dot_wait(0, s)
            tlx.barrier_arrive(k_empty[0])
            j = begin + (blocks - 1) * BLOCK_K + columns
            seen = _seen(i, j, keys, queries, left, right, True, NEAR, HAS_RIGHT)
            nothing = tl.full([64], -float("inf"), tl.float32)
            zero = tl.zeros([64], tl.float32)
            top, total, weights, shrink = _masked(s, seen, nothing, zero, scale, WINDOW)
            if not P_WIDE:
                weights = weights.to(DTYPE)
            out0 = tl.zeros([64, WIDTH], tl.float32)
            out1 = tl.zeros([64, WIDTH], tl.float32)
            count = 1  # key blocks whose scores have been worked off
            qs = 0
            for turn in tl.range(1, turns):
                # A loop for a condition: in a `while` products and their results would get other
                # layouts and be copied between them at every step.
                for _ in tl.range(0, (next_tile >= 0).to(tl.int32) if COUNTER else 1):
                    weights, out0, out1, top, total, count = _rest_of_tile(
                        q_tiles[qs * CONSUMERS + cid], k_tiles, k_full, k_empty, v_tiles, v_full,
                        v_empty, p_tiles[p_at], weights, out0, out1, top, total, count, i, begin,
                        blocks, keys, queries, left, right, scale, columns, first_i + cid * 64, cid,
                        CONSUMERS, BLOCK_K, PIECES, STAGES, HAS_LEFT, HAS_RIGHT, NARROW, FLIPPED,
                        PING_PONG, P_SHARED, P_WIDE, DTYPE,
                    )  # fmt: skip
                    # The next tile's first block, while this tile's last product runs.
                    if not KEEP_Q:
                        tlx.barrier_arrive(q_empty[qs])
                    if COUNTER:
                        done, tile = tile, next_tile
                        next_tile = _handed_over(numbers, tile_full, tile_empty, turn, TILE_STAGES)
                    row = _row(TILES, turn, turns, tile, TEAM, COUNTER)
                    keys, begin, end = next_keys, next_begin, next_end
                    next_k_first, next_keys, next_begin, next_end = _keys(
                        _row(TILES, turn + 1, turns, next_tile, TEAM, COUNTER), WINDOW
                    )
                    blocks = (end - begin + BLOCK_K - 1) // BLOCK_K
                    if WINDOW:
                        out_first, queries, first_i, head = _queries(row)
                        i = first_i + cid * 64 + tl.arange(0, 64)
                    j = begin + (blocks - 1) * BLOCK_K + columns
                    st = count % STAGES
                    before = (count - 1) % STAGES
                    if not KEEP_Q:
                        qs = turn % Q_STAGES
                        tlx.barrier_wait(q_full[qs], (turn // Q_STAGES) & 1)
                    weights, out0, out1, new_top, new_total, shrink = _step(
                        q_tiles[qs * CONSUMERS + cid], k_tiles[st], k_full[st], k_empty[st],
                        (count // STAGES) & 1, v_tiles[before], v_full[before], v_empty[before],
                        ((count - 1) // STAGES) & 1, p_tiles[p_at], weights, out0, out1, nothing,
                        zero, i, j, keys, queries, left, right, scale, cid, CONSUMERS, BLOCK_K,
                        PIECES, WINDOW, True, NEAR, HAS_RIGHT, FLIPPED, PING_PONG, P_SHARED,
                        P_WIDE, DTYPE,
                    )  # fmt: skip
                    count += 1
                    _finish(
                        out0, out1, top, total, desc_out, out_tiles[cid], LSE,
                        _row(TILES, turn - 1, turns, done, TEAM, COUNTER), 64 * cid, HEADS,
                        PIECES, WINDOW,
                    )  # fmt: skip
                    top, total = new_top, new_total
                    out0 = tl.zeros([64, WIDTH], tl.float32)
                    out1 = tl.zeros([64, WIDTH], tl.float32)
            weights, out0, out1, top, total, count = _rest_of_tile(
                q_tiles[qs * CONSUMERS + cid], k_tiles, k_full, k_empty, v_tiles, v_full,
                v_empty, p_tiles[p_at], weights, out0, out1, top, total, count, i, begin,
                blocks, keys, queries, left, right, scale, columns, first_i + cid * 64, cid,
                CONSUMERS, BLOCK_K, PIECES, STAGES, HAS_LEFT, HAS_RIGHT, NARROW, FLIPPED, PING_PONG,
                P_SHARED, P_WIDE, DTYPE,
            )  # fmt: skip
            before = (count - 1) % STAGES
            tlx.barrier_wait(v_full[before], ((count - 1) // STAGES) & 1)
            out0, out1 = _weigh(weights.to(DTYPE), v_tiles[before], out0, out1, BLOCK_K, PIECES)
            out0 = tlx.async_dot_wait(0, out0)
            if PIECES == 2:
                out1 = tlx.async_dot_wait(0, out1)
            _finish(
                out0, out1, top, total, desc_out, out_tiles[cid], LSE,
                _row(TILES, turns - 1, turns, tile, TEAM, COUNTER), 64 * cid, HEADS,
                PIECES, WINDOW,
            )  # fmt: skip
            tlx.async_descriptor_store_wait(0)

"""Which tile a CTA of `tlx_hopper_forward` takes next, and what the table of tiles says of it.

Tiles are dealt in turns (`tlx_common.dealt_place`) or, with COUNTER, taken from a counter in global
memory: the producer asks for a tile's number while the one before is copied, and hands it to the
consumers through TILE_STAGES slots. The table's rows (`schedule.dealt_tiles`) have eight int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gem.attention.backends.tlx_common import dealt_place

TILE_STAGES = tl.constexpr(2)  # numbers of tiles that the producer is ahead at most


@triton.jit
def row_of(TILES, turn, turns, number, TEAM: tl.constexpr, COUNTER: tl.constexpr):
    """The table's row of a turn, or with COUNTER of a tile; some row where there is no other."""
    if COUNTER:
        place = tl.maximum(number, 0)
    else:
        turn = tl.minimum(turn, turns - 1)
        place = turn * tl.num_programs(0) + dealt_place(turn, TEAM)
    return TILES + place * 8


@triton.jit
def most_turns(tiles):
    """How many tiles a CTA may take by the counter: half as many again as its share, and two.

    A loop needs a bound, up to which it then idles; all CTAs' bounds together are above `tiles`.
    """
    share = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    return share + share // 2 + 2


@triton.jit
def ask(COUNTERS, wanted, TEAM: tl.constexpr):
    """Asks for another tile; nothing waits until `answer` reads what the first thread got.

    That is why it is a tensor: Triton waits for a scalar at once, to hand it to all threads.
    """
    lanes = tl.arange(0, 128)
    counter = COUNTERS + tl.program_id(0) % TEAM + lanes * 0
    return tl.atomic_add(counter, 1, mask=(lanes == 0) & wanted, sem="relaxed")


@triton.jit
def answer(taken, TEAM: tl.constexpr):
    """The number of the tile that `ask` took. The first tile of each CTA is not counted."""
    number = tl.sum(tl.where(tl.arange(0, 128) == 0, taken, 0), 0)
    return (tl.num_programs(0) // TEAM + number) * TEAM + tl.program_id(0) % TEAM


@triton.jit
def hand_over(numbers, full, empty, turn, number):
    """Gives the consumers the number of the tile after that of this turn, -1 if there is none."""
    slot = turn % TILE_STAGES
    tlx.barrier_wait(empty[slot], ((turn // TILE_STAGES) & 1) ^ 1)
    tlx.local_store(numbers[slot], tl.full([1], number, tl.int32))
    tlx.barrier_arrive(full[slot])


@triton.jit
def handed_over(numbers, full, empty, turn):
    """What the producer gave by `hand_over`."""
    slot = turn % TILE_STAGES
    tlx.barrier_wait(full[slot], (turn // TILE_STAGES) & 1)
    number = tl.max(tlx.local_load(numbers[slot]), 0)
    tlx.barrier_arrive(empty[slot])
    return number


@triton.jit
def keys_of(row, WINDOW: tl.constexpr):
    """(first row, number) of the sample's keys, and (first, end) of those that the tile sees."""
    keys = tl.load(row + 1)
    if WINDOW:
        return tl.load(row), keys, tl.load(row + 2), tl.load(row + 3)
    return tl.load(row), keys, 0, keys


@triton.jit
def queries_of(row):
    """(first output row, queries) of the sample, (first query, head) of the tile."""
    return tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)

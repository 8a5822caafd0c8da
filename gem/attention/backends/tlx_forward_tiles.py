"""Which tile a CTA of `tlx_hopper_forward` takes next, and what the table of tiles says of it.

Tiles are dealt in turns (`tlx_common.dealt_place`) or, with COUNTER, taken from a counter in global
memory, see `tlx_common.ask`. The table's rows (`dealing.dealt_tiles`) have nine int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem.attention.backends.tlx_common import dealt_place

COLUMNS = tl.constexpr(9)  # of a row of the table


@triton.jit
def row_of(TILES, turn, turns, number, TEAM: tl.constexpr, COUNTER: tl.constexpr):
    """The table's row of a turn, or with COUNTER of a tile; some row where there is no other."""
    if COUNTER:
        place = tl.maximum(number, 0)
    else:
        turn = tl.minimum(turn, turns - 1)
        place = turn * tl.num_programs(0) + dealt_place(turn, TEAM)
    return TILES + place * COLUMNS


@triton.jit
def most_turns(tiles):
    """How many tiles a CTA may take by the counter: half as many again as its share, and two.

    A loop needs a bound, up to which it then idles; all CTAs' bounds together are above `tiles`.
    """
    share = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    return share + share // 2 + 2


@triton.jit
def keys_of(row, SOME: tl.constexpr):
    """(first row, number) of the sample's keys, and (first, end) of those that the tile sees.

    SOME: these may not be all.
    """
    keys = tl.load(row + 1)
    if SOME:
        return tl.load(row), keys, tl.load(row + 2), tl.load(row + 3)
    return tl.load(row), keys, 0, keys

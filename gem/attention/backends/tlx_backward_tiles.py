"""How the backward's tiles of keys are described, and the constants of its kernel."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


class Options(NamedTuple):
    """Constants of the kernel.

    Attributes:
        TILES: of 64 queries, in a step.
        LEFT, RIGHT: whether the window has this edge; NARROW: it may begin and end in one step.
        WHOLE: some samples are whole; ALONE: those with one tile of keys have no sums.
    """

    TILES: tl.constexpr
    BLOCK_D: tl.constexpr
    K_STAGES: tl.constexpr
    Q_STAGES: tl.constexpr
    GROUP: tl.constexpr
    HEADS: tl.constexpr
    BROADCAST: tl.constexpr
    LEFT: tl.constexpr
    RIGHT: tl.constexpr
    NARROW: tl.constexpr
    BY_COUNTER: tl.constexpr
    WITH_DQ: tl.constexpr
    WHOLE: tl.constexpr
    ALONE: tl.constexpr
    DTYPE: tl.constexpr


class Ring(NamedTuple):
    """Stages for the numbers of tiles on their way from the loading warp to all others."""

    numbers: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.jit
def unit(number, single, pairs):
    """(first row, rows) of what a CTA takes at a time, of `dealing.KeyTiles`."""
    pair = (number >= single) & (number < single + pairs)
    return number + tl.minimum(tl.maximum(number - single, 0), pairs), 1 + pair.to(tl.int32)


@triton.jit
def queries_of(row):
    """(first row, number) of the sample's queries, first of their statistics, (begin, end) seen."""
    return (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 8),
        tl.load(row + 2),
        tl.load(row + 3),
    )


@triton.jit
def steps_of(q_begin, q_end, OPTIONS: tl.constexpr):
    """Steps that it takes to go through the queries of one head that see a tile."""
    BLOCK_Q: tl.constexpr = 64 * OPTIONS.TILES
    return (q_end - q_begin + BLOCK_Q - 1) // BLOCK_Q


@triton.jit
def dk_place(tile, cid: tl.constexpr, OPTIONS: tl.constexpr):
    """The stage of a consumer's dK of its tile `tile`: with TILES 2 beside dV, else in place of the
    tile's keys or, where no dQ is added up, of dQ."""
    if OPTIONS.TILES == 2:
        return 2 * cid + 1
    elif OPTIONS.WITH_DQ:
        return 2 * (tile % OPTIONS.K_STAGES) + cid
    else:
        return cid

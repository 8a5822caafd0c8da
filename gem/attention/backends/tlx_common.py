"""Parts that the TLX kernels share: ragged TMA descriptors and the copies through them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.backends import Call, triton_

_BILLION = 2**30
_MOST = 0x7FFF0000
# Triton asks ptxas for register allocation of level 2 where its own is 4, since ptxas 13 fails at
# some kernels (triton-lang/triton issue 8488). Ours are none of these, but at level 2 those that
# are short of registers spill, even within loops. The last level named counts.
# The software pipeliner (num_stages) has nothing to do in these kernels.
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 1, "ptx_options": "--regAllocOptLevel=4"}
TILE_STAGES = tl.constexpr(2)  # numbers of tiles that a producer is ahead at most


class _Descriptor(TensorDescriptor):
    """One that `fits_tma` has checked before: to check again takes the host 3 us."""

    def __post_init__(self) -> None:
        pass


def ragged(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of x `[rows, heads, dim]` whose copies end where a sample ends.

    A TMA box is cut only at the ends of the whole tensor. So the rows are described by three
    dimensions, whose strides S, S and 2^64 - S (in bytes, modulo 2^64) are taken such that the
    coordinates (2^30, first + count, 2^30 - count + row) mean row `first + row`, while the third
    dimension, of size 2^30, ends after `count` rows. (The idea is that of Triton's ragged_tma.)

    Args:
        x: any strides whose bytes are a multiple of 16, but 1 between columns; at most 2^30 rows.
        rows, columns: of a box; columns past x's read as 0 and are not written.
    """
    row, head = x.stride(0), x.stride(1)
    return _Descriptor(
        x,
        [_MOST, _MOST, x.shape[1], _BILLION, x.shape[2]],
        [2**34 - row, row, head, row, 1],
        [1, 1, 1, rows, columns],
    )


def fits_tma(x: Tensor) -> bool:
    """Whether `ragged` can describe x."""
    size = x.element_size()
    return (
        x.data_ptr() % 16 == 0
        and x.stride(2) == 1
        and all(stride * size % 16 == 0 and 0 < stride < 2**32 for stride in x.stride()[:2])
        and x.shape[0] <= _BILLION
    )


def readable(x: Tensor) -> Tensor:
    """x, copied where no descriptor fits it."""
    return x if fits_tma(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def block_columns(call: Call) -> int:
    """Columns of a tile: as many as a swizzled row of shared memory holds, or twice as many."""
    return 64 if call.head_dim <= 64 else 128


def is_narrow(left: int | None, right: int | None, block: int) -> bool:
    """Whether a window may begin and end in one step: 64 rows against a block of the other ones."""
    return left is not None and right is not None and left + right < block + 61


def processors(device: torch.device) -> int:
    """Multiprocessors of the device: as many CTAs as a persistent kernel has."""
    if device.type == "cpu":  # launches are simulated, or recorded
        from gem.attention.simulator import processors

        return processors()
    return triton_.processors(device)


@triton.jit
def dealt_place(turn, TEAM: tl.constexpr):
    """This CTA's place in a turn: odd turns deal to the teams of CTAs in reverse order."""
    cta = tl.program_id(0)
    last = tl.num_programs(0) // TEAM - 1
    team = cta // TEAM
    return tl.where(turn % 2 == 0, team, last - team) * TEAM + cta % TEAM


@triton.jit
def dealt_turns(tiles, TEAM: tl.constexpr):
    """How many tiles this CTA has."""
    full = tiles // tl.num_programs(0)
    rest = tiles - full * tl.num_programs(0)
    return full + (dealt_place(full, TEAM) < rest).to(tl.int32)


@triton.jit
def rows_of(row):
    """(first row, number) of the sample's rows and (first one, head) of the tile, by its table row.

    They are queries in `dealing.DealtTiles`, keys in `dealing.KeyTiles`.
    """
    return tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)


@triton.jit
def to_base_2(lse):
    """A log-sum-exp in base 2; +inf, so that exp gives 0, of queries that see nothing."""
    return tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def ask(COUNTERS, wanted, TEAM: tl.constexpr, THREADS: tl.constexpr):
    """Asks a counter in global memory for another tile, while the one before is copied.

    Nothing waits until `answer` reads what the first thread got.
    That is why it is a tensor: Triton waits for a scalar at once, to hand it to all threads.
    """
    lanes = tl.arange(0, THREADS)
    counter = COUNTERS + tl.program_id(0) % TEAM + lanes * 0
    return tl.atomic_add(counter, 1, mask=(lanes == 0) & wanted, sem="relaxed")


@triton.jit
def answer(taken, TEAM: tl.constexpr, THREADS: tl.constexpr):
    """The number of the tile that `ask` took. The first tile of each CTA is not counted."""
    number = tl.sum(tl.where(tl.arange(0, THREADS) == 0, taken, 0), 0)
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
def copy_rows(desc, buffer, barrier, first, count, row, head):
    """Copies a box from `row` of the sample that has `count` rows from `first` on."""
    tlx.async_descriptor_load(
        desc, buffer, [1073741824, first + count, head, 1073741824 - count + row, 0], barrier
    )


@triton.jit
def wait_for_writes():
    """Waits until all TMA copies of this thread to global memory can be seen there.

    `tlx.async_descriptor_store_wait` waits until they have read shared memory.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_rows(desc, buffer, first, count, row, head):
    """Writes a box from `row` of the sample on; rows past its end are left out."""
    tlx.async_descriptor_store(
        desc, buffer, [1073741824, first + count, head, 1073741824 - count + row, 0]
    )

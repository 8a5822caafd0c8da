"""Attention in TLX (Triton Low-level Extensions) on Hopper GPUs.

This file chooses the shape of the forward kernel (`tlx_hopper_forward`) and launches it; the
backward is in `tlx_backward`.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
from torch import Tensor

from gem.attention import dealing, schedule
from gem.attention.backends import Call, triton_
from gem.attention.backends.launching import run
from gem.attention.backends.tlx_backward import backward  # noqa: F401 - this backend's
from gem.attention.backends.tlx_common import (
    LAUNCH_OPTIONS,
    block_columns,
    is_narrow,
    processors,
    ragged,
    readable,
)
from gem.attention.backends.tlx_forward_merge import blank_kernel, merge_kernel
from gem.attention.backends.tlx_hopper_forward import hopper_forward_kernel

KEEP_Q_SHARE = 0.95  # of the multiprocessors must be at work


def unsupported(call: Call) -> str | None:
    """None if TLX can serve the call, else why not."""
    reason = triton_.unsupported(call)
    if reason is not None:
        return reason
    if call.device.type != "cuda" or _capability(call.device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if call.head_dim > 128 or call.head_dim % 8:
        return f"needs a head dim that is a multiple of 8 up to 128, not {call.head_dim}"
    return None


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a launch of the forward kernel.

    Attributes:
        consumers: warp groups of 64 queries each.
        keys: rows of a block of keys, 64 or 128.
        stages, q_stages: blocks of keys and tiles of queries in shared memory.
        registers: per thread of a consumer.
        ping_pong: whether consumers issue their products in turns.
        p_wide: whether probabilities are carried to the next step in float32: more registers, but
            16-bit halves, where they are not `packed`, would have to be joined again.
        keep_q: whether CTAs keep their queries from sample to sample, in broadcast attention where
            at most a twentieth of the multiprocessors is left out by it and no sample takes more
            than twice a CTA's share (such are cut into parts, see `dealing.dealt_tiles`).
        counter: whether CTAs take their tiles from a counter at run time, not by the zig-zag.
        lazy: whether the running maximum of scores is raised only where a block outgrows it: a
            quarter fewer instructions in a step, but a tile's first block is worked off in full.
    """

    consumers: int
    keys: int
    stages: int
    q_stages: int
    registers: int
    ping_pong: bool = False
    p_wide: bool = False
    keep_q: bool = False
    counter: bool = False
    lazy: bool = False


def forward_shape(
    block_d: int,
    broadcast: bool,
    queries: float,
    keys: float,
    window: bool = False,
) -> Shape:
    """What was fastest on an H200 for these means per sample.

    Args:
        window: whether queries see no key that is too far to the left.
    """
    three = broadcast and 128 < queries <= 192  # one tile a sample, none of it empty
    if block_d == 64:
        if queries <= 64:
            return Shape(1, 128, 3, 2, 232, lazy=broadcast)
        if three:
            return Shape(3, 64, 6, 1, 160, keep_q=True, lazy=True)
        return Shape(2, 128, 4, 2, 240, ping_pong=True, counter=not broadcast, lazy=broadcast)
    if broadcast and queries <= 64:
        return Shape(1, 64, 5, 2, 232, p_wide=True, counter=True)
    if three:
        short = keys < 768
        return Shape(3, 64, 4, 1, 160, p_wide=True, keep_q=True, counter=short, lazy=short)
    if keys < (400 if broadcast else 256) and not window:
        return Shape(2, 64, 4, 2, 240, ping_pong=True, p_wide=True)
    return Shape(2, 128, 2, 2, 240, ping_pong=True, counter=window)


def shape_of(call: Call, q: Tensor) -> Shape:
    """The shape that `forward` takes for a call."""
    means = triton_.mean_queries(call, q), triton_.mean(call.k_lengths)
    window = call.left is not None
    return forward_shape(block_columns(call), call.form == "broadcast", *means, window)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    return launch(call, q, k, v, shape_of(call, q))


def packed(call: Call, shape: Shape) -> bool:
    """Whether probabilities are carried to the next step in pairs of 16 bits.

    In most kernels of 64 columns the compiler keeps pairs together by itself; with a window that
    ends on the left, it gains nothing.
    """
    if shape.lazy:  # the compiler finds no one layout for 16-bit numbers that a branch replaces
        return not shape.p_wide
    return block_columns(call) == 128 and not shape.p_wide and call.left is None


def team_of(
    shape: Shape, heads: int, queries: int | None, k_lengths: Tensor, ctas: int
) -> tuple[bool, int, int]:
    """(whether CTAs keep their queries, CTAs of a team, all CTAs that are to be used).

    Args:
        queries: that all samples share, or None.
        ctas: as many as there are multiprocessors.
    """
    if not shape.keep_q or queries is None or not k_lengths.numel():
        return False, 1, ctas
    # Broadcast attention repeats the same queries and heads from sample to sample.
    team = heads * triton.cdiv(queries, 64 * shape.consumers)
    teams = ctas // team
    uneven = int(k_lengths.max()) * teams > 2 * int(k_lengths.sum())
    if uneven or teams * team < KEEP_Q_SHARE * ctas:
        return False, 1, ctas
    return True, team, teams * team


def launch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, shape: Shape, p_shared: bool = False
) -> tuple[Tensor, Tensor]:
    """The forward by a kernel of this shape.

    Args:
        p_shared: take the probabilities through shared memory, to compare.
    """
    q, k, v = (readable(x) for x in (q, k, v))
    broadcast = call.form == "broadcast"
    out, lse = triton_.results(call, q)
    block_d, block_q = block_columns(call), 64 * shape.consumers
    shared = q.shape[0] if broadcast else None
    keep_q, team, ctas = team_of(shape, call.heads, shared, call.k_lengths, processors(q.device))
    tiles: dealing.DealtTiles = schedule.schedule(
        "dealt_tiles",
        call.k_lengths,
        triton_.queries_of(call, q),
        call.left,
        call.right,
        call.heads,
        block_q,
        shape.keys,
        q.device,
        ctas,
        team,
        not shape.counter,
        not keep_q,
    )
    count = tiles.table.shape[0]
    parts = part_lse = None
    if tiles.parts:
        parts = out.new_empty((tiles.parts, block_q, block_d), dtype=torch.float32)
        part_lse = out.new_empty((tiles.parts, block_q), dtype=torch.float32)
    ctas = min(count, ctas)
    # Fresh zeros for every launch, made by a small kernel on its stream: no launch on another
    # stream shares them, and a CUDA graph replays the zeroing with the launch. Zeros that the last
    # CTA puts back would be shared, and stay wrong after a launch that failed.
    counters = torch.zeros(team, dtype=torch.int32, device=q.device) if shape.counter else None
    flat = out.view(-1, call.heads, call.head_dim)
    if count:
        run(
            hopper_forward_kernel,
            (ctas,),
            ragged(q, 64, block_d),
            ragged(k, shape.keys, block_d),
            ragged(v, shape.keys, block_d),
            ragged(flat, 64, block_d),
            lse,
            parts,
            part_lse,
            tiles.table,
            counters,
            count,
            call.scale * triton_.LOG2_E or 2.0**-126,  # -inf, of masked pairs, times 0 is NaN
            call.left or 0,
            call.right or 0,
            HEADS=call.heads,
            GROUP=call.heads // call.kv_heads,
            BROADCAST=broadcast,
            HAS_LEFT=call.left is not None,
            HAS_RIGHT=call.right is not None,
            NARROW=is_narrow(call.left, call.right, shape.keys),
            NEAR=call.left is not None and call.left < shape.keys - 1,
            FLIPPED=call.scale < 0,
            CONSUMERS=shape.consumers,
            TEAM=team,
            KEEP_Q=keep_q,
            BLOCK_K=shape.keys,
            BLOCK_D=block_d,
            STAGES=shape.stages,
            Q_STAGES=shape.q_stages,
            REGISTERS=shape.registers,
            PING_PONG=shape.ping_pong,
            P_SHARED=p_shared,
            P_WIDE=shape.p_wide,
            PACKED=packed(call, shape),
            LAZY=shape.lazy,
            COUNTER=shape.counter,
            **LAUNCH_OPTIONS,
            # Triton would ask for one register too many where there is one consumer.
            **({"maxnreg": 248} if shape.consumers == 1 else {}),
        )
    _complete(call, tiles, block_q, flat, lse, parts, part_lse)
    return out, lse


def _complete(
    call: Call,
    tiles: dealing.DealtTiles,
    block_q: int,
    out: Tensor,
    lse: Tensor,
    parts: Tensor | None,
    part_lse: Tensor | None,
) -> None:
    """Merges tiles in parts, and writes those that see no key; out is `[rows, heads, dim]`."""
    options = {"HEADS": call.heads, "DIM": call.head_dim, "BLOCK_D": block_columns(call)}
    if parts is not None:
        run(
            merge_kernel,
            (tiles.merges.shape[0], block_q // 16),
            out,
            lse,
            parts,
            part_lse,
            tiles.merges,
            BLOCK_Q=block_q,
            **options,
        )
    if tiles.empty.shape[0]:
        run(
            blank_kernel,
            (tiles.empty.shape[0],),
            out,
            lse,
            tiles.empty,
            BLOCK_Q=triton.next_power_of_2(block_q),
            ROWS=block_q,
            **options,
        )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)

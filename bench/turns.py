"""The second timing of those that the first left in front, with the matmul among them.

A GPU at its power limit lowers its clock as it gets hot. Contenders that were timed one after the
other met different clocks, so that a few percent between them say nothing. Here they take turns,
and all meet the same. So does the matmul whose rate the roofline takes: its rate here is what the
tensor cores give at the contenders' clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from bench.lost import check_device
from bench.peers.base import Contender, Route
from bench.roofline import matmul
from bench.timing import ONE_SET, in_rounds, short_reason
from gem.attention.testing import Problem

if TYPE_CHECKING:
    from bench.row import Outcome

NEAR = 1.25
ROUNDS = 5
ROUND = 1 / 4  # of the repeats of a first timing
MATMUL = "matmul"


@dataclasses.dataclass(frozen=True)
class HotMatmul:
    """The matmul among a pass's turns: its rate, or why it has none; neither without turns."""

    tflops: float | None = None
    note: str | None = None


def close_ones(outcomes: Mapping[str, Outcome], ours: Collection[str]) -> list[str]:
    """Names of those within NEAR of the fastest of their side: `ours`, and the peers.

    So the two that the ratio compares are among them however far apart, and whoever may take
    their place once they are hot. Only a graph can take turns, and calls of more than ONE_SET
    seconds would take long.
    """
    timings = {name: o.timing for name, o in outcomes.items() if o.timing is not None}
    fastest = {True: math.inf, False: math.inf}
    for name, timing in timings.items():
        fastest[name in ours] = min(fastest[name in ours], timing.ms)
    return [
        name
        for name, timing in timings.items()
        if timing.timer == "graph" and timing.ms <= min(NEAR * fastest[name in ours], ONE_SET * 1e3)
    ]


def retime(
    contenders: Sequence[Contender],
    outcomes: Mapping[str, Outcome],
    problems: Sequence[Problem],
    direction: str,
    min_ms: float,
    faults: Mapping[tuple[str, str], str] | None = None,
) -> tuple[dict[str, Outcome], HotMatmul]:
    """A pass's outcomes, those of `close_ones` with the milliseconds of turns; the matmul's rate.

    One that fails keeps its first figure, with a note; so does a single one that is left, without
    even the matmul. What it costs counts for the contenders that took part, in equal parts.

    Args:
        min_ms: of repeats of the first timing; a round has ROUND of it for each.
        faults: by (name, pass), of an earlier run that it ended; here it is asked for MATMUL.

    Raises:
        DeviceLost: if the GPU does not answer after a contender or the matmul.
    """
    close = close_ones(outcomes, {c.name for c in contenders if c.ours})
    if not close:
        return dict(outcomes), HotMatmul()
    fault = (faults or {}).get((MATMUL, direction))
    began, device = time.perf_counter(), problems[0].q.device
    labels = {c: outcomes[c.name].route for c in contenders if c.name in close}
    try:
        ms, notes, flops = _take_turns(labels, problems, direction, min_ms * ROUND, fault)
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # where the device is lost
                torch.cuda.empty_cache()
    share = (time.perf_counter() - began) / len(close)
    found = dict(outcomes)
    for name in close:
        timing, cost_s = outcomes[name].timing, outcomes[name].cost_s + share
        if name in notes:
            timing = dataclasses.replace(timing, note=notes[name])
        elif len(ms) > 1:
            timing = dataclasses.replace(timing, ms=ms[name], timer="turns")
        found[name] = dataclasses.replace(outcomes[name], timing=timing, cost_s=cost_s)
    rate = flops / ms[MATMUL] / 1e9 if MATMUL in ms and len(ms) > 1 else None
    return found, HotMatmul(rate, notes.get(MATMUL))


def _take_turns(
    labels: Mapping[Contender, str],
    problems: Sequence[Problem],
    direction: str,
    min_ms: float,
    fault: str | None,
) -> tuple[dict[str, float], dict[str, str], int]:
    """By name, milliseconds of a contender's route of that label and of the matmul; why others
    have none; FLOPs of the matmul, which a `fault` leaves out.

    The routes are built anew, for the first ones are gone, with the same shapes, for which all
    that compiles has kept its kernels.
    """
    routes: dict[str, list[Route]] = {}
    notes: dict[str, str] = {MATMUL: fault} if fault else {}
    flops, device = 0, problems[0].q.device

    def give_up(name: str, error: Exception) -> None:
        # What broke a capture comes before the capture's own complaint.
        kept = "no rate in turns" if name == MATMUL else "timed alone"
        notes[name] = f"{kept}: {short_reason(error.__context__ or error)}"
        error.__traceback__ = error.__context__ = None  # their frames hold tensors
        for route in routes.get(name, ()):
            route.release()
        gc.collect()
        check_device(device, name, direction)

    try:
        for contender, label in labels.items():
            try:
                made = routes[contender.name] = contender.routes(problems)[label]()
                if direction == "backward":
                    for route in made:
                        route.prepare_backward()
            except Exception as error:  # noqa: BLE001 - a peer may fail in any way
                give_up(contender.name, error)
        calls = {
            name: [route.forward if direction == "forward" else route.backward for route in made]
            for name, made in routes.items()
            if name not in notes
        }
        if not fault:
            try:  # after the contenders, which have the first claim to memory
                product, flops = matmul(problems[0].q.dtype, device)
                calls[MATMUL] = [product]
            except Exception as error:  # noqa: BLE001 - a contender may have left no memory
                give_up(MATMUL, error)
        return in_rounds(calls, device, ROUNDS, min_ms, on_failure=give_up), notes, flops
    finally:
        for made in routes.values():
            for route in made:
                route.release()

"""The second timing of contenders that the first left close together.

A GPU at its power limit lowers its clock, by up to 10%, as it gets hot. Contenders that were timed
one after the other met different clocks, so that a few percent between them say nothing. Here they
take turns, and all meet the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from bench.lost import check_device
from bench.peers.base import Contender, Route
from bench.timing import ONE_SET, in_rounds, short_reason
from gem.attention.testing import Problem

if TYPE_CHECKING:
    from bench.row import Outcome

NEAR = 1.25
ROUNDS = 5
ROUND = 1 / 4  # of the repeats of a first timing


def close_ones(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Names of those within NEAR of the pass's fastest, or none where they are not two at least.

    Only a graph can take turns, and calls of more than ONE_SET seconds would take long.
    """
    timings = {name: o.timing for name, o in outcomes.items() if o.timing is not None}
    fastest = min((timing.ms for timing in timings.values()), default=0.0)
    limit = min(NEAR * fastest, ONE_SET * 1e3)
    close = [n for n, timing in timings.items() if timing.timer == "graph" and timing.ms <= limit]
    return close if len(close) > 1 else []


def retime(
    contenders: Sequence[Contender],
    outcomes: Mapping[str, Outcome],
    problems: Sequence[Problem],
    direction: str,
    min_ms: float,
) -> dict[str, Outcome]:
    """A pass's outcomes, those of `close_ones` with the milliseconds of turns.

    One that fails keeps its first figure, with a note; so does a single one that is left. What it
    costs counts for those that took part, in equal parts.

    Args:
        min_ms: of repeats of the first timing; a round has ROUND of it for each contender.

    Raises:
        DeviceLost: if the GPU does not answer after a contender.
    """
    close = close_ones(outcomes)
    if not close:
        return dict(outcomes)
    began, device = time.perf_counter(), problems[0].q.device
    labels = {c: outcomes[c.name].route for c in contenders if c.name in close}
    try:
        ms, notes = _take_turns(labels, problems, direction, min_ms * ROUND)
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
    return found


def _take_turns(
    labels: Mapping[Contender, str], problems: Sequence[Problem], direction: str, min_ms: float
) -> tuple[dict[str, float], dict[str, str]]:
    """By name, milliseconds of a contender's route of that label, and why others have none.

    The routes are built anew, for the first ones are gone, with the same shapes, for which all
    that compiles has kept its kernels.
    """
    routes: dict[str, list[Route]] = {}
    notes: dict[str, str] = {}

    def give_up(name: str, error: Exception) -> None:
        # What broke a capture comes before the capture's own complaint.
        notes[name] = f"timed alone: {short_reason(error.__context__ or error)}"
        error.__traceback__ = error.__context__ = None  # their frames hold tensors
        for route in routes.get(name, ()):
            route.release()
        gc.collect()
        check_device(problems[0].q.device, name, direction)

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
        device = problems[0].q.device
        return in_rounds(calls, device, ROUNDS, min_ms, on_failure=give_up), notes
    finally:
        for made in routes.values():
            for route in made:
                route.release()

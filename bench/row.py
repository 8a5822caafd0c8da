"""One row of the benchmark: every contender on the same fresh data, checked and then timed.

Each is timed alone; those in front are then timed in turns, with the matmul (bench/turns.py).
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from bench.inputs import make_problems
from bench.lost import check_device
from bench.peers.base import Contender, Route, Unavailable
from bench.roofline import roofline_ms
from bench.shapes import Row
from bench.timing import Timing, is_slow, measure, short_reason, synchronize, with_peak
from bench.turns import MATMUL, HotMatmul, retime
from gem.attention.testing import Comparison, Judge

PASSES = ("forward", "backward")
GRADIENTS = ("dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one contender in one pass.

    Attributes:
        skipped: why it was not run; then all else is None.
        compared: each result beside the yardstick.
        timing, peak_gib: None where the rule is broken.
        route: the label of its fastest route.
        cost_s: wall seconds that all its routes took: to build, compile, check and time, its share
            of the turns included.
    """

    skipped: str | None = None
    compared: dict[str, Comparison] | None = None
    timing: Timing | None = None
    peak_gib: float | None = None
    route: str = ""
    cost_s: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the result obeys the rule of `gem.attention.testing`."""
        return self.compared is not None and all(c.ratio <= 1 for c in self.compared.values())

    @property
    def error_ratio(self) -> float | None:
        """The worst error over the yardstick's of the same tensor and measure."""
        if self.compared is None:
            return None
        return max(
            (e / y if y else math.inf) if e else 0.0
            for c in self.compared.values()
            for e, y in zip(c.errors, c.yardstick, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What became of a row.

    Attributes:
        outcomes: by pass and contender.
        yardstick: its errors by tensor, each (by maximum, by root mean square).
        input_sets: how many take turns in fast calls.
        judge_s: wall seconds of the data, the reference and the yardstick.
        matmul: by pass, what the matmul reached in the turns.
    """

    outcomes: dict[str, dict[str, Outcome]]
    yardstick: dict[str, tuple[float, float]]
    input_sets: int
    judge_s: float
    matmul: dict[str, HotMatmul]


def measure_row(
    row: Row,
    contenders: Sequence[Contender],
    passes: Sequence[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    min_ms: float,
    faults: dict[tuple[str, str], str] | None = None,
) -> Measured:
    """Checks and times every contender on one row.

    Args:
        faults: reasons not to run a (contender, pass), from an earlier run that it ended.

    Raises:
        DeviceLost: if the GPU does not answer after a contender or the matmul.
    """
    began = time.perf_counter()
    faults = faults or {}
    l2 = 0
    if device.type == "cuda":
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 60 * 2**20
    problems = make_problems(row, dtype, device, seed, l2)
    judge = Judge(problems[0], gradients="backward" in passes)
    synchronize(device)
    judge_s = time.perf_counter() - began
    outcomes: dict[str, dict[str, Outcome]] = {p: {} for p in passes}
    for contender in contenders:
        found = run_contender(contender, problems, passes, judge, min_ms, faults)
        for direction, outcome in found.items():
            outcomes[direction][contender.name] = outcome
    matmul: dict[str, HotMatmul] = {}
    for direction, found in outcomes.items():
        outcomes[direction], matmul[direction] = retime(
            contenders, found, problems, direction, min_ms, faults
        )
    return Measured(outcomes, judge.yardstick, len(problems), judge_s, matmul)


def run_contender(
    contender: Contender,
    problems: list,
    passes: Iterable[str],
    judge: Judge,
    min_ms: float,
    faults: dict[tuple[str, str], str],
) -> dict[str, Outcome]:
    """Each pass by the fastest of the contender's routes that obeys the rule."""
    clock = _Clock(passes)
    try:
        builders = contender.routes(problems)
    except Unavailable as reason:
        return {direction: Outcome(skipped=str(reason)[:200]) for direction in passes}
    tried: dict[str, list[Outcome]] = {direction: [] for direction in passes}
    for label, build in builders.items():
        if label in contender.last_resorts and all(
            any(o.timing is not None for o in outcomes) for outcomes in tried.values()
        ):
            continue
        routes: list[Route] | None = None
        for direction in passes:
            if (contender.name, direction) in faults:
                tried[direction].append(Outcome(skipped=faults[contender.name, direction]))
                continue
            try:
                if routes is None:
                    routes = build()
                outcome = _time_route(routes, direction, label, judge, min_ms)
            except Exception as error:  # noqa: BLE001 - a peer may fail in any way
                reason = str(error) if isinstance(error, Unavailable) else short_reason(error)
                error.__traceback__ = None  # its frames hold tensors
                outcome = Outcome(skipped=f"{label}: {reason}" if label else reason)
                for route in routes or ():
                    route.release()
                gc.collect()
                check_device(problems[0].q.device, contender.name, direction)
            tried[direction].append(outcome)
            clock.charge(direction)
        del routes
        if problems[0].q.device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        direction: dataclasses.replace(best(outcomes), cost_s=clock.seconds[direction])
        for direction, outcomes in tried.items()
    }


class _Clock:
    """Wall seconds by pass; what both share (imports, building) counts for the first that runs."""

    def __init__(self, passes: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(passes, 0.0)
        self.last = time.perf_counter()

    def charge(self, direction: str) -> None:
        """All that passed since the last charge."""
        now = time.perf_counter()
        self.seconds[direction] += now - self.last
        self.last = now


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest that obeys the rule, else one that breaks it, else why all were skipped."""
    if right := [o for o in outcomes if o.timing is not None and o.holds]:
        return min(right, key=lambda o: o.timing.ms)
    if broken := [o for o in outcomes if o.compared is not None]:
        return broken[0]
    return Outcome(skipped="; ".join(dict.fromkeys(o.skipped or "" for o in outcomes))[:400])


def _time_route(
    routes: list[Route], direction: str, label: str, judge: Judge, min_ms: float
) -> Outcome:
    device, forward = routes[0].problem.q.device, direction == "forward"
    try:
        if forward:
            result, peak, first = with_peak(routes[0].first_forward, device)
            compared = judge.compare({"out": result})
        else:
            routes[0].prepare_backward()
            result, peak, first = with_peak(routes[0].backward, device)
            compared = judge.compare(dict(zip(GRADIENTS, result, strict=True)))
        del result
        if not all(c.ratio <= 1 for c in compared.values()):
            return Outcome(compared=compared, route=label)
        known = None if routes[0].compiles else first
        used = routes[:1] if is_slow(known) else routes
        if not forward:
            for route in used[1:]:
                route.prepare_backward()
        calls: list[Callable] = [route.forward if forward else route.backward for route in used]
        timing = measure(calls, device, min_ms, known)
        return Outcome(compared=compared, timing=timing, peak_gib=peak, route=label)
    finally:
        if not forward:
            for route in routes:
                route.release()


def summarise(
    row: Row,
    direction: str,
    outcomes: dict[str, Outcome],
    yardstick: dict[str, tuple[float, float]],
    ceilings: dict[str, float],
    ours: Iterable[str],
    dtype: torch.dtype = torch.bfloat16,
    matmul: HotMatmul | None = None,
) -> dict:
    """The row's entry in the results file; `ours` are the names that are no peers.

    `hot_share` is `roofline_share` at the rate that the matmul had in the same turns.
    """
    timed = {n: o for n, o in outcomes.items() if o.timing is not None and o.holds}
    flops = row.flops(direction)
    ms = {n: o.timing.ms for n, o in timed.items()}
    ours = set(ours)
    our_best = min((n for n in ms if n in ours), key=ms.get, default=None)
    peer_best = min((n for n in ms if n not in ours), key=ms.get, default=None)
    floor = roofline_ms(row, direction, ceilings, dtype.itemsize)
    mine = outcomes[our_best] if our_best else None
    matmul, hot_share = matmul or HotMatmul(), None
    if matmul.tflops and mine and mine.timing.timer == "turns":
        hot = {**ceilings, "matmul_tflops": matmul.tflops}
        hot_share = roofline_ms(row, direction, hot, dtype.itemsize) / ms[our_best]
    names = ("out",) if direction == "forward" else GRADIENTS
    return {
        "set": row.set,
        "name": row.name,
        "pass": direction,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": row.batch,
        "queries": row.queries,
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "dim": row.dim,
        "max_keys": row.max_keys,
        "density": row.density,
        "causal": row.causal,
        "window": list(row.window) if row.window else None,
        "key_rows": int(row.lengths().sum()),
        "pairs": row.pairs(),
        "ms": ms,
        "tflops": {n: flops / t / 1e9 for n, t in ms.items()},
        "host_us": {n: o.timing.host_us for n, o in timed.items()},
        "timer": {n: o.timing.timer for n, o in timed.items()},
        "cost_s": {n: round(o.cost_s, 4) for n, o in outcomes.items() if o.cost_s},
        "peak_gib": {n: o.peak_gib for n, o in timed.items() if o.peak_gib is not None},
        "routes": {n: o.route for n, o in timed.items() if o.route},
        "notes": {n: o.timing.note for n, o in timed.items() if o.timing.note}
        | ({MATMUL: matmul.note} if matmul.note else {}),
        "ours": our_best,
        "best_peer": peer_best,
        "ratio": ms[peer_best] / ms[our_best] if our_best and peer_best else None,
        "roofline_us": floor * 1e3,
        "roofline_share": floor / ms[our_best] if our_best else None,
        "matmul_tflops": matmul.tflops,
        "hot_share": hot_share,
        "errors": _errors(mine) if mine else None,
        "yardstick": {n: list(yardstick[n]) for n in names},
        "error_ratio": mine.error_ratio if mine else None,
        "all_errors": {n: _errors(o) for n, o in outcomes.items() if o.compared is not None},
        "broken": {
            n: o.error_ratio for n, o in outcomes.items() if o.compared is not None and not o.holds
        },
        "skipped": {n: o.skipped for n, o in outcomes.items() if o.skipped is not None},
    }


def _errors(outcome: Outcome) -> dict[str, list[float]]:
    return {n: list(c.errors) for n, c in outcome.compared.items()}

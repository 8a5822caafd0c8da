"""GPU time, host time and peak memory of a call.

Time is that of the GPU alone: a CUDA graph of the calls is replayed between two events, or, where a
call cannot be captured (it copies to the host, say), the durations of its kernels are summed from
the profiler. Launching from the host does not count; it has its own figure. A call that took more
than ONE_CALL seconds with nothing to set up is not run again for that: the time between events
around it stands, which is an upper bound, since the GPU may have waited for the host.

`measure` times one contender alone, `in_rounds` several that take turns, so that a clock that falls
as the GPU gets hot is the same for all.

Everything runs on one side stream, since autograd runs a backward on its forward's stream and a
capture may not touch the default one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

GRAPH_SECONDS = 1e-3  # a graph holds calls for about so long, so that its launch does not count
MAX_CALLS = 32
MAX_SECONDS = 1.0  # of repeats of one contender, about; one always runs
ONE_SET = 0.1  # seconds: a longer call runs on one input set
ONE_CALL = 0.5  # seconds: a longer call need not run again


@dataclasses.dataclass(frozen=True)
class Timing:
    """One contender's figures.

    Attributes:
        ms: GPU milliseconds of one call, the median over its repeats (in "turns" over the rounds'
            medians); by "events" at most so many.
        timer: "turns" (graphs that took turns with those of others), "graph" (one alone),
            "profiler", "events" or (on a CPU) "wall".
        host_us: microseconds until a call has been launched, without waiting for it.
        note: why it is not the time of a graph, or of turns that were tried, where that is so.
    """

    ms: float
    timer: str
    host_us: float
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """Seconds of one call: until it returned, and until its work was done.

    The latter lie between events around the call, or are those of the clock on a CPU.
    """

    host: float
    done: float


def is_slow(first: Launch | None) -> bool:
    """Whether a call is known to be too slow for more than one input set."""
    return first is not None and first.done > ONE_SET


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """All GPU work of the block runs on a stream of its own."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    with contextlib.suppress(RuntimeError):  # where the device is lost
        torch.cuda.current_stream(device).wait_stream(stream)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _launch(call: Callable[[], Result], device: torch.device) -> tuple[Result, Launch]:
    if device.type != "cuda":
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        return result, Launch(seconds, seconds)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    began = time.perf_counter()
    result = call()
    host = time.perf_counter() - began
    after.record()
    torch.cuda.synchronize(device)
    return result, Launch(host, before.elapsed_time(after) * 1e-3)


def with_peak(
    call: Callable[[], Result], device: torch.device
) -> tuple[Result, float | None, Launch]:
    """A call's result, the GiB that it allocates at its peak (None on a CPU), its seconds."""
    if device.type != "cuda":
        result, launch = _launch(call, device)
        return result, None, launch
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result, launch = _launch(call, device)
    return result, (torch.cuda.max_memory_allocated(device) - before) / 2**30, launch


def measure(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    min_ms: float = 50.0,
    first: Launch | None = None,
) -> Timing:
    """Times calls that do the same work on different inputs, one after the other.

    What a first call sets up is done before. Repeats last at least `min_ms` in all, and about
    MAX_SECONDS at most. `first` is of an earlier call that had nothing to set up: a slow one takes
    the place of a warm-up, and one of more than ONE_CALL seconds is the measurement.
    """
    launches = [first if is_slow(first) else _launch(calls[0], device)[1]]
    slow = is_slow(launches[0])
    if slow:
        calls = calls[:1]
    else:
        more = range(1, max(5, len(calls)))
        launches += [_launch(calls[i % len(calls)], device)[1] for i in more]
    host_us = statistics.median(launch.host for launch in launches) * 1e6
    estimate = min(launch.done for launch in launches)
    on_gpu = device.type == "cuda"
    if first is launches[0] and estimate > ONE_CALL:
        note = "one call, with what the GPU waited for the host" if on_gpu else None
        return Timing(estimate * 1e3, "events" if on_gpu else "wall", host_us, note)
    if not on_gpu:
        repeats = _repeats(estimate, min_ms)
        times = [_launch(calls[i % len(calls)], device)[1].done for i in range(repeats)]
        return Timing(statistics.median(times) * 1e3, "wall", host_us)
    try:
        ms = _by_graph(calls, device, estimate if slow else None, min_ms)
    except Exception as error:  # noqa: BLE001 - any library may fail in its own way
        # What broke the capture comes before the capture's own complaint.
        note = short_reason(error.__context__ or error)
        error.__traceback__ = error.__context__ = None
    else:
        return Timing(ms, "graph", host_us)
    repeats = min(100, _repeats(estimate, min_ms, MAX_SECONDS / 4))
    return Timing(_profiled(calls, repeats, device), "profiler", host_us, note)


def _by_graph(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    estimate: float | None,
    min_ms: float,
) -> float:
    """Median milliseconds of one call, by replays of a graph: of many where none is estimated."""
    if estimate is None:
        graph, count, replay = _long_graph(calls, device)
    else:
        graph, count, replay = capture(calls, device), len(calls), estimate
    try:
        return statistics.median(_replay_ms(graph, _repeats(replay, min_ms))) / count
    finally:
        graph.reset()


def _long_graph(
    calls: Sequence[Callable[[], object]], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, int, float]:
    """A graph of the calls, repeated where they are short; calls in it, seconds of a replay."""
    graph, count = capture(calls, device), len(calls)
    replay = min(_replay_ms(graph, 3)[1:]) * 1e-3
    rounds = min(MAX_CALLS // count, math.ceil(GRAPH_SECONDS / max(replay, 1e-6)))
    if rounds > 1:
        graph.reset()
        graph, count = capture([*calls] * rounds, device), count * rounds
        replay = min(_replay_ms(graph, 2)) * 1e-3
    return graph, count, replay


def in_rounds(
    contenders: Mapping[str, Sequence[Callable[[], object]]],
    device: torch.device,
    rounds: int = 5,
    min_ms: float = 12.0,
    on_failure: Callable[[str, Exception], None] | None = None,
) -> dict[str, float]:
    """Milliseconds of one call of each contender, which take turns: the median over the rounds.

    Each has a graph of its calls, replayed for at least `min_ms` in every round. Every round has
    an order of its own: the clock at which one begins is what the one before has left. `on_failure`
    is told the name and the error of one that fails, which then has no figure; the others go on.
    Without it the error is raised.
    """
    graphs, taken, failed = {}, {name: [] for name in contenders}, set()

    @contextlib.contextmanager
    def guarded(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any library may fail in its own way
            if on_failure is None:
                raise
            failed.add(name)
            on_failure(name, error)

    try:
        for name, calls in contenders.items():
            with guarded(name):
                for call in calls:  # what a first call sets up is done before
                    call()
                synchronize(device)
                graph, count, replay = _long_graph(calls, device)
                graphs[name] = graph, count, _repeats(replay, min_ms)
        for number in range(rounds):
            order = random.Random(number).sample(list(graphs), len(graphs))
            for name in order:
                if name not in failed:
                    graph, count, repeats = graphs[name]
                    with guarded(name):
                        taken[name].append(statistics.median(_replay_ms(graph, repeats)) / count)
    finally:
        for graph, *_ in graphs.values():
            with contextlib.suppress(RuntimeError):  # where the device is lost
                graph.reset()
    return {name: statistics.median(taken[name]) for name in contenders if name not in failed}


def capture(calls: Sequence[Callable[[], object]], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of the calls, captured on the current (side) stream; failing leaves it usable."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except Exception:
        # A capture that the driver invalidated leaves the allocator in recording mode and the
        # default generator in capture; the next capture that succeeds sets the latter right.
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        del graph
        torch.cuda.synchronize(device)
        with (
            contextlib.suppress(Exception),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        ):
            torch.zeros(1, device=device).add_(1)
        raise
    return graph


def short_reason(error: BaseException) -> str:
    """The first line that says something, with the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _repeats(estimate: float, min_ms: float, max_seconds: float = MAX_SECONDS) -> int:
    wanted = max(3, math.ceil(min_ms * 1e-3 / max(estimate, 1e-7)))
    return max(1, min(wanted, int(max_seconds / max(estimate, 1e-7))))


def _replay_ms(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds of each replay."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def _profiled(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> float:
    """Milliseconds of the kernels, copies and fills of one call."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(repeats):
            calls[i % len(calls)]()
        torch.cuda.synchronize(device)
    total = sum(
        event.time_range.elapsed_us()
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    if total <= 0:
        raise RuntimeError("the profiler saw no kernels")
    return total / repeats / 1e3

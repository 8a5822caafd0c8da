"""GPU time, host time and peak memory of a call.

Time is that of the GPU alone: a CUDA graph of the calls is replayed between two events, or, where a
call cannot be captured (it copies to the host, say), the durations of its kernels are summed from
the profiler. Launching from the host never counts; it has its own figure.

Everything runs on one side stream, since autograd runs a backward on its forward's stream and a
capture may not touch the default one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GRAPH_SECONDS = 1e-3  # a graph holds calls for about so long, so that its launch does not count
MAX_CALLS = 24


@dataclasses.dataclass(frozen=True)
class Timing:
    """One contender's figures.

    Attributes:
        ms: GPU milliseconds of one call, the median over its repeats.
        timer: "graph", "profiler" or (on a CPU) "wall".
        host_us: microseconds until a call has been launched, without waiting for it.
        note: why no graph could be captured, where that is so.
    """

    ms: float
    timer: str
    host_us: float
    note: str | None = None


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
    torch.cuda.current_stream(device).wait_stream(stream)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call until its work is done."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """GiB that one call allocates at its peak beyond what was there before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def measure(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    min_ms: float = 50.0,
    max_seconds: float = 1.0,
) -> Timing:
    """Times calls that do the same work on different inputs, one after the other.

    Repeats last at least `min_ms` in all, and about `max_seconds` at most (one repeat always runs).
    """
    calls[0]()  # compiles
    estimate = min(seconds(call, device) for call in (calls * 2)[:2])
    if estimate < max_seconds / 4:
        estimate = min(estimate, seconds(calls[-1], device))
    host_us = _host_us(calls, device, 5 if estimate < max_seconds / 10 else 1)
    if device.type != "cuda":
        repeats = _repeats(estimate, min_ms, max_seconds)
        times = [seconds(calls[i % len(calls)], device) for i in range(repeats)]
        return Timing(statistics.median(times) * 1e3, "wall", host_us)
    per_graph = max(1, min(MAX_CALLS // len(calls), math.ceil(GRAPH_SECONDS / estimate)))
    many = list(calls) * per_graph if estimate < max_seconds / 10 else list(calls[:1])
    try:
        graph = capture(many, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any library may fail in its own way
        note = short_reason(error)
    else:
        try:
            ms = _replayed(graph, min_ms, max_seconds) / len(many)
        finally:
            graph.reset()
        return Timing(ms, "graph", host_us)
    repeats = min(100, _repeats(estimate, min_ms, max_seconds / 4))
    return Timing(_profiled(calls, repeats, device), "profiler", host_us, note)


def capture(calls: Sequence[Callable[[], object]], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of the calls, captured on the current (side) stream; failing leaves it usable."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except Exception:
        # A capture that the driver invalidated leaves the allocator in recording mode.
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch.cuda.synchronize(device)
        raise
    return graph


def short_reason(error: BaseException) -> str:
    """The first line that says something, with the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _repeats(estimate: float, min_ms: float, max_seconds: float) -> int:
    wanted = max(3, math.ceil(min_ms * 1e-3 / max(estimate, 1e-7)))
    return max(1, min(wanted, int(max_seconds / max(estimate, 1e-7))))


def _host_us(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> float:
    times = []
    for i in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - began)
    synchronize(device)
    return statistics.median(times) * 1e6


def _replayed(graph: torch.cuda.CUDAGraph, min_ms: float, max_seconds: float) -> float:
    """Median milliseconds of a replay."""

    def timed(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]

    estimate = min(timed(2)) * 1e-3
    if estimate > max_seconds / 2:
        return statistics.median(timed(1))
    return statistics.median(timed(_repeats(estimate, min_ms, max_seconds)))


def _profiled(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> float:
    """Milliseconds of the kernels, copies and fills of one call."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(repeats):
            calls[i % len(calls)]()
        torch.cuda.synchronize(device)
    total = sum(
        event.self_device_time_total
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    if total <= 0:
        raise RuntimeError("the profiler saw no kernels")
    return total / repeats / 1e3

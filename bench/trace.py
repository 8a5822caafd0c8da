"""GPU time by part of a training step, from a trace that torch.profiler exported.

A kernel belongs to the operators that were running on the thread that launched it, at the moment of
its launch. The outermost of them that a part claims decides; of the rest, those that a matrix
product launched are dense products.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from bench.step import part_of

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_OPERATORS = {"cpu_op", "user_annotation"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the GPU.

    Attributes:
        name: its own. kind: "kernel", "gpu_memcpy" or "gpu_memset".
        begin, end: microseconds.
        operators: those that launched it, outermost first; empty where the launch is not known.
    """

    name: str
    kind: str
    begin: float
    end: float
    operators: tuple[str, ...]

    @property
    def part(self) -> str:
        for operator in self.operators:
            if (part := part_of(operator)) is not None:
                return part
        if not PRODUCTS.isdisjoint(self.operators):
            return "dense products"
        if self.kind == "gpu_memcpy" and "DtoD" not in self.name:
            return "copies to and from the host"
        return "elementwise, norms, gathers"


def kernels(trace: dict[str, Any]) -> Iterator[Kernel]:
    """The work of a GPU in a trace of `torch.profiler.profile.export_chrome_trace`."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    running = _running(events)
    for event in events:
        if event.get("cat") in _ON_GPU:
            begin, operators = float(event["ts"]), running.get(_correlation(event), ())
            end = begin + float(event["dur"])
            yield Kernel(event["name"], event["cat"], begin, end, operators)


def _correlation(event: dict[str, Any]) -> int | None:
    """What a launch and its kernel have in common."""
    return event.get("args", {}).get("correlation")


def _running(events: list[dict[str, Any]]) -> dict[int | None, tuple[str, ...]]:
    """By correlation, the operators around a launch on its thread, outermost first."""
    by_thread: dict[Any, list[tuple[float, float, dict]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _OPERATORS | _LAUNCHES:
            begin, length = float(event["ts"]), float(event.get("dur", 0))
            by_thread[event["pid"], event["tid"]].append((begin, length, event))
    found = {}
    for entries in by_thread.values():
        stack: list[tuple[float, str]] = []
        # Of those that begin together the longest is the outermost.
        for begin, length, event in sorted(entries, key=lambda entry: (entry[0], -entry[1])):
            while stack and stack[-1][0] <= begin:
                stack.pop()
            if event["cat"] in _LAUNCHES:
                found[_correlation(event)] = tuple(name for _, name in stack)
            else:
                stack.append((begin + length, event["name"]))
    return found


def by_part(found: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds of GPU work per part."""
    total: dict[str, float] = defaultdict(float)
    for kernel in found:
        total[kernel.part] += (kernel.end - kernel.begin) / 1e3
    return dict(total)


def busy_ms(found: Iterable[Kernel]) -> float:
    """Milliseconds in which the GPU did something; work side by side counts once."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((kernel.begin, kernel.end) for kernel in found):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e3


def longest(found: Iterable[Kernel], count: int) -> list[dict[str, Any]]:
    """The `count` kernels that took most: name, part, milliseconds and calls of each."""
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in found:
        entry = total[kernel.name[:80], kernel.part]
        entry[0] += (kernel.end - kernel.begin) / 1e3
        entry[1] += 1
    first = sorted(total.items(), key=lambda item: -item[1][0])[:count]
    return [
        {"name": name, "part": part, "ms": ms, "calls": calls}
        for (name, part), (ms, calls) in first
    ]

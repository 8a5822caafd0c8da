"""Barriers: mbarriers in shared memory, and the named barriers of a CTA."""

from __future__ import annotations

import numpy as np

from gem.attention.simulator import context
from gem.attention.simulator.clocks import nothing
from gem.attention.simulator.errors import BarrierMisuse, OutOfBounds, OverArrival, WrongBytes


class Knowledge:
    """What those who arrived knew; those who wait take it over."""

    def __init__(self):
        self.coming, self.coming_fences = nothing(), nothing()
        self.known, self.fences = nothing(), nothing()
        self.arrivals: dict[str, tuple[int, str]] = {}  # task -> (times, last line)

    def take(self, task) -> None:
        np.maximum(self.coming, task.clocks, out=self.coming)
        np.maximum(self.coming_fences, task.fences, out=self.coming_fences)
        times = self.arrivals.get(task.name, (0, ""))[0]
        self.arrivals[task.name] = times + 1, context.short(context.where())
        task.tick()
        context.changed()

    def take_from(self, clocks, fences, name: str, where) -> None:
        """As `take`, from an asynchronous operation."""
        np.maximum(self.coming, clocks, out=self.coming)
        np.maximum(self.coming_fences, fences, out=self.coming_fences)
        times = self.arrivals.get(name, (0, ""))[0]
        self.arrivals[name] = times + 1, context.short(where)

    def publish(self) -> None:
        self.known[...] = self.coming
        self.fences[...] = self.coming_fences

    def give(self, task) -> None:
        np.maximum(task.clocks, self.known, out=task.clocks)
        np.maximum(task.fences, self.fences, out=task.fences)

    def who_arrived(self) -> str:
        """Who has ever arrived, for the report of a deadlock."""
        if not self.arrivals:
            return "nobody has arrived at it so far"
        parts = [
            f"{task} ({times} times, last at {line})"
            for task, (times, line) in self.arrivals.items()
        ]
        return "so far arrived: " + ", ".join(parts)


class MBarrier(Knowledge):
    """An mbarrier: a phase ends with `count` arrivals and all bytes that it expects.

    Attributes:
        agent: whose clock counts the phases that have ended.
        phase: phases that have ended.
        pending: arrivals that the current phase still takes.
        bytes: that the current phase still expects; negative if copies came before that was said.
        threads: whether every thread of a task arrives (a warp barrier), not one.
    """

    def __init__(self, name: str, agent: int, count: int, threads: bool):
        super().__init__()
        self.name, self.agent, self.count, self.threads = name, agent, count, threads
        self.phase, self.pending, self.bytes = 0, count, 0
        self.last_copy: tuple[int, object] | None = None  # (phase that it ended with, access)

    def arrive(self, task, times: int) -> None:
        self._check(times)
        self.take(task)
        self.pending -= times
        self._end()

    def arrive_by(self, clocks, fences, name: str, where) -> None:
        """One arrival by an asynchronous operation that knows so much."""
        self._check(1)
        self.take_from(clocks, fences, name, where)
        self.pending -= 1
        self._end()

    def _check(self, times: int) -> None:
        if times > self.pending:
            raise context.error(
                OverArrival,
                f"{times} arrivals at {self.name}, whose phase {self.phase} takes"
                f" {self.pending} more (of {self.count}); {self.who_arrived()}.",
            )

    def expect(self, task, size: int) -> None:
        """An arrival that also says how many bytes copies will bring."""
        if self.pending < 1:
            raise context.error(
                OverArrival,
                f"bytes are expected of {self.name}, whose phase {self.phase} has had its"
                f" {self.count} arrivals and waits for {self.bytes} bytes.",
            )
        self.take(task)
        self.bytes += size
        self.pending -= 1
        self._end()

    def brought(self, access, size: int) -> None:
        """A copy of so many bytes is complete."""
        access.clock = self.phase + 1
        self.last_copy = access.clock, access
        cta = context.cta
        if len(cta.cluster) > 1:  # who waits for it knows that the CTA of the copy has started
            self.coming[cta.main.agent] = max(self.coming[cta.main.agent], 1)
        self.bytes -= size
        self._end()

    def _end(self) -> None:
        if self.pending or self.bytes > 0:
            return
        if self.bytes < 0:
            raise context.error(
                WrongBytes,
                f"copies brought {-self.bytes} bytes more than {self.name} expects in phase"
                f" {self.phase}.",
            )
        self.phase += 1
        self.pending = self.count
        self.coming[self.agent] = self.phase
        self.publish()
        cta = context.cta
        cta.clock += 1
        if cta.trace is not None:
            cta.trace.barrier(cta, self)

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity returns."""
        return self.phase & 1 != parity

    def state(self) -> str:
        return (
            f"it is in phase {self.phase} (parity {self.phase & 1}), {self.pending} of"
            f" {self.count} arrivals and {self.bytes} bytes outstanding"
        )


class Barriers:
    """What `alloc_barriers` returns."""

    def __init__(self, barriers: list[MBarrier], name: str):
        self.barriers, self.name = barriers, name

    def __getitem__(self, index) -> MBarrier:
        index = int(index)
        if not 0 <= index < len(self.barriers):
            raise context.error(
                OutOfBounds, f"{self.name}[{index}], but {self.name} has {len(self.barriers)}"
            )
        return self.barriers[index]


class NamedBarrier(Knowledge):
    """A hardware barrier by id: a turn ends when `threads` threads have arrived or wait."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.turn, self.threads, self.here = number, 0, 0, 0
        self.names: list[str] = []

    def arrive(self, task, threads: int) -> None:
        if threads <= 0 or threads % 32:
            raise context.error(
                BarrierMisuse,
                f"named barrier {self.number} for {threads} threads, no multiple of 32",
            )
        if self.here and threads != self.threads:
            raise context.error(
                BarrierMisuse,
                f"named barrier {self.number} for {threads} threads, while"
                f" {', '.join(self.names)} came for {self.threads}.",
            )
        if task.name in self.names or self.here + task.threads > threads:
            raise context.error(
                OverArrival,
                f"the {task.threads} threads of {task.name} come to named barrier {self.number},"
                f" where {self.here} of {threads} are already: {', '.join(self.names)}.",
            )
        self.threads = threads
        self.take(task)
        self.here += task.threads
        self.names.append(task.name)
        if self.here == threads:
            self.turn += 1
            self.here, self.names = 0, []
            self.publish()

    def passed(self, turn: int) -> bool:
        return self.turn > turn

    def state(self) -> str:
        here = ", ".join(self.names) or "nobody"
        return f"{self.here} of {self.threads} threads are there ({here})"

"""Runs the tasks of a CTA as coroutines, in an order that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Generator

import numpy as np

from gem.attention.simulator import context, spins
from gem.attention.simulator.asynchronous import Lane, Operation, Write
from gem.attention.simulator.clocks import AGENTS, nothing
from gem.attention.simulator.errors import (
    Deadlock,
    ResourceError,
    SimulationError,
    UnwaitedResult,
    WrongBytes,
)
from gem.attention.simulator.memory import SharedMemory
from gem.attention.simulator.sync import MBarrier, NamedBarrier

HELD = 128  # writes of a cluster that may be late at a time: a bound on memory


class Policy:
    """Who runs next, and when asynchronous operations take effect.

    Seed 0: every operation as late as possible, tasks in order, each as far as it comes. Seed 1:
    every operation at once, tasks in reverse order. Others: at random, with a readiness to switch
    and to delay that the seed draws too.

    Attributes:
        writing: how readily what a store has read is written: 1 at once, 0 as late as possible and
            the last first, else at random. It has random numbers of its own.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.early = seed == 1
        self.random = random.Random(seed) if seed > 1 else None
        if self.random is not None:
            self.switching = self.random.choice((0.05, 0.3, 0.8))
            self.finishing = self.random.choice((0.03, 0.2, 0.6))
        self.writer = random.Random(f"writes of seed {seed}")
        often = (0, 0, 0, 0.1, 1)
        self.writing = 1 if self.early else 0 if seed == 0 else self.writer.choice(often)

    def switch(self) -> bool:
        """Whether the running task lets others run here."""
        return self.random is not None and self.random.random() < self.switching

    def task(self, ready: list[Task]) -> Task:
        if self.random is not None:
            return self.random.choice(ready)
        return ready[-1 if self.early else 0]

    def operation(self, pending: list[Operation], stuck: bool) -> int | None:
        """The index of the operation that takes effect now, if one does."""
        if self.random is None:
            return 0 if stuck else None
        if stuck or self.random.random() < self.finishing:
            return self.random.randrange(len(pending))
        return None

    def writes(self) -> bool:
        """Whether a write happens now, though nothing demands it."""
        return self.writing > 0 and self.writer.random() < self.writing

    def write(self, held: list[Write]) -> Write:
        """The next of these writes."""
        return self.writer.choice(held) if self.writing else held[-1]

    def refuses(self) -> bool:
        """Whether others were faster than a request for a CTA that has not started."""
        return self.early or (self.random is not None and self.random.random() < 0.25)

    def order(self, programs: list) -> list:
        """The CTAs of a grid in the order in which they run."""
        programs = list(programs)
        if self.early:
            programs.reverse()
        elif self.random is not None:
            self.random.shuffle(programs)
        return programs


class Task:
    """An async_task's replica, or the program outside of async_tasks.

    Attributes:
        name: with its replica.
        threads: that run it.
        clocks, fences: what it knows to have happened, and which ordinary stores to be fenced.
        products, stores, loads: its queues of asynchronous operations.
        blocked: (barrier, parity or turn) that it waits for, or None.
        spin: the turns of its loops since something has changed.
        lefts: the last product of every place whose left operand is in registers.
        unrolled: the indices of the `static_range` loops that it is in.
    """

    def __init__(self, cta: Cta, name: str, replica: int | None, threads: int, parent=None):
        if len(cta.cluster) > 1:
            name += f" of CTA {cta.rank}"
        self.cta, self.name, self.replica, self.threads = cta, name, replica, threads
        self.agent = cta.agent()
        self.clocks = nothing() if parent is None else parent.clocks.copy()
        self.fences = nothing() if parent is None else parent.fences.copy()
        self.clocks[self.agent] = 1
        self.products, self.stores = Lane(cta.agent()), Lane(cta.agent())
        self.loads = Lane(cta.agent())  # by commit groups
        self.blocked: tuple | None = None
        self.spin = spins.Spin()
        self.lefts: dict[tuple, int] = {}
        self.unrolled: list[int] = []
        self.coroutine: Generator | None = None

    @property
    def clock(self) -> int:
        return int(self.clocks[self.agent])

    def tick(self) -> None:
        """What follows is not known to those who take over this task's knowledge now."""
        self.clocks[self.agent] += 1

    def know(self, other: Task) -> None:
        """Takes over all that another task knows."""
        np.maximum(self.clocks, other.clocks, out=self.clocks)
        np.maximum(self.fences, other.fences, out=self.fences)

    def fence(self) -> None:
        np.maximum(self.fences, self.clocks, out=self.fences)
        self.tick()

    def fenced(self) -> np.ndarray:
        """Which ordinary stores an asynchronous store issued now may read."""
        return self.clocks if self.cta.run_of.compiler_fences else self.fences

    def ready(self) -> bool:
        if self.blocked is None:
            return True
        what, state = self.blocked
        if isinstance(what, list):
            return all(task.coroutine is None for task in what)
        return what.passed(state)

    def waits_for(self) -> str:
        """What it waits for, for the report of a deadlock."""
        what, state = self.blocked
        place = context.short(suspended_at(self.coroutine))
        if isinstance(what, MBarrier):
            return (
                f"{self.name} waits at {place} for {what.name} to end a phase of parity {state}:"
                f" {what.state()}; {what.who_arrived()}"
            )
        if isinstance(what, NamedBarrier):
            return (
                f"{self.name} waits at {place} for named barrier {what.number}:"
                f" {what.state()}; {what.who_arrived()}"
            )
        if isinstance(what, list):
            return f"{self.name} waits for its tasks"
        return f"{self.name} waits at {place} for {what.state()}"


def suspended_at(coroutine) -> tuple[tuple[str, int], ...]:
    """(file, line) of the kernel code where a coroutine is suspended, innermost first."""
    places = []
    while coroutine is not None and getattr(coroutine, "gi_frame", None) is not None:
        frame = coroutine.gi_frame
        if context.MARK in frame.f_globals:
            places.append((frame.f_code.co_filename, frame.f_lineno))
        coroutine = coroutine.gi_yieldfrom
    return tuple(reversed(places))


class Cta:
    """A CTA: its memory, barriers, tasks and operations under way.

    Attributes:
        cluster, rank: the CTAs that run together, and its place among them. All of them share the
            lists of tasks, operations and writes of the first, which runs them.
        writes: of what stores have read.
        main: its task outside of async_tasks.
        tensor: tensor memory, or None.
        clock: of traces: it counts what the scheduler and the tasks do.
    """

    def __init__(self, run, program, memory: SharedMemory, tensor=None, first: Cta | None = None):
        self.run_of, self.program, self.memory, self.tensor = run, program, memory, tensor
        self.target, self.policy, self.counts = run.target, run.policy, run.counts
        self.trace, self._clock = run.trace, 0
        self.cluster: list[Cta] = [] if first is None else first.cluster
        self.rank = len(self.cluster)
        self.cluster.append(self)
        self._agents = 0
        self.tasks: list[Task] = [] if first is None else first.tasks
        self.pending: list[Operation] = [] if first is None else first.pending
        self.writes: list[Write] = [] if first is None else first.writes
        self.barriers: list[MBarrier] = []
        self.named: dict[int, NamedBarrier] = {}
        self.main: Task | None = None
        self.cluster_barrier = None
        self.refused = False  # a launch request of this cluster
        memory.reset()
        if tensor is not None:
            tensor.reset()

    @property
    def clock(self) -> int:
        return self.cluster[0]._clock

    @clock.setter
    def clock(self, steps: int) -> None:
        self.cluster[0]._clock = steps

    def agent(self) -> int:
        first = self.cluster[0]
        if first._agents == AGENTS:
            raise context.error(ResourceError, f"more than {AGENTS} tasks and barriers")
        first._agents += 1
        return first._agents - 1

    def issue(self, operation: Operation) -> None:
        """Takes an operation over; it takes effect now or later."""
        self.clock += 1
        operation.issued = self.clock
        context.changed()
        self.counts.operations += 1
        if self.policy.early:
            self._finish(operation)
        else:
            self.pending.append(operation)

    def hold(self, write: Write) -> None:
        """Takes over a write, to be made later; if there are too many, any other is made now."""
        if len(self.writes) == HELD:
            self._write(self.policy.writer.choice(self.writes))
        write.issued = self.clock
        self.writes.append(write)

    def finish_writes(self, task: Task | None = None, number: int = 0) -> None:
        """Makes the writes of a task's stores up to this number, or all."""
        demanded = [x for x in self.writes if task is None or x.task is task and x.number <= number]
        while demanded:
            write = self.policy.write(demanded)
            demanded.remove(write)
            self._write(write)

    def _write(self, write: Write) -> None:
        self.writes.remove(write)
        write.take_effect()

    def _finish(self, operation: Operation) -> None:
        context.cta = operation.task.cta
        try:
            for lane in (operation.task.products, operation.task.stores):
                number = next((n for n, other in lane.open if other is operation), None)
                if number is not None:
                    lane.finish(number)
            operation.take_effect()
        except SimulationError as e:
            e.task, e.where = operation.task.name, operation.where
            raise
        context.cta = context.task.cta

    def run(self, start) -> None:
        """Runs its cluster to the end; `start` makes a coroutine (or runs a CTA outright)."""
        try:
            for cta in self.cluster:
                cta.main = Task(cta, "the program", None, 32 * self.run_of.warps)
                self.tasks.append(cta.main)
            for cta in self.cluster:
                context.cta, context.task = cta, cta.main
                cta.main.coroutine = start()
            self._loop()
            self._check_end()
        except SimulationError as e:
            e.cta, e.seed = context.cta.program, self.policy.seed
            raise
        finally:
            for task in self.tasks:
                if task.coroutine is not None:
                    task.coroutine.close()
            context.cta = context.task = None

    def _loop(self) -> None:
        policy, counts, limit = self.policy, self.counts, self.run_of.last_step
        while True:
            live = [task for task in self.tasks if task.coroutine is not None]
            if not live:
                return
            able = [task for task in live if task.ready()]
            ready = [task for task in able if not task.spin.endless or not task.spin.stuck()]
            if self.pending:
                self.pending[:] = [x for x in self.pending if not x.done]
            if self.pending:
                at = policy.operation(self.pending, stuck=not ready)
                if at is not None:
                    operation = self.pending.pop(at)
                    context.task = operation.task
                    self._finish(operation)
                    continue
            if self.writes and (not ready or policy.writes()):
                self._write(policy.write(self.writes))
                continue
            if not ready:
                if able:
                    self._endless(able, live)
                self._deadlock(live)
            task = policy.task(ready)
            if task is not context.task:
                counts.switches += 1
            counts.steps += 1
            context.cta, context.task = task.cta, task
            if counts.steps + counts.turns > limit:
                raise spins.over(self, suspended_at(task.coroutine))
            self.clock += 1
            started = self.clock
            try:
                next(task.coroutine)
            except StopIteration:
                task.coroutine = None
                context.changed()
            if self.trace is not None:
                self.trace.slice(task.cta, task, started)

    def _endless(self, spinning: list[Task], live: list[Task]) -> None:
        task = spinning[0]
        others = [t for t in live if t not in spinning and not isinstance(t.blocked[0], list)]
        context.cta, context.task = task.cta, task
        where = suspended_at(task.coroutine)
        raise spins.report(spinning, [t.waits_for() for t in others], where)

    def _deadlock(self, live: list[Task]) -> None:
        waiting = [t for t in live if not isinstance(t.blocked[0], list)]
        context.task = waiting[0]
        kind, first = Deadlock, waiting[0].blocked[0]
        for task in waiting:
            barrier = task.blocked[0]
            if isinstance(barrier, MBarrier) and not barrier.pending and barrier.bytes > 0:
                kind, context.task, first = WrongBytes, task, barrier
        what = "; ".join(task.waits_for() for task in waiting)
        if kind is WrongBytes:
            what = (
                f"{first.name} still expects {first.bytes} bytes and no copy is under way, so that"
                f" nobody goes on: {what}"
            )
        else:
            what = f"nobody goes on: {what}"
        context.cta = context.task.cta
        raise kind(what + ".", context.task.name, suspended_at(context.task.coroutine))

    def _check_end(self) -> None:
        """What the CTAs of a cluster leave behind."""
        main = self.main
        for operation in self.pending:
            context.task = operation.task
            self._finish(operation)
        self.finish_writes()
        for task in self.tasks:
            np.maximum(main.clocks, task.clocks, out=main.clocks)
        for task in self.tasks:
            # A multiprocessor keeps a CTA whose threads have copies by pointers under way.
            for lane, name in ((task.products, "async_dot"), (task.stores, "asynchronous store")):
                unwaited = lane.issued - main.clocks[lane.agent]
                if unwaited > 0:
                    context.cta = task.cta
                    raise UnwaitedResult(
                        f"the task ends with {unwaited} {name} that it has not waited for;"
                        " shared memory may be given to another CTA while it is read.",
                        task.name,
                    )
        for barrier in (barrier for cta in self.cluster for barrier in cta.barriers):
            if barrier.bytes:
                raise WrongBytes(
                    f"{barrier.name} is left with {barrier.bytes} bytes outstanding in phase"
                    f" {barrier.phase}.",
                    "the program",
                )
            copy = barrier.last_copy
            if copy is not None and main.clocks[barrier.agent] < copy[0]:
                raise UnwaitedResult(
                    f"nobody has waited for {copy[1]}, which completes on {barrier.name}.",
                    copy[1].task,
                    copy[1].where,
                )

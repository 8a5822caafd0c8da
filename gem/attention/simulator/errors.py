"""What the simulator reports: one exception per kind of fault."""

from __future__ import annotations


class SimulationError(Exception):
    """A fault of the simulated kernel (or of its launch).

    Attributes:
        what: one or two sentences: what happened, with the values involved.
        task: name of the task that ran, with its replica; "" outside tasks.
        where: (file, line) in the kernel's source, innermost first, callers after it.
        seed: the seed of the run.
        cta: the program's ids.
    """

    def __init__(self, what: str, task: str = "", where: tuple[tuple[str, int], ...] = ()):
        self.what, self.task, self.where = what, task, where
        self.seed: int | None = None
        self.cta: tuple[int, ...] | None = None
        super().__init__(what)

    def __str__(self) -> str:
        place = ", called from ".join(f"{file}:{line}" for file, line in self.where)
        text = type(self).__name__
        if place:
            text += f" at {place}"
        if self.task:
            text += f", task {self.task}"
        if self.cta is not None:
            text += f", program {self.cta}"
        if self.seed is not None:
            text += f", seed {self.seed}"
        return f"{text}: {self.what}"


class Deadlock(SimulationError):
    """No task can go on and no asynchronous operation is under way."""


class UninitialisedRead(SimulationError):
    """A read of shared memory that nobody has written."""


class OverwrittenRead(SimulationError):
    """A read of tensor memory whose columns hold another allocation's numbers by now."""


class Race(SimulationError):
    """Two accesses to the same memory, one a write, that no barrier orders."""


class AsyncConflict(Race):
    """An access to memory that an asynchronous operation may still read or write."""


class MissingFence(SimulationError):
    """An ordinary store to shared memory read by an asynchronous operation without a fence."""


class UnwaitedResult(SimulationError):
    """An accumulator read before its product was waited for, or a result never waited for."""


class OverwrittenOperand(SimulationError):
    """A left operand in registers, made anew in a loop before the last one has been read."""


class WrongBytes(SimulationError):
    """Copies bring another number of bytes than their barrier expects."""


class OverArrival(SimulationError):
    """More arrivals at a barrier than its phase takes."""


class BarrierMisuse(SimulationError):
    """A phase that is not 0 or 1, an id out of range, thread counts that differ."""


class OutOfBounds(SimulationError):
    """An access outside a tensor, a buffer or a list of buffers."""


class ResourceError(SimulationError):
    """More shared memory, registers or threads than the target has."""


class UnsupportedOperation(SimulationError):
    """An operation that the target does not have, or that the simulator does not know."""


class StepLimit(SimulationError):
    """The run took more steps and turns of loops than allowed: the kernel seems to spin."""


class EndlessLoop(StepLimit):
    """A loop repeats itself, and nothing that it reads can change any more."""


class KernelAssertion(SimulationError):
    """A `static_assert` or `device_assert` of the kernel that does not hold."""

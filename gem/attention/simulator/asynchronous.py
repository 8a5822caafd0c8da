"""Asynchronous operations: TMA copies, matrix products, TMA stores.

Each is checked when it is issued and takes effect when the scheduler says so, at the latest when
its task has waited for it. A store takes effect when its source has been read. What it has read is
written to global memory then or later, at the latest at a full wait (`assembly`) or when the CTA
ends, and writes of different stores come in any order.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.errors import UnwaitedResult
from gem.attention.simulator.values import Value


class Operation:
    """An operation that has been issued.

    Attributes:
        name: of its kind, for traces.
        task: that issued it.
        where: in the kernel's source.
        number: in its task's queue, if it is in one.
        done: whether it has taken effect.
        issued, ended: by the CTA's clock, for traces.
    """

    name = "operation"

    def __init__(self, task, where):
        self.task, self.where, self.number, self.done = task, where, 0, False
        self.issued = self.ended = 0

    def take_effect(self) -> None:
        """Does it, unless it is done."""
        if not self.done:
            self.done = True
            self.effect()
            context.changed()
            cta = self.task.cta
            cta.clock += 1
            self.ended = cta.clock
            if cta.trace is not None:
                cta.trace.operation(cta, self)

    def effect(self) -> None:
        raise NotImplementedError


class Lane:
    """A task's operations of one kind, which are waited for in the order of their issue.

    Attributes:
        agent: whose clock counts them.
        issued: how many there were.
        waited: how many of them the task has waited for.
    """

    def __init__(self, agent: int):
        self.agent, self.issued, self.waited = agent, 0, 0
        self.open: deque[tuple[int, Operation]] = deque()

    def issue(self, operation: Operation) -> int:
        self.issued += 1
        operation.number = self.issued
        self.open.append((self.issued, operation))
        return self.issued

    def finish(self, number: int) -> None:
        """Makes all up to this number take effect."""
        while self.open and self.open[0][0] <= number:
            self.open.popleft()[1].take_effect()

    def wait(self, task, pendings: int) -> None:
        """All but the last `pendings` are complete, and the task knows it."""
        number = max(self.issued - pendings, self.waited)
        self.finish(number)
        self.waited = number
        task.clocks[self.agent] = max(task.clocks[self.agent], number)

    def unwaited(self) -> int:
        return self.issued - self.waited


class Copy(Operation):
    """A TMA copy to shared memory that completes on an mbarrier."""

    name = "copy"

    def __init__(self, task, where, descriptor, offsets, buffer, barrier, access):
        super().__init__(task, where)
        self.descriptor, self.offsets = descriptor, offsets
        self.buffer, self.barrier, self.access = buffer, barrier, access

    def effect(self) -> None:
        bits = self.descriptor.box(self.offsets, "copy")
        self.buffer.bits[...] = bits.reshape(self.buffer.shape)
        self.barrier.brought(self.access, self.descriptor.bytes_of_box)

    def __str__(self) -> str:
        return f"copy to {self.buffer.name}"


class Outgoing(Operation):
    """A copy from shared to global memory: it takes effect when its source has been read."""

    name = "store"

    def __init__(self, task, where, buffer):
        super().__init__(task, where)
        self.buffer = buffer

    def effect(self) -> None:
        cta, bits = self.task.cta, self.buffer.bits
        if cta.policy.writing == 1:
            self.write(bits)
        else:
            cta.hold(Write(self, bits.copy()))

    def write(self, bits: np.ndarray) -> None:
        """Brings what has been read to global memory."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"store from {self.buffer.name}"


class Write(Operation):
    """The second half of an `Outgoing`, whose number it has."""

    name = "write"

    def __init__(self, store: Outgoing, bits: np.ndarray):
        super().__init__(store.task, store.where)
        self.store, self.bits, self.number = store, bits, store.number

    def effect(self) -> None:
        self.store.write(self.bits)
        self.bits = None

    def __str__(self) -> str:
        return f"write of {self.store.buffer.name}"


class Store(Outgoing):
    """A TMA store (or reduction) from shared memory."""

    def __init__(self, task, where, descriptor, offsets, buffer, reduce):
        super().__init__(task, where, buffer)
        self.descriptor, self.offsets, self.reduce = descriptor, offsets, reduce

    def write(self, bits: np.ndarray) -> None:
        self.descriptor.put(self.offsets, bits, self.reduce, "asynchronous store")


class Product(Operation):
    """A warp-group matrix product; its result is an `Accumulator`.

    Its operands in shared memory are read when it takes effect.
    """

    name = "product"

    def __init__(self, task, where, a, b, acc, result):
        super().__init__(task, where)
        self.a, self.b, self.acc, self.result = a, b, acc, result

    def effect(self) -> None:
        a = self.a.data if isinstance(self.a, Value) else self.a.numbers()
        product = multiply(a, self.b.numbers())
        if self.acc is not None:
            acc = self.acc
            product = product + (acc.result if isinstance(acc, Accumulator) else acc.data)
        self.result.result = product
        self.a = self.b = self.acc = None

    def __str__(self) -> str:
        return "product"


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in float32."""
    if a.dtype != np.float32:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.matmul(a, b)


class Accumulator(Value):
    """The result of a product: readable once its task has waited for it by `async_dot_wait`."""

    __slots__ = ("where", "number", "lane", "result", "extent")

    def __init__(self, where, lane: Lane, shape: tuple[int, ...]):
        self.dtype, self.base = tl.float32, None
        self.where, self.lane, self.extent = where, lane, shape
        self.number, self.result = 0, None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent

    @property
    def data(self):
        waited = "has been waited for, but not through this accumulator"
        if self.number > self.lane.waited:
            waited = "has not been waited for"
        raise context.error(
            UnwaitedResult,
            f"an accumulator is read whose product (at {context.short(self.where)}) {waited};"
            " its registers may still be written.",
        )

    def __repr__(self) -> str:
        return f"<accumulator of the product at {context.short(self.where)}>"


def copy_access(task, where, barrier) -> Access:
    return Access(barrier.agent, None, task.name, where, "copy to shared memory", True)

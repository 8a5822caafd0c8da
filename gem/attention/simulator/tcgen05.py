"""Matrix products of Blackwell (tcgen05.mma): their accumulators lie in tensor memory.

The products that a task issues take effect in the order of their issue. Who waits for a barrier on
which one completes knows that it and those before it are complete.
"""

from __future__ import annotations

import triton.language as tl

from gem.attention.simulator import clusters, context
from gem.attention.simulator.asynchronous import Operation, multiply
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.dtypes import multiplies
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.memory import Buffer, Buffers
from gem.attention.simulator.tensor_memory import LANES, TensorBuffer, require_pair


class TensorProduct(Operation):
    """A product of one CTA, or of a pair (two of everything)."""

    name = "product"

    def __init__(self, task, where, a, b, acc, accumulate: bool, signal: Signal):
        super().__init__(task, where)
        self.a, self.b, self.acc, self.accumulate, self.signal = a, b, acc, accumulate, signal

    def effect(self) -> None:
        right = [b.numbers() for b in self.b]
        width = right[0].shape[1]
        for a, acc in zip(self.a, self.acc, strict=True):
            left, new = a.numbers(), acc.numbers().copy()
            for i, b in enumerate(right):
                part = new[:, i * width : (i + 1) * width]
                product = multiply(left, b)
                part[...] = part + product if self.accumulate else product
            acc.put(new)
        self.signal.send(self)

    def reads(self) -> list[Buffer]:
        """What it reads but for its accumulators."""
        return [*self.a, *self.b]

    def __str__(self) -> str:
        return f"product to {self.acc[0].name}"


class Commit(Operation):
    """A `tcgen05_commit`: the products before it complete on a barrier."""

    name = "commit"

    def __init__(self, task, where, signal: Signal):
        super().__init__(task, where)
        self.signal = signal

    def effect(self) -> None:
        self.signal.send(self)

    def __str__(self) -> str:
        return "commit"


class Signal:
    """Arrivals at barriers when a task's products up to a number are complete."""

    def __init__(self, task, number: int, barriers):
        self.barriers = barriers
        self.clocks, self.fences = task.clocks.copy(), task.fences.copy()
        self.clocks[task.products.agent] = number

    def send(self, operation: Operation) -> None:
        for bar in self.barriers:
            name = f"products of {operation.task.name}"
            bar.arrive_by(self.clocks, self.fences, name, operation.where)


def operand(x, what: str):
    if isinstance(x, Buffers) and x.num == 1:
        x = x[0]
    if isinstance(x, Buffer):
        return x
    raise context.error(
        UnsupportedOperation,
        f"async_dot with {what} in registers ({x!r}); on {context.cta.target.name} it is in"
        + (" tensor memory" if what == "its accumulator" else " shared or tensor memory"),
    )


def _check(a, b, acc, columns: int) -> None:
    m, k = a.shape
    if k != b.shape[0] or not multiplies(a.dtype, b.dtype, k):
        raise context.error(
            UnsupportedOperation,
            f"async_dot of {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}: K is at least 16"
            " (32 for 8-bit floats), and types and K agree",
        )
    check_result(m, b, acc, columns)


def check_result(m: int, b, acc, columns: int) -> None:
    """Reports a size that there is not, or operands in the wrong memory.

    Args:
        m: rows of the left operand.
        columns: CTAs that share the right operand's columns.
    """
    n = b.shape[1] * columns
    if not isinstance(acc, TensorBuffer) or isinstance(b, TensorBuffer):
        raise context.error(
            UnsupportedOperation,
            f"async_dot with accumulator {acc!r} and right operand {b!r}: on"
            f" {context.cta.target.name} they are in tensor and in shared memory",
        )
    if m not in (64, 128) or not 32 <= n <= 256:
        raise context.error(
            UnsupportedOperation, f"async_dot of M {m} and N {n}: M is 64 or 128, N 32 to 256"
        )
    if acc.shape != (m, n) or acc.dtype != tl.float32:
        raise context.error(
            UnsupportedOperation, f"async_dot of {m}x{n} added to {acc!r} of {acc.dtype}"
        )


def dot(A, B, acc, use_acc, pred, mBarriers, two_ctas: bool, force_async: bool):
    """`async_dot`."""
    a, b = operand(A, "its left operand"), operand(B, "its right operand")
    acc = operand(acc, "its accumulator")
    _check(a, b, acc, 2 if two_ctas else 1)
    if two_ctas and a.shape[0] < LANES and clusters.pair(context.cta):
        require_pair(acc, True)
        if isinstance(a, TensorBuffer):
            require_pair(a, False)

    def make(place, pair, use, signal):
        sides = [[clusters.peer_buffer(x, other) for other in pair] for x in (a, b, acc)]
        return TensorProduct(context.task, place, *sides, use, signal)

    yield from issue(make, use_acc, pred, mBarriers, two_ctas, force_async)


def issue(make, use_acc, pred, mBarriers, two_ctas: bool, force_async: bool):
    """Issues a product; without barriers it is waited for, unless force_async is given.

    Args:
        make: makes it of (place in the source, CTAs, whether it accumulates, signal).
    """
    cta, task, place = context.cta, context.task, context.where()
    pair = clusters.pair(cta) if two_ctas else [cta]
    cta.run_of.two_ctas |= bool(two_ctas)
    if (pred is not None and not bool(pred)) or pair[0] is not cta:
        return  # of a pair, the first CTA issues for both
    barriers = []
    for bar in mBarriers:
        for other in pair:
            barriers.append((yield from clusters.peer_barrier(clusters.single(bar), other)))
    accumulate = use_acc is None or bool(use_acc)
    number = task.products.issued + 1
    access = Access(task.products.agent, number, task.name, place, "product", True)
    clocks = task.clocks.copy()
    clocks[task.products.agent] = number  # its own products are done in order
    operation = make(place, pair, accumulate, Signal(task, number, barriers))
    for x in operation.reads():
        x.read_by(access, clocks, task.fences)
    for x in operation.acc:
        if accumulate:
            x.read_by(access, clocks)
        x.write_by(access, clocks)
    task.products.issue(operation)
    cta.counts.products += 1
    cta.issue(operation)
    if not barriers and not force_async:
        task.products.wait(task, 0)
    if cta.policy.switch():
        yield


def tcgen05_commit(mBarrier, two_ctas=False):
    cta, task, place = context.cta, context.task, context.where()
    if not cta.target.tensor_columns:
        raise context.error(
            UnsupportedOperation, f"tcgen05_commit does not exist on {cta.target.name}"
        )
    pair = clusters.pair(cta) if two_ctas else [cta]
    if pair[0] is not cta:
        return
    bar, barriers = clusters.single(mBarrier), []
    for other in pair:
        barriers.append((yield from clusters.peer_barrier(bar, other)))
    lane = task.products
    operation = Commit(task, place, Signal(task, lane.issued, barriers))
    lane.open.append((lane.issued, operation))
    cta.issue(operation)
    if cta.policy.switch():
        yield

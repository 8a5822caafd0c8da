"""CTAs that run together: what one of them reaches in another."""

from __future__ import annotations

from gem.attention.simulator import context
from gem.attention.simulator.errors import BarrierMisuse, OutOfBounds, Race, UnsupportedOperation
from gem.attention.simulator.memory import Buffer
from gem.attention.simulator.sync import Barriers, Knowledge, MBarrier
from gem.attention.simulator.tensor_memory import TensorBuffer, view


class ClusterBarrier(Knowledge):
    """The hardware barrier of a cluster: a turn ends when all CTAs have come."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.turn, self.here = size, 0, []

    def arrive(self, task) -> None:
        if task.cta.rank in self.here:
            raise context.error(
                BarrierMisuse,
                f"two tasks of CTA {task.cta.rank} come to one cluster_barrier: all threads of a"
                " CTA come once, outside of async_tasks or in one of them",
            )
        self.take(task)
        self.here.append(task.cta.rank)
        if len(self.here) == self.size:
            self.turn += 1
            self.here = []
            self.publish()

    def passed(self, turn: int) -> bool:
        return self.turn > turn

    def state(self) -> str:
        return f"cluster_barrier: of {self.size} CTAs, {sorted(self.here)} are there"


class _Start:
    """Waiting for another CTA to make a barrier."""

    def __init__(self, cta, index: int):
        self.cta, self.index = cta, index

    def passed(self, _) -> bool:
        return len(self.cta.barriers) > self.index

    def state(self) -> str:
        return f"barrier {self.index} of CTA {self.cta.rank}, which does not exist"


def single(bar) -> MBarrier:
    """One mbarrier, which may be given as a list of one."""
    if isinstance(bar, Barriers) and len(bar.barriers) == 1:
        return bar[0]
    if not isinstance(bar, MBarrier):
        raise context.error(BarrierMisuse, f"one mbarrier is expected, not {bar!r}")
    return bar


def pair(cta) -> list:
    """The two CTAs of a two-CTA operation, the one of even rank first."""
    first = cta.rank & ~1
    if first + 1 >= len(cta.cluster):
        raise context.error(
            UnsupportedOperation,
            f"two_ctas in a cluster of {len(cta.cluster)}: ctas_per_cga gives pairs of CTAs",
        )
    return cta.cluster[first : first + 2]


def peer(rank):
    """The CTA of this rank in the running CTA's cluster."""
    rank, cluster = int(rank), context.cta.cluster
    if not 0 <= rank < len(cluster):
        raise context.error(OutOfBounds, f"CTA {rank} of a cluster of {len(cluster)}")
    return cluster[rank]


def peer_barrier(bar: MBarrier, other):
    """Another CTA's barrier at the same place, once it exists.

    The compiler makes the CTAs of a cluster wait for each other after barriers are made.
    """
    cta, task = context.cta, context.task
    if other is cta:
        return bar
    index = next(i for i, x in enumerate(cta.barriers) if x is bar)
    start = _Start(other, index)
    while not start.passed(None):
        task.blocked = start, None
        yield
    task.blocked = None
    return other.barriers[index]


def alive(other, what: str) -> None:
    """Reports what reaches a CTA that has ended.

    With two_ctas products the compiler makes the CTAs of a cluster wait for each other at the end.
    """
    if context.cta.run_of.two_ctas:
        return
    if other is not context.cta and other.main.coroutine is None:
        raise context.error(Race, f"the {what} reaches CTA {other.rank}, which has ended.")


def started(other, what: str) -> None:
    """Reports what reaches shared memory of a CTA that may not run yet, or has ended."""
    alive(other, what)
    if context.task.clocks[other.main.agent] < 1:
        raise context.error(
            Race,
            f"the {what} reaches shared memory of CTA {other.rank}, which may not have started:"
            " no cluster_barrier comes before it.",
        )


def peer_buffer(buffer: Buffer, other) -> Buffer:
    """Another CTA's buffer at the same place."""
    if other is context.cta:
        return buffer
    name = f"{buffer.name} of CTA {other.rank}"
    if isinstance(buffer, TensorBuffer):
        if len(other.tensor.made) <= buffer.life.number:
            raise context.error(
                Race, f"tensor memory of CTA {other.rank} is used before it has allocated it"
            )
        life = other.tensor.made[buffer.life.number]
        return view(other.tensor, buffer.offset, buffer.shape, buffer.dtype, name, life)
    return other.memory.buffer(buffer.offset, buffer.shape, buffer.strides, buffer.dtype, name)

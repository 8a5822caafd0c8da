"""Operations of `triton.language.extra.tlx` on other CTAs of a cluster."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gem.attention.simulator import clusters, context
from gem.attention.simulator.asynchronous import Operation, copy_access
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.errors import OutOfBounds, UnsupportedOperation
from gem.attention.simulator.memory import Buffer, Buffers
from gem.attention.simulator.tensor_memory import TensorBuffer
from gem.attention.simulator.values import Value


class RemoteStore(Operation):
    """A store of registers, or a copy of a buffer, to another CTA's shared memory."""

    name = "remote store"

    def __init__(self, task, where, source, buffer: Buffer, barrier, access):
        super().__init__(task, where)
        self.source, self.buffer, self.barrier, self.access = source, buffer, barrier, access

    def effect(self) -> None:
        source = self.source
        self.buffer.put(source.data if isinstance(source, Value) else source.numbers())
        self.barrier.brought(self.access, self.buffer.bytes_whole)

    def __str__(self) -> str:
        return f"remote store to {self.buffer.name}"


def cluster_cta_rank():
    return Value(context.cta.rank, tl.int32)


def cluster_size_1d():
    return Value(len(context.cta.cluster), tl.int32)


def cluster_barrier():
    cta, task = context.cta, context.task
    first = cta.cluster[0]
    if first.cluster_barrier is None:
        first.cluster_barrier = clusters.ClusterBarrier(len(cta.cluster))
    bar = first.cluster_barrier
    turn = bar.turn
    bar.arrive(task)
    while not bar.passed(turn):
        task.blocked = bar, turn
        yield
    task.blocked = None
    bar.give(task)


def fence_mbarrier_init_cluster():
    """Barriers are visible to the cluster once they are made."""


class RemoteBarrier:
    """What `remote_view` returns: a barrier of another CTA, to arrive at."""

    def __init__(self, bar, other):
        self.bar, self.other = bar, other


def remote_view(local_allocated_buffer, remote_cta_rank):
    if isinstance(local_allocated_buffer, Buffer | Buffers):
        raise context.error(UnsupportedOperation, "remote_view of a buffer, not of a barrier")
    bar = clusters.single(local_allocated_buffer)
    return RemoteBarrier(bar, clusters.peer(remote_cta_rank))


def _local(buffer, what: str) -> Buffer:
    if isinstance(buffer, Buffers) and buffer.num == 1:
        buffer = buffer[0]
    if not isinstance(buffer, Buffer) or isinstance(buffer, TensorBuffer):
        raise context.error(
            UnsupportedOperation, f"{what} takes a buffer in shared memory, not {buffer!r}"
        )
    return buffer


def _same(dst: Buffer, src, what: str) -> None:
    if tuple(src.shape) != tuple(dst.shape) or src.dtype != dst.dtype:
        raise context.error(OutOfBounds, f"a {what} of {src!r} to {dst.dtype}{list(dst.shape)}")


def remote_shmem_store(dst, src, remote_cta_rank):
    what, task, other = "remote store", context.task, clusters.peer(remote_cta_rank)
    dst = _local(dst, "remote_shmem_store")
    _same(dst, src, what)
    clusters.started(other, what)
    dst = clusters.peer_buffer(dst, other)
    access = Access(task.agent, task.clock, task.name, context.where(), what, False)
    dst.write_by(access, task.clocks)
    dst.put(src.data)
    if context.cta.policy.switch():
        yield


def _remote(dst, src, rank, barrier, what: str):
    cta, task, place, other = context.cta, context.task, context.where(), clusters.peer(rank)
    dst = _local(dst, what)
    _same(dst, src, what)
    clusters.started(other, what)
    bar = yield from clusters.peer_barrier(clusters.single(barrier), other)
    dst = clusters.peer_buffer(dst, other)
    access = copy_access(task, place, bar)
    access.what = what
    if isinstance(src, Value):
        src = Value(np.array(src.data), src.dtype)
    else:
        src.read_by(access, task.clocks, task.fences)
    dst.write_by(access, task.clocks)
    cta.issue(RemoteStore(task, place, src, dst, bar, access))
    if cta.policy.switch():
        yield


def async_remote_shmem_store(dst, src, remote_cta_rank, barrier):
    yield from _remote(dst, src, remote_cta_rank, barrier, "asynchronous remote store")


def async_remote_shmem_copy(dst, src, remote_cta_rank, barrier):
    src = _local(src, "async_remote_shmem_copy")
    yield from _remote(dst, src, remote_cta_rank, barrier, "remote copy")


def subslice(local_allocated_buffer, offset, size):
    buffer = local_allocated_buffer
    if isinstance(buffer, Buffers) and buffer.num == 1:
        buffer = buffer[0]
    if not isinstance(buffer, TensorBuffer):
        raise context.error(UnsupportedOperation, f"subslice of {buffer!r}, not in tensor memory")
    return buffer.slice([0, offset], [buffer.shape[0], size])

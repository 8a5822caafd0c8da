"""Copies of TLX that need no descriptor: `async_load` (cp.async and bulk) and `async_store`."""

from __future__ import annotations

import numpy as np

from gem.attention.simulator import context, global_memory
from gem.attention.simulator.asynchronous import Operation, Outgoing, copy_access
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.dtypes import item_bytes
from gem.attention.simulator.errors import OutOfBounds, UnsupportedOperation
from gem.attention.simulator.memory import Buffer
from gem.attention.simulator.values import value


class PointerCopy(Operation):
    """A copy by a tensor of pointers, which a commit group completes."""

    name = "copy"

    def __init__(self, task, where, pointers, mask, other, buffer):
        super().__init__(task, where)
        self.pointers, self.mask, self.other, self.buffer = pointers, mask, other, buffer

    def effect(self) -> None:
        self.buffer.put(global_memory.load(self.pointers, self.mask, self.other).data)

    def __str__(self) -> str:
        return f"copy to {self.buffer.name}"


class BulkCopy(Operation):
    """A copy of consecutive bytes to shared memory that completes on an mbarrier."""

    name = "copy"

    def __init__(self, task, where, source, buffer, size, barrier, access):
        super().__init__(task, where)
        self.source, self.buffer, self.size = source, buffer, size
        self.barrier, self.access = barrier, access

    def effect(self) -> None:
        memory, start, to = self.source.base, self.source.data, self.buffer.offset
        self.buffer.memory.bytes[to : to + self.size] = memory.bytes[start : start + self.size]
        self.barrier.brought(self.access, self.size)

    def __str__(self) -> str:
        return f"copy to {self.buffer.name}"


class BulkStore(Outgoing):
    """A copy of consecutive bytes from shared memory."""

    def __init__(self, task, where, to, buffer, size):
        super().__init__(task, where, buffer)
        self.to, self.size = to, size

    def write(self, bits: np.ndarray) -> None:
        start = self.to.data
        self.to.base.bytes[start : start + self.size] = bits.view(np.uint8)


def _bulk(pointer, buffer, size: int, what: str) -> Buffer:
    """The part of a one-dimensional buffer that so many bytes take."""
    if len(buffer.shape) != 1:
        raise context.error(UnsupportedOperation, f"a {what} of {buffer!r}, not one-dimensional")
    if size % 16 or pointer.data % 16 or buffer.offset % 16 or size > buffer.bytes_whole:
        raise context.error(
            OutOfBounds,
            f"a {what} of {size} bytes from byte {pointer.data} of {pointer.base.name} for"
            f" {buffer!r}: sizes and addresses are multiples of 16 and the buffer is as long",
        )
    if pointer.data < 0 or pointer.data + size > pointer.base.size:
        raise context.error(
            OutOfBounds,
            f"a {what} reaches byte {pointer.data + size} of {pointer.base.name}, which has"
            f" {pointer.base.size}",
        )
    return buffer.slice([0], [size // item_bytes(buffer.dtype)])


def async_load(
    src, result, mask=None, other=None, cache_modifier="", eviction_policy="", is_volatile=False,
    bulk=False, bulk_size=None, barrier=None,
):  # fmt: skip
    task, place = context.task, context.where()
    if bulk:
        size = result.bytes_whole if bulk_size is None else int(bulk_size)
        part = _bulk(src, result, size, "bulk copy")
        access = copy_access(task, place, barrier)
        part.write_by(access, task.clocks)
        operation = BulkCopy(task, place, src, part, size, barrier, access)
    else:
        dtype = src.dtype.element_ty
        if tuple(np.broadcast_shapes(src.shape, result.shape)) != tuple(result.shape):
            raise context.error(OutOfBounds, f"a copy from {src!r} to {result!r}")
        mask = None if mask is None else value(mask)
        other = None if other is None else value(other).to(dtype)
        src.base.indices(
            *np.broadcast_arrays(src.data, True if mask is None else mask.data), dtype, "copy"
        )
        number = task.loads.issued + 1  # of the group that the next commit makes
        access = Access(task.loads.agent, number, task.name, place, "copy to shared memory", True)
        result.write_by(access, task.clocks)
        operation = PointerCopy(task, place, src, mask, other, result)
        task.loads.open.append((number, operation))
    context.cta.issue(operation)
    if context.cta.policy.switch():
        yield


def async_load_commit_group(tokens=()):
    context.task.loads.issued += 1


def async_load_wait_group(pendings, tokens=()):
    context.task.loads.wait(context.task, int(pendings))
    if context.cta.policy.switch():
        yield


def async_store(dst_global_ptr, src_smem, size):
    task, place = context.task, context.where()
    part = _bulk(dst_global_ptr, src_smem, int(size), "bulk store")
    operation = BulkStore(task, place, dst_global_ptr, part, int(size))
    number = task.stores.issue(operation)
    access = Access(task.stores.agent, number, task.name, place, "asynchronous store", True)
    part.read_by(access, task.clocks, task.fences)
    context.cta.issue(operation)
    if context.cta.policy.switch():
        yield

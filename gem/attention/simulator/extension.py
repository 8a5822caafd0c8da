"""Operations of TLX (`triton.language.extra.tlx`) for the simulator, by their names there.

Those that are generator functions are where a task may hand over to another.
"""

from __future__ import annotations

import math

import numpy as np
import triton.language as tl

from gem.attention.simulator import clusters, context, language, operands, scaled, tcgen05
from gem.attention.simulator.aliases import AliasedBuffers, AliasSpec, ReuseGroup
from gem.attention.simulator.asynchronous import Accumulator, Copy, Product, Store, copy_access
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.dtypes import item_bytes, multiplies
from gem.attention.simulator.errors import (
    BarrierMisuse,
    OutOfBounds,
    UnsupportedOperation,
)
from gem.attention.simulator.global_memory import Descriptor
from gem.attention.simulator.memory import Buffer, Buffers
from gem.attention.simulator.remote import RemoteBarrier
from gem.attention.simulator.sync import Barriers, MBarrier, NamedBarrier
from gem.attention.simulator.tensor_memory import (
    LANES,
    AliasedTensorBuffers,
    TensorBuffer,
    TensorBuffers,
    row_bytes,
)
from gem.attention.simulator.values import Value, value


def dtype_of(v):
    dtype = v.dtype
    return dtype.element_ty if isinstance(dtype, tl.pointer_type) else dtype


def size_of(dtype):
    return item_bytes(dtype)


def require_layout(x, layout):
    """x: layouts are the compiler's business, but one has to have a place for every element."""
    places = math.prod([*layout.thread_shape, *layout.value_shape])
    if places != math.prod(x.shape):
        raise context.error(
            UnsupportedOperation, f"{layout} has {places} places, not those of {list(x.shape)}"
        )
    return x


def async_task_replica_id():
    if context.task.replica is None:
        raise context.error(UnsupportedOperation, "async_task_replica_id outside of an async_task")
    return context.task.replica


def _memory(storage):
    """(memory of this storage kind, whether it is tensor memory)."""
    kind, cta = "smem" if storage is None else str(storage), context.cta
    tensor = kind.endswith("tmem")
    memory = cta.tensor if tensor else cta.memory
    if memory is None or not kind.endswith("mem"):
        raise context.error(UnsupportedOperation, f"{storage} does not exist on {cta.target.name}")
    return memory, tensor


def storage_alias_spec(storage=None, buffer_size_bytes=None):
    memory, tensor = _memory(storage)
    size = None if buffer_size_bytes is None else int(buffer_size_bytes)
    if tensor and size is not None:
        size = -(-size // LANES)
    return AliasSpec(size, memory)


def reuse_group(*elements, group_type="shared", group_size=1):
    return ReuseGroup(*elements, group_type=group_type, group_size=group_size)


def local_alloc(shape, dtype, num, storage=None, reuse=None, layout=None, _name="a buffer"):
    memory, tensor = _memory(storage)
    shape, num = tuple(int(n) for n in shape), int(num)
    if getattr(reuse, "memory", memory) is not memory:
        raise context.error(UnsupportedOperation, f"{_name} reuses what is in another memory")
    if isinstance(reuse, AliasSpec):
        kind = AliasedTensorBuffers if tensor else AliasedBuffers
        made = kind(memory, reuse, num, shape, dtype, _name)
        reuse.users.append(made)
        return made
    made = (TensorBuffers if tensor else Buffers)(memory, 0, num, shape, dtype, _name)
    size = num * made.bytes_each
    if reuse is None:
        rows = {"rows": made.lanes} if tensor else {}
        made.offset = memory.allocate(size, _name, **rows)
    elif isinstance(reuse, Buffers | Buffer):
        if isinstance(reuse, Buffers):
            made.offset, whole = reuse.start(0), reuse.num * reuse.bytes_each
        else:
            made.offset = reuse.offset
            whole = row_bytes(reuse.shape, reuse.dtype) if tensor else reuse.bytes_whole
        if size > whole or (tensor and made.lanes > getattr(reuse, "life", reuse).lanes):
            raise context.error(
                OutOfBounds, f"{_name} of {size} bytes reuses {reuse.name}, which has {whole}"
            )
    else:
        raise context.error(UnsupportedOperation, f"reuse of a {type(reuse).__name__}")
    return made


def _buffer(x, what: str) -> Buffer:
    if isinstance(x, Buffers) and x.num == 1:
        return x[0]
    if not isinstance(x, Buffer):
        raise context.error(
            UnsupportedOperation, f"{what} takes one buffer in shared memory, not {x!r}"
        )
    return x


def local_view(local_allocated_buffers, buffer_idx):
    return local_allocated_buffers[buffer_idx]


def local_slice(buffer, offset, shape):
    return _buffer(buffer, "local_slice").slice(offset, shape)


def local_trans(input, dims=(1, 0)):
    return _buffer(input, "local_trans").transposed(tuple(int(d) for d in dims))


def local_reshape(src, shape):
    return _buffer(src, "local_reshape").reinterpreted(src.dtype, shape)


def local_reinterpret(src, dtype, shape=None):
    return _buffer(src, "local_reinterpret").reinterpreted(dtype, shape)


def _access(what: str) -> Access:
    task = context.task
    return Access(task.agent, task.clock, task.name, context.where(), what, False)


def local_load(src, token=None, relaxed=False):
    src = _buffer(src, "local_load")
    src.read_by(_access("load"), context.task.clocks)
    return operands.noted(Value(np.array(src.numbers()), src.dtype))


def local_store(dst, src):
    dst = _buffer(dst, "local_store")
    if tuple(src.shape) != tuple(dst.shape) or src.dtype != dst.dtype:
        raise context.error(
            OutOfBounds, f"a store of {src!r} to {dst.dtype}{list(dst.shape)} ({dst.name})"
        )
    data = src.data
    dst.write_by(_access("store"), context.task.clocks)
    dst.put(data)


def fence(scope):
    if scope not in ("gpu", "sys", "async_shared"):
        raise context.error(UnsupportedOperation, f"a fence of scope {scope!r}")
    if scope == "async_shared":
        context.task.fence()


def fence_async_shared():
    context.task.fence()


def _barriers(num, count: int, threads: bool, name: str) -> Barriers:
    cta, num = context.cta, int(num)
    cta.memory.allocate(8 * num, name)
    made = [MBarrier(f"{name}[{i}]", cta.agent(), count, threads) for i in range(num)]
    cta.barriers += made
    return Barriers(made, name)


def alloc_barriers(num_barriers, arrive_count=1, _name="a barrier"):
    return _barriers(num_barriers, int(arrive_count), False, _name)


def alloc_warp_barrier(num_barriers, num_warps=1, num_arrivals=1, _name="a barrier"):
    return _barriers(num_barriers, 32 * int(num_warps) * int(num_arrivals), True, _name)


def _barrier(bar, what: str) -> MBarrier:
    if isinstance(bar, Barriers) and len(bar.barriers) == 1:
        return bar[0]
    if not isinstance(bar, MBarrier):
        raise context.error(BarrierMisuse, f"{what} takes one mbarrier, not {bar!r}")
    return bar


def barrier_expect_bytes(bar, size, pred=None):
    if pred is None or bool(pred):
        _barrier(bar, "barrier_expect_bytes").expect(context.task, int(size))
    if context.cta.policy.switch():
        yield


def barrier_arrive(bar, arrive_count=1, remote_cta_rank=None, pred=None):
    if pred is None or bool(pred):
        bar, task = _barrier(bar, "barrier_arrive"), context.task
        if remote_cta_rank is not None:
            other = clusters.peer(remote_cta_rank)
            clusters.alive(other, f"arrival at {bar.name}")
            bar = yield from clusters.peer_barrier(bar, other)
        bar.arrive(task, int(arrive_count) * (task.threads if bar.threads else 1))
    if context.cta.policy.switch():
        yield


def barrier_wait(bar, phase, pred=None):
    if pred is not None and not bool(pred):
        return
    bar, parity, task = _barrier(bar, "barrier_wait"), int(phase), context.task
    if parity not in (0, 1):
        raise context.error(BarrierMisuse, f"a wait for phase {parity} of {bar.name}, not 0 or 1")
    if context.cta.policy.switch():
        yield
    while not bar.passed(parity):
        task.blocked = bar, parity
        yield
    task.blocked = None
    context.read(bar.name)
    bar.give(task)


def _named(number) -> NamedBarrier:
    number, cta = int(number), context.cta
    if not 0 <= number < cta.target.named_barriers:
        raise context.error(
            BarrierMisuse, f"named barrier {number}; ids are 0 to {cta.target.named_barriers - 1}"
        )
    return cta.named.setdefault(number, NamedBarrier(number))


def named_barrier_wait(bar, arrive_count):
    bar, task = _named(bar), context.task
    if context.cta.policy.switch():
        yield
    turn = bar.turn
    bar.arrive(task, int(arrive_count))
    while bar.turn == turn:
        task.blocked = bar, turn
        yield
    task.blocked = None
    bar.give(task)


def named_barrier_arrive(bar, arrive_count):
    _named(bar).arrive(context.task, int(arrive_count))
    if context.cta.policy.switch():
        yield


def _box(desc, buffer, what: str) -> Buffer:
    if not isinstance(desc, Descriptor):
        raise context.error(UnsupportedOperation, f"{what} takes a descriptor, not {desc!r}")
    buffer = _buffer(buffer, what)
    if isinstance(buffer, TensorBuffer):
        raise context.error(UnsupportedOperation, f"{what} of {buffer!r}, in tensor memory")
    if buffer.bytes_whole != desc.bytes_of_box or buffer.dtype != desc.dtype:
        raise context.error(
            OutOfBounds,
            f"{what} of a box {desc.block_shape} of {desc.dtype} and {buffer!r} of {buffer.dtype}",
        )
    return buffer


def async_descriptor_load(
    desc, result, offsets, barrier, pred=None, cache_modifier="", eviction_policy="",
    multicast_targets=(), two_ctas=False,
):  # fmt: skip
    if pred is None or bool(pred):
        buffer, task, cta = _box(desc, result, "async_descriptor_load"), context.task, context.cta
        place, viewed = context.where(), isinstance(barrier, RemoteBarrier)
        own = barrier.bar if viewed else _barrier(barrier, "a copy")
        offsets = [int(x) for x in offsets]
        desc.check(offsets, "copy")
        for other in [clusters.peer(rank) for rank in multicast_targets] or [cta]:
            signalled = clusters.pair(other)[0] if two_ctas else barrier.other if viewed else other
            bar = yield from clusters.peer_barrier(own, signalled)
            clusters.alive(other, "multicast copy")
            to = clusters.peer_buffer(buffer, other)
            access = copy_access(task, place, bar)
            to.write_by(access, task.clocks)
            cta.issue(Copy(task, place, desc, offsets, to, bar, access))
    if context.cta.policy.switch():
        yield


def async_descriptor_store(desc, source, offsets, eviction_policy="", store_reduce=""):
    buffer = _box(desc, source, "async_descriptor_store")
    task, place = context.task, context.where()
    offsets = [int(x) for x in offsets]
    desc.check(offsets, "asynchronous store")
    operation = Store(task, place, desc, offsets, buffer, store_reduce)
    number = task.stores.issue(operation)
    access = Access(task.stores.agent, number, task.name, place, "asynchronous store", True)
    buffer.read_by(access, task.clocks, task.fenced())
    context.cta.issue(operation)
    if context.cta.policy.switch():
        yield


def async_descriptor_store_wait(pendings):
    """All but the last so many stores have read shared memory; `assembly` has the full wait."""
    context.task.stores.wait(context.task, int(pendings))
    if context.cta.policy.switch():
        yield


def async_descriptor_prefetch_tensor(desc, offsets, **_):
    """A hint."""


def async_dot(
    A, B, acc=None, use_acc=None, pred=None, mBarriers=(), two_ctas=False, force_async=False,
    input_precision=None, out_dtype=tl.float32,
):  # fmt: skip
    task, place = context.task, context.where()
    if not context.cta.target.register_operand:
        yield from tcgen05.dot(A, B, acc, use_acc, pred, mBarriers, two_ctas, force_async)
        return None
    if two_ctas or mBarriers:
        raise context.error(
            UnsupportedOperation,
            f"async_dot with mBarriers or two_ctas does not exist on {context.cta.target.name}",
        )
    B = _buffer(B, "async_dot")
    if not isinstance(A, Value):
        A = _buffer(A, "async_dot")
    elif isinstance(A, Accumulator):
        A = Value(A.data, A.dtype)
    m, k = A.shape
    n = B.shape[1]
    if k != B.shape[0] or not multiplies(A.dtype, B.dtype, k) or m < 64 or n < 32:
        raise context.error(
            UnsupportedOperation,
            f"async_dot of {A.dtype}{list(A.shape)} and {B.dtype}{list(B.shape)}: M, K and N are at"
            " least 64, 16 (32 for 8-bit floats) and 32, and types and K agree",
        )
    for operand, along in ((A, 1), (B, 0)):
        size = item_bytes(operand.dtype)
        if isinstance(operand, Buffer) and size != 2 and operand.strides[along] != size:
            raise context.error(
                UnsupportedOperation,
                f"async_dot of {operand!r}: numbers of {8 * size} bits lie with those of one"
                " dot product side by side (local_trans of [N, K] for the right operand)",
            )
    if acc is not None and (tuple(acc.shape) != (m, n) or acc.dtype != tl.float32):
        raise context.error(UnsupportedOperation, f"async_dot of {m}x{n} added to {acc!r}")
    result = Accumulator(place, task.products, (m, n))
    if isinstance(acc, Value) and not isinstance(acc, Accumulator):
        acc = Value(acc.data, acc.dtype)
    operation = Product(task, place, A, B, acc, result)
    number = result.number = task.products.issue(operation)
    if isinstance(A, Value):
        operands.check(task, A, place, number)
    for operand in (A, B):
        if isinstance(operand, Buffer):
            access = Access(task.products.agent, number, task.name, place, "product", True)
            operand.read_by(access, task.clocks, task.fences)
    context.cta.counts.products += 1
    context.cta.issue(operation)
    if context.cta.policy.switch():
        yield
    return result


def async_dot_scaled(
    A, B, acc, A_scale, A_format, B_scale, B_format, use_acc=None, pred=None, mBarriers=(),
    two_ctas=False, force_async=False, out_dtype=tl.float32,
):  # fmt: skip
    formats, scale_buffers = (A_format, B_format), (A_scale, B_scale)
    yield from scaled.dot(
        A, B, acc, scale_buffers, formats, use_acc, pred, mBarriers, two_ctas, force_async
    )


def tmem_copy(src, dst):
    yield from scaled.tmem_copy(_buffer(src, "tmem_copy"), _buffer(dst, "tmem_copy"))


def async_dot_wait(pendings, inp):
    task = context.task
    if not context.cta.target.register_operand:
        raise context.error(
            UnsupportedOperation,
            f"async_dot_wait does not exist on {context.cta.target.name}: products complete on"
            " mbarriers",
        )
    task.products.wait(task, int(pendings))
    if context.cta.policy.switch():
        yield
    if isinstance(inp, tuple | list):
        return type(inp)(_settled(x) for x in inp)
    return _settled(inp)


def _settled(x):
    if isinstance(x, Accumulator) and x.number <= x.lane.waited:
        return Value(x.result, x.dtype)
    return x


def make_tensor_descriptor(desc_ptr, base, shape, strides, block_shape, padding_option="zero"):
    made = language.make_tensor_descriptor(base, shape, strides, block_shape, padding_option)
    if desc_ptr is not None:
        desc_ptr.put(made)
    return made


def thread_id(axis):
    raise context.error(UnsupportedOperation, "the simulator runs tasks, not single threads")


def clock64():
    """Of steps and turns: every read is later than the one before."""
    counts = context.cta.counts
    counts.turns += 1
    context.changed()
    return value(counts.steps + counts.turns, tl.int64)

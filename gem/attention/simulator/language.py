"""Operations of `triton.language` for the simulator, by their names there."""

from __future__ import annotations

import builtins

import numpy as np
import torch
import triton.language as tl

from gem.attention.simulator import context, global_memory, operands, spins
from gem.attention.simulator.asynchronous import multiply
from gem.attention.simulator.dtypes import held, is_float, rounded
from gem.attention.simulator.errors import KernelAssertion, UnsupportedOperation
from gem.attention.simulator.values import Value, common, made, numbers, value


def constexpr(x):
    return x


def program_id(axis):
    program = context.cta.program
    return Value(program[int(axis)], tl.int32)


def num_programs(axis):
    return Value(context.cta.run_of.grid[int(axis)], tl.int32)


def _shape(shape) -> tuple[int, ...]:
    if isinstance(shape, int | Value):
        shape = (shape,)
    return tuple(int(n) for n in shape)


def arange(start, end):
    return Value(np.arange(int(start), int(end), dtype=np.int32), tl.int32)


def zeros(shape, dtype):
    return full(shape, 0, dtype)


def zeros_like(input):
    return full(input.shape, 0, input.dtype)


def full(shape, value, dtype):
    x = _value(value).to(dtype)
    return Value(np.full(_shape(shape), numbers(x, dtype), held(dtype)), dtype)


def full_like(input, value):
    return full(input.shape, value, input.dtype)


def load(pointer, mask=None, other=None, **_):
    _check_pointer(pointer)
    if other is not None:
        other = value(other).to(pointer.dtype.element_ty)
    return global_memory.load(pointer, None if mask is None else value(mask), other)


def store(pointer, value, mask=None, **_):
    _check_pointer(pointer)
    x = _value(value).to(pointer.dtype.element_ty)
    global_memory.store(pointer, x, None if mask is None else _value(mask))


_value = value


def _check_pointer(pointer):
    if not isinstance(pointer, Value) or pointer.base is None:
        raise context.error(UnsupportedOperation, f"a load or store through {pointer!r}")


def where(condition, x, y):
    dtype = common(x, y)
    base = next((v.base for v in (x, y) if isinstance(v, Value) and v.base is not None), None)
    if base is not None:
        raise context.error(UnsupportedOperation, "tl.where of pointers")
    condition = condition.data if isinstance(condition, Value) else bool(condition)
    x, y = numbers(x, dtype), numbers(y, dtype)
    if not any(isinstance(v, np.ndarray) for v in (condition, x, y)):
        return Value(x if condition else y, dtype)
    return Value(np.where(condition, x, y).astype(held(dtype), copy=False), dtype)


def _extreme(x, y, integers, floats):
    dtype = common(x, y)
    x, y = numbers(x, dtype), numbers(y, dtype)
    return made((floats if is_float(dtype) else integers)(x, y), dtype)


def maximum(x, y, **_):
    return _extreme(x, y, np.maximum, np.fmax)


def minimum(x, y, **_):
    return _extreme(x, y, np.minimum, np.fmin)


def clamp(x, min, max, **_):
    return minimum(maximum(x, min), max)


def _reduced(x, axis, keep_dims, function):
    data = x.data
    if axis is None:
        data = data.reshape(-1)
        result = function(data, 0)
        return made(result.reshape((1,) * len(x.shape)) if keep_dims else result, x.dtype)
    axis = int(axis)
    result = function(data, axis)
    return made(np.expand_dims(result, axis) if keep_dims else result, x.dtype)


def _wide(x):
    """bfloat16 is reduced in float32 and the result stays so."""
    return x.to(tl.float32) if x.dtype.name == "bf16" else x


def max(input, axis=None, return_indices=False, keep_dims=False, **_):
    x = _wide(input)
    if return_indices:
        return max(x, axis, keep_dims=keep_dims), argmax(x, axis, keep_dims=keep_dims)
    return _reduced(x, axis, keep_dims, lambda a, d: a.max(axis=d))


def min(input, axis=None, return_indices=False, keep_dims=False, **_):
    x = _wide(input)
    if return_indices:
        return min(x, axis, keep_dims=keep_dims), argmin(x, axis, keep_dims=keep_dims)
    return _reduced(x, axis, keep_dims, lambda a, d: a.min(axis=d))


def argmax(input, axis, keep_dims=False, **_):
    x = _reduced(input, axis, keep_dims, lambda a, d: a.argmax(axis=d))
    return Value(np.asarray(x.data).astype(np.int32), tl.int32)


def argmin(input, axis, keep_dims=False, **_):
    x = _reduced(input, axis, keep_dims, lambda a, d: a.argmin(axis=d))
    return Value(np.asarray(x.data).astype(np.int32), tl.int32)


def sum(input, axis=None, keep_dims=False, dtype=None):
    x = input
    if dtype is not None:
        x = x.to(dtype)
    elif not is_float(x.dtype) and x.dtype.primitive_bitwidth < 32:
        x = x.to(tl.int32)
    kind = held(x.dtype)
    x = _reduced(x, axis, keep_dims, lambda a, d: a.sum(axis=d, dtype=kind))
    return Value(rounded(x.data, x.dtype), x.dtype)


def cumsum(input, axis=0, **_):
    return Value(rounded(np.cumsum(input.data, axis, held(input.dtype)), input.dtype), input.dtype)


def _unary(torch_function):
    def apply(x, **_):
        x = value(x)
        if not is_float(x.dtype):
            x = x.to(tl.float32)
        data = x.data
        if not isinstance(data, np.ndarray):
            result = torch_function(torch.tensor(data)).numpy()[()]
        else:
            result = torch_function(torch.from_numpy(np.ascontiguousarray(data))).numpy()
        return Value(rounded(result, x.dtype), x.dtype)

    apply.__module__ = __name__
    return apply


exp, exp2 = _unary(torch.exp), _unary(torch.exp2)
log, log2 = _unary(torch.log), _unary(torch.log2)
sqrt, sqrt_rn, rsqrt = _unary(torch.sqrt), _unary(torch.sqrt), _unary(torch.rsqrt)
sin, cos, erf = _unary(torch.sin), _unary(torch.cos), _unary(torch.erf)
floor, ceil, sigmoid = _unary(torch.floor), _unary(torch.ceil), _unary(torch.sigmoid)


def abs(x):
    return Value(np.abs(x.data) if isinstance(x, Value) else builtins.abs(x), value(x).dtype)


def fma(x, y, z):
    """Not fused: rounded twice."""
    return x * y + z


def div_rn(x, y):
    return x / y


fdiv = div_rn


def cdiv(x, div):
    return (x + div - 1) // div


def dot(input, other, acc=None, out_dtype=tl.float32, **_):
    product = Value(multiply(input.data, other.data), tl.float32)
    return (product if acc is None else acc + product).to(out_dtype)


def trans(input, *dims):
    return permute(input, *(dims or (1, 0)))


def permute(input, *dims):
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return Value(np.transpose(input.data, _shape(dims)), input.dtype, input.base)


def reshape(input, *shape, **_):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return operands.kept(input, Value(input.data.reshape(_shape(shape)), input.dtype, input.base))


view = reshape


def ravel(x, **_):
    return reshape(x, -1)


def expand_dims(input, axis):
    return Value(np.expand_dims(np.asarray(input.data), axis), input.dtype, input.base)


def broadcast_to(input, *shape):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return Value(np.broadcast_to(input.data, _shape(shape)), input.dtype, input.base)


def broadcast(input, other):
    a, b = np.broadcast_arrays(input.data, other.data)
    return Value(a, input.dtype, input.base), Value(b, other.dtype, other.base)


def join(a, b):
    return operands.kept(a, Value(np.stack([a.data, b.data], axis=-1), a.dtype))


def split(a):
    return tuple(made(np.ascontiguousarray(a.data[..., i]), a.dtype) for i in (0, 1))


def cat(input, other, can_reorder=False, dim=0):
    return Value(np.concatenate([input.data, other.data], axis=dim), input.dtype)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return value(input).to(dtype, bitcast=bitcast)


def to_tensor(x):
    return value(x)


def _atomic(change):
    def once(pointer, val, mask):
        old = global_memory.load(pointer, mask, None)
        global_memory.store(pointer, change(old, val), mask)
        return old

    def apply(pointer, val, mask=None, **_):
        _check_pointer(pointer)
        val, mask = value(val).to(pointer.dtype.element_ty), None if mask is None else value(mask)
        places = pointer.data
        if not isinstance(places, np.ndarray) or np.unique(places).size == places.size:
            return once(pointer, val, mask)
        # A place that several threads name gets them one after another.
        vals = np.broadcast_to(val.data, places.shape)
        masks = np.broadcast_to(True if mask is None else mask.data, places.shape)
        old = np.zeros(places.shape, held(val.dtype))
        for at in np.argwhere(masks):
            at = tuple(at)
            place = Value(int(places[at]), pointer.dtype, pointer.base)
            old[at] = once(place, made(vals[at], val.dtype), None).data
        return Value(old, val.dtype)

    apply.__module__ = __name__
    return apply


atomic_add = _atomic(lambda old, x: old + x)
atomic_max, atomic_min = _atomic(maximum), _atomic(minimum)
atomic_and, atomic_or = _atomic(lambda old, x: old & x), _atomic(lambda old, x: old | x)
atomic_xchg = _atomic(lambda old, x: x)


def atomic_cas(pointer, cmp, val, **_):
    _check_pointer(pointer)
    old = global_memory.load(pointer, None, None)
    dtype = pointer.dtype.element_ty
    global_memory.store(pointer, where(old == cmp, value(val).to(dtype), old), None)
    return old


def static_assert(cond, msg=""):
    if not cond:
        raise context.error(KernelAssertion, f"static_assert does not hold: {msg}")


def device_assert(cond, msg="", mask=None):
    holds = np.asarray(value(cond).data) | ~np.asarray(True if mask is None else mask.data)
    if not holds.all():
        raise context.error(KernelAssertion, f"device_assert does not hold: {msg}")


def assume(cond):
    if not bool(np.all(value(cond).data)):
        raise context.error(KernelAssertion, "tl.assume of what is not so")


def static_print(*args, **_):
    print(*args)


def device_print(prefix, *args, **_):
    print(prefix, *(x.data if isinstance(x, Value) else x for x in args))


def multiple_of(input, values):
    return input


max_contiguous = max_constancy = multiple_of


def debug_barrier():
    """Threads of one task run in step here."""


def range(arg1, arg2=None, step=None, **_):
    """A loop at run time: the index is an int32."""
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    step = 1 if step is None else int(step)
    for i in builtins.range(int(start), int(end), step):
        spins.count()
        yield Value(i, tl.int32)


def static_range(arg1, arg2=None, step=None):
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    return _Unrolled(builtins.range(int(start), int(end), 1 if step is None else int(step)))


class _Unrolled:
    """A loop whose turns are code of their own."""

    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        unrolled = context.task.unrolled
        depth = len(unrolled)
        for i in self.indices:
            unrolled[depth:] = [i]
            yield i
        del unrolled[depth:]


def load_tensor_descriptor(desc, offsets):
    return desc.load(offsets)


def store_tensor_descriptor(desc, offsets, value):
    desc.store(offsets, value)


def make_tensor_descriptor(base, shape, strides, block_shape, padding_option="zero"):
    """A descriptor made on the device."""
    return global_memory.Descriptor(
        base.base, base.data, base.dtype.element_ty, shape, strides, _shape(block_shape),
        padding_option == "nan",
    )  # fmt: skip


for _method in (
    "abs", "argmax", "argmin", "broadcast_to", "cumsum", "exp", "exp2", "expand_dims", "log",
    "log2", "max", "min", "permute", "ravel", "reshape", "rsqrt", "sigmoid", "split", "sqrt", "sum",
    "trans",
):  # fmt: skip
    setattr(Value, _method, globals()[_method])

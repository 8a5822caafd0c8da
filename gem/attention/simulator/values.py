"""Runtime scalars and tensors of a simulated kernel, over NumPy.

Integers wrap around as on the GPU, // and % truncate as in C. bfloat16 and float16 are held as
float32 numbers that the format has; every operation on them rounds its float32 result, which is
exact for +, -, *, / (float32 has more than twice the bits).
"""

from __future__ import annotations

import operator

import numpy as np
import triton.language as tl

from gem.attention.simulator import context, operands
from gem.attention.simulator.dtypes import (
    BITS,
    FP8,
    SHORT,
    from_bits,
    held,
    is_float,
    item_bytes,
    rounded,
    to_bits,
    type_of,
    wrapped,
)
from gem.attention.simulator.errors import UnsupportedOperation


def value(x: object, dtype: tl.dtype | None = None) -> Value:
    """x as a Value; a Python number becomes a scalar."""
    if isinstance(x, Value):
        return x
    dtype = type_of(x) if dtype is None else dtype
    if is_float(dtype):
        return Value(rounded(held(dtype)(x), dtype), dtype)
    return Value(wrapped(x, dtype), dtype)


def common(a: object, b: object, divide: bool = False) -> tl.dtype:
    """The type in which a and b are combined, by Triton's rules."""
    for x, y in ((a, b), (b, a)):
        if not isinstance(x, Value):
            if not isinstance(y, Value):
                break
            mine = type_of(x)
            if is_float(mine) and not is_float(y.dtype):
                return tl.float32
            if not is_float(mine) and mine.name != "int1" and y.dtype.name == "int1":
                return mine
            if divide and y.dtype.name in SHORT:
                return tl.float32
            return y.dtype
    x, y = (v.dtype if isinstance(v, Value) else type_of(v) for v in (a, b))
    names = {x.name, y.name}
    for wide in (tl.float64, tl.float32):
        if wide.name in names:
            return wide
    if names & set(SHORT):
        if divide or names >= set(SHORT):
            return tl.float32
        return tl.float16 if "fp16" in names else tl.bfloat16
    if x.primitive_bitwidth == y.primitive_bitwidth:
        return x if x.name[0] == "u" else y
    return x if x.primitive_bitwidth > y.primitive_bitwidth else y


def _truncated_divide(a, b, dtype):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        q = np.floor_divide(a, b)
        return q + ((q < 0) & (q * b != a))
    if b == 0:
        raise context.error(UnsupportedOperation, f"{a} divided by 0")
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


class Value:
    """A scalar (Python int or bool, NumPy float) or tensor (NumPy array) and its dtype.

    A pointer is a Value whose numbers are byte offsets into `base`.

    `origin` is when a tensor of 16 bits a number, or of pairs of them, was made, where that is
    noted: see `operands`.
    """

    __slots__ = ("data", "dtype", "base", "origin")

    def __init__(self, data, dtype: tl.dtype, base=None):
        self.data, self.dtype, self.base = data, dtype, base

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.data, "shape", ())

    @property
    def type(self) -> tl.dtype:
        return self.dtype

    @property
    def T(self) -> Value:
        return Value(self.data.T, self.dtype, self.base)

    def __repr__(self) -> str:
        if self.shape:
            return f"<{self.dtype}{list(self.shape)}>"
        return f"{self.data}"

    def __bool__(self) -> bool:
        if self.shape:
            raise context.error(UnsupportedOperation, f"a condition that is a tensor, {self!r}")
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.data)

    __hash__ = None

    def to(self, dtype, fp_downcast_rounding=None, bitcast: bool = False) -> Value:
        """The numbers in another type (or the same bits)."""
        dtype = getattr(dtype, "value", dtype)
        if dtype is self.dtype or dtype == self.dtype:
            return operands.kept(self, Value(self.data, dtype, self.base))
        if self.base is not None:
            return Value(self.data, dtype, self.base)
        if bitcast:
            bits = to_bits(np.asarray(self.data, dtype=held(self.dtype)), self.dtype)
            return operands.kept(self, made(from_bits(bits.view(BITS[dtype.name]), dtype), dtype))
        data = self.data
        if is_float(dtype):
            if isinstance(data, np.ndarray):
                data = rounded(data.astype(held(dtype), copy=False), dtype)
                return operands.noted(Value(data, dtype))
            return Value(rounded(held(dtype)(data), dtype), dtype)
        if isinstance(data, np.ndarray):
            if dtype.name == "int1":
                return Value(data != 0, dtype)
            return operands.kept(self, Value(data.astype(held(dtype)), dtype))
        return Value(bool(data) if dtype.name == "int1" else wrapped(int(data), dtype), dtype)

    cast = to

    def __getitem__(self, key) -> Value:
        if not isinstance(key, tuple):
            key = (key,)
        if all(k is None or (isinstance(k, slice) and k == slice(None)) for k in key):
            return Value(np.asarray(self.data)[key], self.dtype, self.base)
        raise context.error(UnsupportedOperation, f"an index {key} of a tensor in registers")

    def __add__(self, x):
        return _arithmetic(self, x, "add")

    def __radd__(self, x):
        return _arithmetic(x, self, "add")

    def __sub__(self, x):
        return _arithmetic(self, x, "subtract")

    def __rsub__(self, x):
        return _arithmetic(x, self, "subtract")

    def __mul__(self, x):
        return _arithmetic(self, x, "multiply")

    def __rmul__(self, x):
        return _arithmetic(x, self, "multiply")

    def __truediv__(self, x):
        return _arithmetic(self, x, "divide")

    def __rtruediv__(self, x):
        return _arithmetic(x, self, "divide")

    def __floordiv__(self, x):
        return _arithmetic(self, x, "quotient")

    def __rfloordiv__(self, x):
        return _arithmetic(x, self, "quotient")

    def __mod__(self, x):
        return _arithmetic(self, x, "remainder")

    def __rmod__(self, x):
        return _arithmetic(x, self, "remainder")

    def __and__(self, x):
        return operands.kept(self, _arithmetic(self, x, "and"))

    def __rand__(self, x):
        return _arithmetic(x, self, "and")

    def __or__(self, x):
        return _arithmetic(self, x, "or")

    def __ror__(self, x):
        return _arithmetic(x, self, "or")

    def __xor__(self, x):
        return _arithmetic(self, x, "xor")

    def __rxor__(self, x):
        return _arithmetic(x, self, "xor")

    def __lshift__(self, x):
        return _arithmetic(self, x, "lshift")

    def __rlshift__(self, x):
        return _arithmetic(x, self, "lshift")

    def __rshift__(self, x):
        return operands.kept(self, _arithmetic(self, x, "rshift"))

    def __neg__(self):
        return _arithmetic(0, self, "subtract") if not is_float(self.dtype) else self * -1.0

    def __invert__(self):
        return self ^ (True if self.dtype.name == "int1" else -1)

    def __lt__(self, x):
        return _compare(self, x, "lt")

    def __le__(self, x):
        return _compare(self, x, "le")

    def __gt__(self, x):
        return _compare(self, x, "gt")

    def __ge__(self, x):
        return _compare(self, x, "ge")

    def __eq__(self, x):
        return _compare(self, x, "eq")

    def __ne__(self, x):
        return _compare(self, x, "ne")


def made(data, dtype: tl.dtype) -> Value:
    """A Value of what NumPy returned: a scalar if it has no dimensions."""
    if isinstance(data, np.ndarray) and data.ndim == 0:
        data = data[()]
    if not isinstance(data, np.ndarray) and not is_float(dtype):
        data = bool(data) if dtype.name == "int1" else int(data)
    return Value(data, dtype)


def numbers(x: object, dtype: tl.dtype):
    """x's data in the type that holds dtype."""
    if isinstance(x, Value):
        data = x.data
        if x.dtype is dtype or x.dtype == dtype:
            return data
        if isinstance(data, np.ndarray):
            return data.astype(held(dtype), copy=False)
        x = data
    return held(dtype)(x) if is_float(dtype) else wrapped(int(x), dtype)


_FLOAT = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}
_INTEGER = {
    "add": lambda a, b, _: a + b,
    "subtract": lambda a, b, _: a - b,
    "multiply": lambda a, b, _: a * b,
    "quotient": _truncated_divide,
    "remainder": lambda a, b, d: a - _truncated_divide(a, b, d) * b,
    "and": lambda a, b, _: a & b,
    "or": lambda a, b, _: a | b,
    "xor": lambda a, b, _: a ^ b,
    "lshift": lambda a, b, _: a << b,
    "rshift": lambda a, b, _: a >> b,
}


def _operand(x) -> bool:
    return isinstance(x, Value | int | float | np.number | np.bool_)


_INT1, _INT32, _FP32 = tl.int1, tl.int32, tl.float32
_FAST = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
_FAST |= {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _fast(a, b, name: str):
    """The commonest cases without their general form's cost; None for others."""
    mine, other = type(a), type(b)
    x, y = a.data if mine is Value else a, b.data if other is Value else b
    if mine is Value and a.base is not None:
        return _moved(a, b, name, True) if other is Value or other is int else None
    ints = (mine is int or (mine is Value and a.dtype is _INT32)) and (
        other is int or (other is Value and b.dtype is _INT32)
    )
    if ints:
        if type(x) is int and type(y) is int:
            if name in _FAST:
                result = _FAST[name](x, y)
            elif x >= 0 and y > 0 and name == "quotient":
                result = x // y
            elif x >= 0 and y > 0 and name == "remainder":
                result = x % y
            else:
                return None
            if -(2**31) <= result < 2**31 and -(2**31) <= y < 2**31 and -(2**31) <= x < 2**31:
                return Value(result, _INT32)
        elif name in _FAST and _alike(x, y):
            return Value(_FAST[name](x, y), _INT32)
    elif mine is Value and a.dtype is _FP32 and other is Value and b.dtype is _FP32:
        if name in _FLOAT and _alike(x, y):
            return Value(_FLOAT[name](x, y), _FP32)
    return None


def _alike(x, y) -> bool:
    """Whether NumPy combines them as Triton does: shapes of one rank, or a scalar."""
    one, other = getattr(x, "ndim", 0), getattr(y, "ndim", 0)
    small = all(type(v) is not int or -(2**31) <= v < 2**31 for v in (x, y))
    return (one == other or not one or not other) and small


def _arithmetic(a, b, name: str):
    result = _fast(a, b, name)
    if result is not None:
        return result
    if not (_operand(a) and _operand(b)):
        return NotImplemented
    for pointer, other in ((a, b), (b, a)):
        if isinstance(pointer, Value) and pointer.base is not None:
            return _moved(pointer, other, name, a is pointer)
    dtype = common(a, b, name in ("divide", "remainder"))
    if name == "divide" and not is_float(dtype):
        dtype = tl.float32
    a, b = numbers(a, dtype), numbers(b, dtype)
    if dtype.name in FP8:
        raise context.error(
            UnsupportedOperation, f"{name} of {dtype}, which has no arithmetic: convert it first"
        )
    if is_float(dtype):
        if name in _FLOAT:
            data = _FLOAT[name](a, b)
        elif name == "remainder":
            data = np.fmod(a, b)
        else:
            raise context.error(UnsupportedOperation, f"{name} of {dtype}")
        return Value(rounded(data, dtype), dtype)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if dtype.name == "int1" and name in ("add", "subtract", "multiply"):
            name = {"add": "xor", "subtract": "xor", "multiply": "and"}[name]
        data = _INTEGER[name](a, b, dtype)
        return Value(data.astype(held(dtype), copy=False), dtype)
    return Value(wrapped(_INTEGER[name](a, b, dtype), dtype), dtype)


def _moved(pointer: Value, by, name: str, first: bool) -> Value:
    """A pointer some elements on."""
    if name not in ("add", "subtract") or (name == "subtract" and not first):
        raise context.error(UnsupportedOperation, f"{name} of a pointer")
    offsets = by.data if isinstance(by, Value) else by
    if isinstance(offsets, np.ndarray):
        offsets = offsets.astype(np.int64)
    step = offsets * item_bytes(pointer.dtype.element_ty)
    data = pointer.data + step if name == "add" else pointer.data - step
    return Value(data, pointer.dtype, pointer.base)


_COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


_ORDER = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def _compare(a, b, name: str):
    if type(a) is Value and a.dtype is _INT32:
        if type(b) is int and type(a.data) is int:
            return Value(_ORDER[name](a.data, b), _INT1)
        if type(b) is Value and b.dtype is _INT32 and type(a.data) is type(b.data) is int:
            return Value(_ORDER[name](a.data, b.data), _INT1)
    if not (_operand(a) and _operand(b)):
        return NotImplemented
    dtype = common(a, b)
    return made(_COMPARE[name](numbers(a, dtype), numbers(b, dtype)), tl.int1)

"""Number formats: how the simulator holds them, and how they lie in memory.

bfloat16, float16 and the 8-bit floats are held as float32 numbers that the format has.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.errors import UnsupportedOperation

HELD = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp8e5": np.float32, "fp8e4nv": np.float32, "fp16": np.float32, "bf16": np.float32,
    "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
BITS = {
    **HELD, "int1": np.uint8, "fp8e5": np.uint8, "fp8e4nv": np.uint8, "fp16": np.float16,
    "bf16": np.uint16,
}  # fmt: skip
OF_TORCH = {
    torch.bool: tl.int1, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32,
    torch.int64: tl.int64, torch.uint8: tl.uint8, torch.float16: tl.float16,
    torch.float8_e5m2: tl.float8e5, torch.float8_e4m3fn: tl.float8e4nv,
    torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64,
}  # fmt: skip
SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP8 = {"fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
# The number of every byte.
_OF_BYTE = {k: torch.arange(256, dtype=torch.uint8).view(t).float().numpy() for k, t in FP8.items()}
_RANK = {name: i for i, name in enumerate(HELD)}


def held(dtype: tl.dtype) -> type:
    """The NumPy type that numbers of dtype are held in."""
    try:
        return HELD[dtype.name]
    except KeyError:
        raise context.error(UnsupportedOperation, f"numbers of type {dtype}") from None


def item_bytes(dtype: tl.dtype) -> int:
    """Bytes of a number in memory."""
    return max(dtype.primitive_bitwidth // 8, 1)


def rounded(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 numbers rounded to the nearest of dtype, ties to even.

    8-bit floats saturate, as `cvt.rn.satfinite` does: infinities become the largest number.
    """
    if dtype.name in FP8:
        most = torch.finfo(FP8[dtype.name]).max
        x = np.clip(x, -most, most)  # NaN stays
        return from_bits(to_bits(np.asarray(x), dtype), dtype)[()]
    to = SHORT.get(dtype.name)
    if to is None:
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x)).to(to).float().numpy()
    return np.float32(torch.tensor(float(x), dtype=torch.float32).to(to).item())


def to_bits(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The numbers as they lie in memory (bfloat16 as uint16)."""
    if dtype.name == "bf16":
        x = np.ascontiguousarray(x, dtype=np.float32)
        return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    if dtype.name in FP8:
        x = np.array(x, dtype=np.float32, order="C")
        return torch.from_numpy(x).to(FP8[dtype.name]).view(torch.uint8).numpy()
    return x.astype(BITS[dtype.name])


def from_bits(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Numbers from memory, in the type that holds them."""
    if dtype.name == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if dtype.name in FP8:
        return _OF_BYTE[dtype.name][x]
    return x.astype(HELD[dtype.name])


def is_float(dtype: tl.dtype) -> bool:
    return dtype.name in ("fp16", "bf16", "fp32", "fp64") or dtype.name in FP8


def multiplies(a: tl.dtype, b: tl.dtype, k: int) -> bool:
    """Whether the tensor cores take operands of these types with K columns and rows."""
    if a.name in FP8 and b.name in FP8:
        return k >= 32
    return a == b and k >= 16


def wrapped(x: int, dtype: tl.dtype) -> int:
    """A Python integer modulo the range of dtype."""
    bits = dtype.primitive_bitwidth
    if bits == 1:
        return bool(x)
    x = int(x) & ((1 << bits) - 1)
    if dtype.name[0] == "i" and x >> (bits - 1):
        x -= 1 << bits
    return x


def type_of(x: bool | int | float) -> tl.dtype:
    """The type that a Python number takes at run time."""
    if isinstance(x, bool | np.bool_):
        return tl.int1
    if isinstance(x, int | np.integer):
        if -(2**31) <= x < 2**31:
            return tl.int32
        if x >= 2**63:
            return tl.uint64
        return tl.int64
    if isinstance(x, float | np.floating):
        return tl.float32
    raise context.error(UnsupportedOperation, f"a {type(x).__name__} as a number of the kernel")

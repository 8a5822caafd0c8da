"""Global memory: torch tensors on the CPU, reached through pointers and TMA descriptors."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gem.attention.simulator import context
from gem.attention.simulator.dtypes import BITS, OF_TORCH, from_bits, item_bytes, to_bits
from gem.attention.simulator.errors import OutOfBounds, UnsupportedOperation
from gem.attention.simulator.values import Value

_MODULUS = 2**64


class GlobalMemory:
    """The storage of a tensor, whole."""

    def __init__(self, tensor: Tensor, name: str):
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; the simulator takes CPU tensors")
        storage = tensor.untyped_storage()
        self.name, self.size = name, storage.nbytes()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.bytes = whole.numpy()
        self._typed: dict[str, np.ndarray] = {}

    def typed(self, dtype: tl.dtype) -> np.ndarray:
        """The bits as numbers of dtype, `[size // bytes each]`."""
        if dtype.name not in self._typed:
            each = item_bytes(dtype)
            self._typed[dtype.name] = self.bytes[: self.size // each * each].view(BITS[dtype.name])
        return self._typed[dtype.name]

    def indices(self, offsets, mask, dtype, what: str):
        """Element indices of byte offsets; reports those outside (where mask lets them through)."""
        each = item_bytes(dtype)
        if not isinstance(offsets, np.ndarray):
            if not 0 <= offsets <= self.size - each:
                self._outside(offsets, what)
            return offsets // each
        seen = offsets if mask is None else offsets[mask]
        if seen.size:
            low, high = int(seen.min()), int(seen.max())
            if low < 0 or high > self.size - each:
                self._outside(low if low < 0 else high, what)
        return offsets // each

    def _outside(self, offset: int, what: str) -> None:
        raise context.error(
            OutOfBounds, f"the {what} reaches byte {offset} of {self.name}, which has {self.size}."
        )


def pointer(tensor: Tensor, name: str) -> Value:
    """A pointer to the tensor's first element."""
    dtype = OF_TORCH.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name} is {tensor.dtype}, which the simulator does not know")
    start = tensor.storage_offset() * tensor.element_size()
    return Value(start, tl.pointer_type(dtype), GlobalMemory(tensor, name))


def load(where: Value, mask: Value | None, other: Value | None) -> Value:
    """Numbers at a pointer or tensor of pointers; masked ones are `other` or 0."""
    dtype = where.dtype.element_ty
    offsets = where.data
    typed = where.base.typed(dtype)
    context.read(where.base.name)
    if mask is None:
        index = where.base.indices(offsets, None, dtype, "load")
        bits = typed[index]
        data = from_bits(np.asarray(bits), dtype)
        return Value(data, dtype) if data.ndim else _scalar(data, dtype)
    offsets, seen = np.broadcast_arrays(offsets, np.asarray(mask.data, dtype=bool))
    index = where.base.indices(offsets, seen, dtype, "load")
    data = np.zeros(offsets.shape, np.float64)
    data = from_bits(np.zeros(offsets.shape, BITS[dtype.name]), dtype)
    if other is not None:
        data = np.array(np.broadcast_to(other.data, offsets.shape), dtype=data.dtype)
    data[seen] = from_bits(typed[index[seen]], dtype)
    return Value(data, dtype) if data.ndim else _scalar(data, dtype)


def _scalar(data: np.ndarray, dtype: tl.dtype) -> Value:
    item = data[()]
    if data.dtype.kind == "f":
        return Value(item, dtype)
    return Value(bool(item) if dtype.name == "int1" else int(item), dtype)


def store(where: Value, x: Value, mask: Value | None) -> None:
    """Writes numbers through a pointer or tensor of pointers."""
    dtype = where.dtype.element_ty
    typed = where.base.typed(dtype)
    bits = to_bits(np.asarray(x.data), dtype)
    if mask is None:
        _put(typed, where.base.indices(where.data, None, dtype, "store"), bits)
        return
    offsets, seen = np.broadcast_arrays(where.data, np.asarray(mask.data, dtype=bool))
    index = where.base.indices(offsets, seen, dtype, "store")
    _put(typed, index[seen], np.broadcast_to(bits, offsets.shape)[seen])


def _put(typed: np.ndarray, index, bits) -> None:
    """Writes; an atomic that changes nothing, as of a lock that is taken, is no change."""
    if not np.array_equal(typed[index], bits):
        context.changed()
    typed[index] = bits


class Descriptor:
    """A TMA descriptor: boxes of a strided tensor, cut at its bounds.

    Addresses are computed modulo 2^64, as the hardware does; strides are in bytes.
    """

    def __init__(self, memory: GlobalMemory, start: int, dtype, shape, strides, block_shape, nan):
        self.memory, self.start, self.dtype = memory, start, dtype
        self.shape, self.strides = [int(x) for x in shape], [int(x) for x in strides]
        self.block_shape = [int(x) for x in block_shape]
        self.padding = np.nan if nan else 0
        each = item_bytes(dtype)
        if self.strides[-1] != 1:
            raise context.error(UnsupportedOperation, "a descriptor whose last stride is not 1")
        if any(s * each % 16 for s in self.strides[:-1]):
            raise context.error(
                UnsupportedOperation,
                f"a descriptor whose strides {self.strides} are not multiples of 16 bytes",
            )

    @property
    def type(self) -> tl.dtype:
        return self.dtype

    @property
    def bytes_of_box(self) -> int:
        return int(np.prod(self.block_shape)) * item_bytes(self.dtype)

    def _inside(self, offsets, what: str):
        """(slices of the box, bits of the tensor there), or None if the box is wholly outside."""
        if len(offsets) != len(self.shape):
            raise context.error(
                OutOfBounds, f"{len(offsets)} offsets for a descriptor of rank {len(self.shape)}"
            )
        each = item_bytes(self.dtype)
        address, slices, dims, steps = self.start, [], [], []
        rows = zip(offsets, self.block_shape, self.shape, self.strides, strict=True)
        for offset, n, size, stride in rows:
            offset = int(offset)
            first, end = max(0, -offset), min(n, size - offset)
            if first >= end:
                return None
            address += (offset + first) * stride * each
            slices.append(slice(first, end))
            dims.append(end - first)
            step = stride * each % _MODULUS
            steps.append((step - _MODULUS if step >= _MODULUS // 2 else step) * (end - first > 1))
        address %= _MODULUS
        address -= _MODULUS * (address >= _MODULUS // 2)
        reach = [s * (n - 1) for s, n in zip(steps, dims, strict=True)]
        low = address + sum(x for x in reach if x < 0)
        high = address + sum(x for x in reach if x > 0) + each
        if low < 0 or high > self.memory.size:
            raise context.error(
                OutOfBounds,
                f"the {what} of a box {self.block_shape} at {[int(x) for x in offsets]} reaches"
                f" bytes {low} to {high} of {self.memory.name}, which has {self.memory.size}.",
            )
        bits = np.ndarray(
            tuple(dims), BITS[self.dtype.name], self.memory.bytes.data, address, tuple(steps)
        )
        return tuple(slices), bits

    def check(self, offsets, what: str) -> None:
        """Reports a box that leaves memory."""
        self._inside(offsets, what)

    def load(self, offsets) -> Value:
        """A box as a tensor in registers, synchronously."""
        context.read(self.memory.name)
        return Value(from_bits(np.array(self.box(offsets, "load")), self.dtype), self.dtype)

    def store(self, offsets, x: Value) -> None:
        """Writes a tensor in registers, synchronously."""
        self.put(offsets, to_bits(x.to(self.dtype).data, self.dtype), "", "store")

    def box(self, offsets, what: str) -> np.ndarray:
        """The bits of a box; what lies outside the bounds is padding."""
        inside = self._inside(offsets, what)
        if inside is not None and list(inside[1].shape) == self.block_shape:
            return inside[1]
        padding = np.full(1, self.padding, np.float32)
        bits = np.full(self.block_shape, to_bits(padding, self.dtype)[0], BITS[self.dtype.name])
        if inside is not None:
            bits[inside[0]] = inside[1]
        return bits

    def put(self, offsets, bits: np.ndarray, reduce: str, what: str) -> None:
        """Writes (or adds, ...) what lies inside the bounds."""
        inside = self._inside(offsets, what)
        if inside is None:
            return
        context.changed()
        slices, to = inside
        new = bits.reshape(self.block_shape)[slices]
        if reduce:
            old, new = from_bits(to, self.dtype), from_bits(new, self.dtype)
            new = to_bits(_REDUCE[reduce](old, new), self.dtype)
        to[...] = new


_REDUCE = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def descriptor(given, name: str) -> Descriptor:
    """A Descriptor of the host's TensorDescriptor."""
    base = given.base
    memory = GlobalMemory(base, name)
    dtype = OF_TORCH[base.dtype]
    start = base.storage_offset() * base.element_size()
    nan = getattr(given, "padding", "zero") == "nan"
    return Descriptor(memory, start, dtype, given.shape, given.strides, given.block_shape, nan)

"""Tensor memory of a CTA (Blackwell): columns of 128 lanes, 32 bits each.

A buffer of 128 rows takes all lanes of its columns, one of 64 rows half of them. Numbers of 16
bits lie two to a column. What a pair of CTAs with 64 rows each multiplies takes all lanes: of its
result, lanes 64 to 127 have the right half of the columns; its left operand is there twice.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.aliases import AliasedBuffers, AliasSpec
from gem.attention.simulator.dtypes import BITS, from_bits, item_bytes, to_bits
from gem.attention.simulator.errors import (
    OutOfBounds,
    OverwrittenRead,
    ResourceError,
    UnsupportedOperation,
)
from gem.attention.simulator.memory import Buffer, Buffers, SharedMemory

LANES = 128
COLUMN = 4  # bytes of a lane
_HALVES = 2
_HALF = LANES // _HALVES


class TensorMemory(SharedMemory):
    """The columns, and for either half of a column's lanes what `SharedMemory` has by granules.

    An address is `half * columns * 4 + column * 4`. What was never written is NaN: a kernel may
    read it, as long as no product does.
    """

    granule, alignment, poisoned = COLUMN * LANES // _HALVES, COLUMN, True

    def __init__(self, limit: int, spare: int = 0):
        """Has `limit` columns, and spare ones for what turns out to be too much only later."""
        columns = limit + spare
        self.limit, self.columns, self.pitch = limit, columns, columns * COLUMN
        self.bytes = np.zeros((LANES, self.pitch), np.uint8)
        self.written = np.zeros((_HALVES, columns), np.int32)
        self.readers = np.zeros_like(self.written)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.bytes.fill(0xFF)
        self.free = [0] * _HALVES  # the first free column of either half
        self.lives: list[TensorBuffers | None] = [None]  # as `writes`
        self.made: list[TensorBuffers] = []

    def allocate(self, size: int, name: str, rows: int = LANES) -> int:
        """The address of so many bytes more of each of these rows."""
        columns = -(-size // COLUMN)
        half = 0 if rows == LANES or self.free[0] <= self.free[1] else 1
        start = max(self.free) if rows == LANES else self.free[half]
        self.allocations.append((name, columns))
        if start + columns > self.limit:
            parts = ", ".join(f"{n} {s}" for n, s in self.allocations)
            error = context.error(
                ResourceError,
                f"{start + columns} columns of tensor memory are needed ({parts}), but a CTA has"
                f" {self.limit}",
            )
            if start + columns > self.columns:
                raise error
            context.cta.run_of.too_much = error
        for h in range(_HALVES) if rows == LANES else (half,):
            self.free[h] = start + columns
        return half * self.pitch + start * COLUMN


class PairFound(Exception):
    """A buffer turns out to be a pair's with 64 rows, whose place the compiler knows beforehand.

    Attributes:
        number: of the allocation.
        result: whether it is a result, not a left operand.
    """

    def __init__(self, number: int, result: bool):
        super().__init__(number, result)
        self.number, self.result = number, result


def require_pair(buffer: TensorBuffer, result: bool) -> None:
    """Raises PairFound unless the launch knows it already."""
    life = buffer.life
    if life.pair is None:
        raise PairFound(life.number, result)
    if life.pair != result:
        raise context.error(
            UnsupportedOperation, f"{buffer!r} as result and as left operand of a pair's products"
        )


def is_scales(dtype: tl.dtype) -> bool:
    """Whether a buffer of this type holds scales."""
    return dtype.name in ("int8", "uint8")


def lanes(shape: tuple[int, ...], dtype: tl.dtype) -> int:
    """Lanes that a buffer takes: scales are there for all four warps."""
    return LANES if is_scales(dtype) else shape[0]


def row_bytes(shape: tuple[int, ...], dtype: tl.dtype) -> int:
    """Bytes of a lane that a buffer takes, in whole columns.

    Four columns of scales have those of 128 rows and four blocks.
    """
    if is_scales(dtype):
        return -(-shape[0] // LANES) * _scale_bytes(shape[1])
    return -(-shape[1] * item_bytes(dtype) // COLUMN) * COLUMN


def _scale_bytes(blocks: int) -> int:
    """Bytes of a lane that scales of 128 rows take."""
    return -(-blocks // 4) * 4 * COLUMN


class TensorBuffers(Buffers):
    """What `local_alloc` returns for tensor memory."""

    def __init__(self, memory: TensorMemory, offset, num: int, shape, dtype, name: str):
        shape = tuple(shape)
        rows = lanes(shape, dtype)
        if len(shape) != 2 or rows not in (LANES, LANES // 2) or shape[0] % min(shape[0], LANES):
            raise context.error(
                UnsupportedOperation,
                f"{name} of shape {list(shape)} in tensor memory: buffers there have 2 dimensions"
                " and 64 or 128 rows (scales up to 128 or a multiple of it)",
            )
        super().__init__(memory, offset, num, shape, dtype, name)
        self.number = len(memory.made)
        memory.made.append(self)
        # Whether it is a result of pairs (True) or their left operand (False); None: neither.
        self.pair: bool | None = context.cta.run_of.pairs.get(self.number)
        self.lanes = lanes(shape, dtype) if self.pair is None else LANES
        self.bytes_each = row_bytes(shape, dtype) // (2 if self.pair else 1)

    def is_whole(self, other: TensorBuffers) -> bool:
        """Whether it stands for a pair's result as it lies in all lanes, at the same place."""
        return (
            bool(other.pair)
            and (self.shape, self.dtype) == ((LANES, other.shape[1] // _HALVES), other.dtype)
            and self.start(0) == other.start(0)
        )

    def view(self, offset: int, index: int) -> TensorBuffer:
        name = f"{self.name}[{index}]"
        return view(self.memory, offset, self.shape, self.dtype, name, self)


def view(memory, offset: int, shape, dtype, name: str, life: TensorBuffers) -> TensorBuffer:
    """A buffer or part of one."""
    kind = ScaleBuffer if is_scales(dtype) else PairBuffer if life.pair else TensorBuffer
    return kind(memory, offset, shape, dtype, name, life)


class AliasedTensorBuffers(TensorBuffers):
    """As AliasedBuffers, of tensor memory."""

    def __init__(self, memory: TensorMemory, alias: AliasSpec, num: int, shape, dtype, name: str):
        super().__init__(memory, 0, num, shape, dtype, name)
        self.alias, self.starts = alias, None

    start = AliasedBuffers.start


class TensorBuffer(Buffer):
    """A view of tensor memory: rows of a range of columns.

    Attributes:
        life: the allocation that it is a view of.
    """

    def __init__(self, memory: TensorMemory, offset, shape, dtype, name, life: TensorBuffers):
        self.memory, self.offset, self.shape, self.dtype = memory, offset, shape, dtype
        self.name, self.life = name, life
        self.strides = memory.pitch, item_bytes(dtype)
        half, start = divmod(offset, memory.pitch)
        columns = slice(start // COLUMN, -(-(start + shape[1] * item_bytes(dtype)) // COLUMN))
        halves = slice(half, half + (life.lanes if life.pair is False else shape[0]) // _HALF)
        lane = half * LANES // _HALVES
        self.bits = np.ndarray(
            shape, BITS[dtype.name], memory.bytes.data, lane * memory.pitch + start, self.strides
        )
        self.index = None
        self.states = memory.written[halves, columns], memory.readers[halves, columns]

    def read_by(self, access, clocks, fenced=None) -> None:
        super().read_by(access, clocks, None)
        for i in np.unique(self.states[0]).tolist():
            life = self.memory.lives[i]
            if life is not None and life is not self.life and not self.life.is_whole(life):
                raise context.error(
                    OverwrittenRead,
                    f"the {access.what} reads {self!r}, but the same columns of tensor memory hold"
                    f" {life.name}, by {self.memory.writes[i]}.",
                )

    def write_by(self, access, clocks) -> None:
        super().write_by(access, clocks)
        self.memory.lives.append(self.life)

    def numbers(self) -> np.ndarray:
        """The content; products that are under way change it without a new write."""
        return from_bits(self.bits, self.dtype)

    def slice(self, offset, shape) -> TensorBuffer:
        offset, shape = [int(x) for x in offset], tuple(int(x) for x in shape)
        (row, column), (rows, columns) = offset, shape
        if row or rows != self.shape[0] or column < 0 or column + columns > self.shape[1]:
            raise context.error(
                OutOfBounds,
                f"a slice of {shape} at {offset} of {self!r}, which is in tensor memory: slices"
                " are ranges of columns",
            )
        start = self.offset + column * item_bytes(self.dtype)
        if start % COLUMN:
            raise context.error(
                UnsupportedOperation, f"a slice of {self!r} that starts within a column"
            )
        name = f"{self.name}[:, {column}:{column + columns}]"
        return view(self.memory, start, shape, self.dtype, name, self.life)

    def transposed(self, dims) -> TensorBuffer:
        raise context.error(UnsupportedOperation, f"a transpose of {self!r} in tensor memory")

    def reinterpreted(self, dtype, shape) -> TensorBuffer:
        """The same columns with another dtype and as many columns as fit."""
        shape = self.shape if shape is None else tuple(int(x) for x in shape)
        mine, other = (s[1] * item_bytes(d) for s, d in ((self.shape, self.dtype), (shape, dtype)))
        if len(shape) != 2 or shape[0] != self.shape[0] or other > mine:
            raise context.error(
                OutOfBounds,
                f"{self!r} of {self.dtype} in tensor memory taken as {dtype}{list(shape)}",
            )
        return view(self.memory, self.offset, shape, dtype, self.name, self.life)


class PairBuffer(TensorBuffer):
    """The result of a pair's products with 64 rows each: its right half lies in lanes 64 to 127."""

    def __init__(self, memory: TensorMemory, offset, shape, dtype, name, life: TensorBuffers):
        self.memory, self.offset, self.shape, self.dtype = memory, offset, shape, dtype
        self.name, self.life, self.index = name, life, None
        size, width = item_bytes(dtype), shape[1] // _HALVES
        self.bits = np.ndarray(
            (shape[0], _HALVES, width), BITS[dtype.name], memory.bytes.data, offset,
            (memory.pitch, _HALF * memory.pitch, size),
        )  # fmt: skip
        columns = slice(offset // COLUMN, -(-(offset + width * size) // COLUMN))
        self.states = memory.written[:, columns], memory.readers[:, columns]

    def numbers(self) -> np.ndarray:
        return from_bits(np.array(self.bits), self.dtype).reshape(self.shape)

    def put(self, numbers: np.ndarray) -> None:
        self.bits[...] = to_bits(numbers, self.dtype).reshape(self.bits.shape)

    def slice(self, offset, shape) -> TensorBuffer:
        raise context.error(UnsupportedOperation, f"a slice of {self!r}, a pair's result")

    def reinterpreted(self, dtype, shape) -> TensorBuffer:
        raise context.error(UnsupportedOperation, f"another type of {self!r}, a pair's result")


class ScaleBuffer(TensorBuffer):
    """Scales, a byte each: rows beyond 128 lie in further columns.

    The hardware has four rows to a lane, in copies for all warps; where they lie within their
    columns does not show.
    """

    def __init__(self, memory: TensorMemory, offset, shape, dtype, name, life: TensorBuffers):
        self.memory, self.offset, self.shape, self.dtype = memory, offset, shape, dtype
        self.name, self.life, self.index = name, life, None
        parts, rows = -(-shape[0] // LANES), min(shape[0], LANES)
        start = offset % memory.pitch
        step = _scale_bytes(shape[1])
        self.bits = np.ndarray(
            (parts, rows, shape[1]), BITS[dtype.name], memory.bytes.data, start,
            (step, memory.pitch, 1),
        )  # fmt: skip
        last = start + (parts - 1) * step + shape[1]
        columns = slice(start // COLUMN, -(-last // COLUMN))
        self.states = memory.written[:, columns], memory.readers[:, columns]

    def numbers(self) -> np.ndarray:
        return np.array(self.bits).reshape(self.shape)

    def put(self, numbers: np.ndarray) -> None:
        self.bits[...] = numbers.view(self.bits.dtype).reshape(self.bits.shape)

    def slice(self, offset, shape) -> TensorBuffer:
        if self.shape[0] > LANES:
            raise context.error(
                UnsupportedOperation, f"a slice of {self!r}, scales of more than {LANES} rows"
            )
        return super().slice(offset, shape)

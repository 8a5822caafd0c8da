"""Shared memory of a CTA, with the state of every 16 bytes of it."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.dtypes import BITS, from_bits, item_bytes, to_bits
from gem.attention.simulator.errors import (
    AsyncConflict,
    MissingFence,
    OutOfBounds,
    Race,
    ResourceError,
    UninitialisedRead,
    UnsupportedOperation,
)

GRANULE = 16
ALIGNMENT = 128


class SharedMemory:
    """The bytes, and per granule who wrote it last and who has read it since.

    Both are indices: into `writes` (0: never written) and into `reads` (0: by nobody), whose
    entries are dicts from agent to its last read.

    Attributes:
        granule: bytes of a granule.
        alignment: in bytes, of allocations.
        poisoned: whether ordinary reads of what was never written give NaN, unreported.
    """

    granule, alignment, poisoned = GRANULE, ALIGNMENT, False

    def __init__(self, size: int):
        self.size = size
        self.bytes = np.zeros(size, np.uint8)
        self.written = np.zeros(-(-size // GRANULE), np.int32)
        self.readers = np.zeros_like(self.written)
        self.reset()

    def reset(self) -> None:
        """As at the start of a CTA."""
        self.used = 0
        self.written.fill(0)
        self.readers.fill(0)
        self.writes: list[Access | None] = [None]
        self.reads: list[dict[int, Access]] = [{}]
        self.buffers: dict[tuple, Buffer] = {}
        self.allocations: list[tuple[str, int]] = []

    def allocate(self, size: int, name: str) -> int:
        """The offset of so many bytes more."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT if size >= ALIGNMENT else self.used
        self.allocations.append((name, size))
        if start + size > self.size:
            parts = ", ".join(f"{n} {s}" for n, s in self.allocations)
            raise context.error(
                ResourceError,
                f"{start + size} bytes of shared memory are needed ({parts}), but the target has"
                f" {self.size} per CTA",
            )
        self.used = start + size
        return start

    def buffer(self, offset, shape, strides, dtype, name) -> Buffer:
        """The view of these bytes; the same object for the same view."""
        key = (offset, shape, strides, dtype.name)
        found = self.buffers.get(key)
        if found is None:
            found = self.buffers[key] = Buffer(self, offset, shape, strides, dtype, name)
        return found


class Buffers:
    """What `local_alloc` returns: `num` buffers of one shape, by index."""

    def __init__(self, memory: SharedMemory, offset: int, num: int, shape, dtype, name: str):
        self.memory, self.offset, self.num = memory, offset, num
        self.shape, self.dtype, self.name = tuple(shape), dtype, name
        self.strides = contiguous(self.shape, item_bytes(dtype))
        # A buffer shares no granule with the next one.
        self.bytes_each = max(int(np.prod(self.shape)) * item_bytes(dtype), memory.granule)

    def start(self, index: int) -> int:
        """The offset of a buffer."""
        return self.offset + index * self.bytes_each

    def __getitem__(self, index) -> Buffer:
        index = int(index)
        if not 0 <= index < self.num:
            raise context.error(
                OutOfBounds, f"{self.name}[{index}], but {self.name} has {self.num} buffers"
            )
        return self.view(self.start(index), index)

    def view(self, offset: int, index: int) -> Buffer:
        """The buffer of this index, at an offset in memory."""
        name = f"{self.name}[{index}]"
        return self.memory.buffer(offset, self.shape, self.strides, self.dtype, name)


def contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of an array in row-major order."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


class Buffer:
    """A view of shared memory: shape, strides in bytes, dtype."""

    def __init__(self, memory, offset, shape, strides, dtype, name):
        self.memory, self.offset, self.name = memory, offset, name
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.bits = np.ndarray(shape, BITS[dtype.name], memory.bytes.data, offset, strides)
        self._select()
        self._decoded: tuple[int, np.ndarray] | None = None

    @property
    def bytes_whole(self) -> int:
        return int(np.prod(self.shape)) * item_bytes(self.dtype)

    @property
    def type(self) -> tl.dtype:
        return self.dtype

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def _select(self) -> None:
        """Finds the granules: a view of the state arrays where they are regular, else indices."""
        size = item_bytes(self.dtype)
        order = sorted(range(len(self.shape)), key=lambda d: -self.strides[d])
        shape = [self.shape[d] for d in order]
        strides = [self.strides[d] for d in order]
        run = size
        while shape and strides[-1] == run:  # merge what is contiguous
            run *= shape.pop()
            strides.pop()
        if self.offset % GRANULE or run % GRANULE or any(s % GRANULE for s in strides):
            if (
                not shape
                and run < GRANULE
                and self.offset // GRANULE == (self.offset + run - 1) // GRANULE
            ):
                self.index = slice(self.offset // GRANULE, self.offset // GRANULE + 1)
            else:
                starts = np.array([self.offset])
                for n, s in zip(shape, strides, strict=True):
                    starts = (starts[:, None] + np.arange(n) * s).ravel()
                spans = starts[:, None] + np.arange(0, run, size)
                self.index = np.unique(spans // GRANULE)
            self.states = None
            return
        self.index = None
        dims = (*shape, run // GRANULE)
        steps = (*(s // GRANULE * 4 for s in strides), 4)
        self.states = tuple(
            np.ndarray(dims, np.int32, a.data, self.offset // GRANULE * 4, steps)
            for a in (self.memory.written, self.memory.readers)
        )

    def _state(self, which: int) -> np.ndarray:
        if self.states is not None:
            return self.states[which]
        return (self.memory.written, self.memory.readers)[which][self.index]

    def _set(self, which: int, value) -> None:
        if self.states is not None:
            self.states[which][...] = value
        else:
            (self.memory.written, self.memory.readers)[which][self.index] = value

    def read_by(self, access: Access, clocks, fenced=None) -> None:
        """Notes a read and reports what is wrong with it.

        Args:
            clocks: what the reading (or issuing) task knows.
            fenced: which ordinary stores it knows to be fenced; None for an ordinary read.
        """
        memory = self.memory
        context.read(self.name)
        written = self._state(0)
        low, high = int(written.min()), int(written.max())
        ids = (low,) if low == high else np.unique(written).tolist()
        for i in ids:
            last = memory.writes[i]
            if last is None:
                if memory.poisoned and not access.asynchronous:
                    continue
                never = int((written == 0).sum()) * memory.granule
                raise context.error(
                    UninitialisedRead,
                    f"the {access.what} reads {self!r}, of which {min(never, self.bytes_whole)} of"
                    f" {self.bytes_whole} bytes were never written.",
                )
            if not last.known(clocks):
                if last.asynchronous:
                    raise context.error(
                        AsyncConflict,
                        f"the {access.what} reads {self!r}, which {last} may still be writing:"
                        " nothing that this task has waited for says that it is complete.",
                    )
                raise context.error(
                    Race,
                    f"the {access.what} reads {self!r}, last written by {last}; no barrier that"
                    " this task has waited for comes after that.",
                )
            if fenced is not None and not last.asynchronous and fenced[last.agent] < last.clock:
                raise context.error(
                    MissingFence,
                    f"the {access.what} reads {self!r} asynchronously, but no"
                    f" fence('async_shared') comes between it and {last}.",
                )
        readers = self._state(1)
        low, high = int(readers.min()), int(readers.max())
        if low == high:
            self._set(1, self._with_reader(low, access))
        else:
            changed = readers.copy()
            for i in np.unique(readers).tolist():
                changed[readers == i] = self._with_reader(i, access)
            self._set(1, changed)

    def _with_reader(self, i: int, access: Access) -> int:
        self.memory.reads.append({**self.memory.reads[i], access.agent: access})
        return len(self.memory.reads) - 1

    def write_by(self, access: Access, clocks) -> None:
        """Notes a write and reports what is wrong with it."""
        memory = self.memory
        written = self._state(0)
        low, high = int(written.min()), int(written.max())
        for i in (low,) if low == high else np.unique(written).tolist():
            last = memory.writes[i]
            if last is not None and not last.known(clocks):
                kind = AsyncConflict if last.asynchronous else Race
                how = "may still be writing" if last.asynchronous else "wrote"
                raise context.error(
                    kind,
                    f"the {access.what} writes {self!r}, which {last} {how}: nothing that this"
                    " task has waited for comes after that.",
                )
        readers = self._state(1)
        low, high = int(readers.min()), int(readers.max())
        for i in (low,) if low == high else np.unique(readers).tolist():
            for reader in memory.reads[i].values():
                if reader.known(clocks):
                    continue
                if reader.asynchronous:
                    raise context.error(
                        AsyncConflict,
                        f"the {access.what} writes {self!r}, which {reader} may still read: a"
                        " write to a buffer that an asynchronous operation may still read.",
                    )
                raise context.error(
                    Race,
                    f"the {access.what} writes {self!r}, which {reader} reads: no barrier that"
                    " this task has waited for comes after that.",
                )
        memory.writes.append(access)
        self._set(0, len(memory.writes) - 1)
        self._set(1, 0)
        context.changed()

    def numbers(self) -> np.ndarray:
        """The content, in the type that holds it; not to be written to."""
        written = self._state(0)
        low = int(written.min())
        if low != int(written.max()):
            return from_bits(self.bits, self.dtype)
        if self._decoded is None or self._decoded[0] != low:
            self._decoded = low, from_bits(self.bits, self.dtype)
        return self._decoded[1]

    def put(self, numbers: np.ndarray) -> None:
        """Stores numbers of this shape and dtype."""
        self.bits[...] = to_bits(numbers, self.dtype)

    def slice(self, offset, shape) -> Buffer:
        offset, shape = [int(x) for x in offset], tuple(int(x) for x in shape)
        if len(offset) != len(self.shape) or len(shape) != len(self.shape):
            raise context.error(OutOfBounds, f"a slice of {shape} at {offset} of {self!r}")
        for at, n, whole in zip(offset, shape, self.shape, strict=True):
            if at < 0 or at + n > whole:
                raise context.error(OutOfBounds, f"a slice of {shape} at {offset} of {self!r}")
        start = self.offset + sum(a * s for a, s in zip(offset, self.strides, strict=True))
        ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(offset, shape, strict=True))
        return self.memory.buffer(start, shape, self.strides, self.dtype, f"{self.name}[{ranges}]")

    def transposed(self, dims) -> Buffer:
        return self.memory.buffer(
            self.offset,
            tuple(self.shape[d] for d in dims),
            tuple(self.strides[d] for d in dims),
            self.dtype,
            self.name,
        )

    def reinterpreted(self, dtype, shape) -> Buffer:
        """The same bytes with another dtype or shape; they must be contiguous."""
        shape = self.shape if shape is None else tuple(int(x) for x in shape)
        if self.strides != contiguous(self.shape, item_bytes(self.dtype)):
            raise context.error(UnsupportedOperation, f"another shape of {self!r}, a view")
        if int(np.prod(shape)) * item_bytes(dtype) != self.bytes_whole:
            raise context.error(
                OutOfBounds,
                f"{self!r} of {self.bytes_whole} bytes taken as {dtype}{list(shape)}",
            )
        strides = contiguous(shape, item_bytes(dtype))
        return self.memory.buffer(self.offset, shape, strides, dtype, self.name)

"""JaggedLayout: where each sample's rows lie in a packed tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem.attention import schedule as _schedule
from gem.attention.tables import to_device

_INT32_MAX = 2**31 - 1
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class JaggedLayout:
    """Where the rows of each sample lie in a packed `[rows, ...]` tensor.

    Sample i owns the rows `offsets[i]:offsets[i + 1]`. A sample may be empty, and `rows` may be
    more than `offsets[-1]` (spare capacity at the end, never read). Two layouts are equal only if
    they are the same object; make one per batch and hand it to every layer, since schedules are
    cached on it.

    Attributes:
        offsets: int32 `[batch_size + 1]`, on the device of the data.
        lengths: int64 `[batch_size]`, always on the CPU, so that no call waits for the device.
        batch_size: number of samples.
        rows: number of rows of the packed tensor, at least `offsets[-1]`.
        max_length: an upper bound of the lengths.

    Build one with `from_lengths`, `from_offsets` or `from_jagged`, which check their arguments;
    the constructor itself checks nothing.
    """

    offsets: Tensor
    lengths: Tensor
    batch_size: int
    rows: int
    max_length: int
    _derived: dict[Any, JaggedLayout] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int],
        device: torch.device | str | None = None,
        *,
        rows: int | Tensor | None = None,
        max_length: int | Tensor | None = None,
    ) -> JaggedLayout:
        """A layout from lengths that the host knows; copies host to device only.

        Args:
            lengths: integers `[batch_size]` on the CPU, each at least 0.
            device: where `offsets` go (default: CPU).
            rows: rows of the packed tensor (default: the sum of the lengths).
            max_length: an upper bound of the lengths (default: their maximum). A 0-d tensor is
                turned into an int here, once.

        Raises:
            ValueError: if an argument has a wrong type, shape or value.
        """
        lengths = _host_lengths(lengths, "lengths")
        offsets = _offsets_of(lengths)
        return cls._checked(offsets, lengths, device or "cpu", rows, max_length)

    @classmethod
    def from_offsets(
        cls,
        offsets: Tensor,
        lengths_cpu: Tensor | Sequence[int] | None = None,
        *,
        rows: int | Tensor | None = None,
        max_length: int | Tensor | None = None,
    ) -> JaggedLayout:
        """A layout from offsets `[batch_size + 1]`, int32 or int64 (converted to int32).

        Without `lengths_cpu`, offsets that live on an accelerator are copied to the host once,
        which waits for the device. With them nothing is copied; they are trusted to agree with
        offsets on an accelerator, and checked against offsets on the CPU.

        Raises:
            ValueError: if offsets do not start at 0, decrease, exceed `rows`, or disagree with
                `lengths_cpu`; or if `max_length` is less than the longest sample.
        """
        if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
            given = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
            raise ValueError(f"offsets must be an int32 or int64 tensor, but got {given}")
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise ValueError(
                f"offsets must have shape [batch_size + 1], but got {list(offsets.shape)}"
            )
        on_host = offsets.device.type == "cpu"
        host = offsets.to("cpu", torch.int64) if on_host or lengths_cpu is None else None
        if host is not None:
            _check_offsets(host)
        if lengths_cpu is None:
            lengths = host.diff()
        else:
            lengths = _host_lengths(lengths_cpu, "lengths_cpu")
            if lengths.shape[0] + 1 != offsets.shape[0]:
                raise ValueError(
                    f"lengths_cpu must have {offsets.shape[0] - 1} entries, one fewer than "
                    f"offsets, but has {lengths.shape[0]}"
                )
            if host is not None and not torch.equal(host.diff(), lengths):
                raise ValueError("lengths_cpu disagree with the differences of offsets")
        return cls._checked(offsets, lengths, offsets.device, rows, max_length)

    @classmethod
    def from_jagged(
        cls, jagged: Any, lengths_cpu: Tensor | Sequence[int] | None = None
    ) -> JaggedLayout:
        """A layout of anything that has `offsets()`, `lengths()` and `values()`.

        Made for torchrec's JaggedTensor, which is not imported. Without `lengths_cpu`, offsets on
        an accelerator are copied to the host once, which waits for the device.

        Raises:
            ValueError: if `jagged` lacks one of the three methods, or its parts disagree.
        """
        for method in ("offsets", "lengths", "values"):
            if not callable(getattr(jagged, method, None)):
                raise ValueError(
                    f"jagged must have offsets(), lengths() and values(), but "
                    f"{type(jagged).__name__} has no {method}()"
                )
        if lengths_cpu is None and jagged.lengths().device.type == "cpu":
            lengths_cpu = jagged.lengths()
        return cls.from_offsets(jagged.offsets(), lengths_cpu, rows=jagged.values().shape[0])

    @classmethod
    def _checked(
        cls,
        offsets: Tensor,
        lengths: Tensor,
        device: torch.device | str,
        rows: int | Tensor | None,
        max_length: int | Tensor | None,
    ) -> JaggedLayout:
        total = int(lengths.sum())
        longest = int(lengths.max()) if lengths.numel() else 0
        rows = total if rows is None else int(rows)
        max_length = longest if max_length is None else int(max_length)
        if total > _INT32_MAX:
            raise ValueError(f"a layout holds at most {_INT32_MAX} rows, but got {total}")
        if rows < total:
            raise ValueError(f"rows must be at least the sum of the lengths, {total}, not {rows}")
        if max_length < longest:
            raise ValueError(
                f"max_length must be at least the longest sample, {longest}, not {max_length}"
            )
        offsets = offsets.to(torch.int32)
        if offsets.device.type == "cpu":
            offsets = to_device(offsets, torch.device(device))
        return cls(offsets, lengths, lengths.shape[0], rows, max_length)

    @property
    def device(self) -> torch.device:
        """Device of the offsets, and of the data that the layout describes."""
        return self.offsets.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedLayout:
        """The same layout with its offsets on `device`; cached schedules are shared."""
        offsets = self.offsets.to(device, non_blocking=non_blocking)
        if offsets is self.offsets:
            return self
        return JaggedLayout(offsets, self.lengths, self.batch_size, self.rows, self.max_length)

    def pin_memory(self) -> JaggedLayout:
        """The same layout with its offsets in pinned memory, for an asynchronous `to`."""
        offsets = self.offsets.pin_memory()
        return JaggedLayout(offsets, self.lengths, self.batch_size, self.rows, self.max_length)

    def prepend(self, n: int) -> JaggedLayout:
        """The layout after `n` extra rows are put in front of every sample.

        Nothing is copied from the device. The same object is returned for the same `n`.

        Raises:
            ValueError: if `n` is not an int of at least 0.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"n must be an int of at least 0, but got {n!r}")
        if n == 0:
            return self
        if torch.compiler.is_compiling():
            return self._prepend(n)
        if ("prepend", n) not in self._derived:
            self._derived["prepend", n] = self._prepend(n)
        return self._derived["prepend", n]

    def _prepend(self, n: int) -> JaggedLayout:
        step = torch.arange(
            0, n * (self.batch_size + 1), n, dtype=torch.int32, device=self.offsets.device
        )
        return JaggedLayout(
            self.offsets + step,
            self.lengths + n,
            self.batch_size,
            self.rows + n * self.batch_size,
            self.max_length + n,
        )

    def split(self, block: int) -> JaggedLayout:
        """The layout in which every run of at most `block` rows is a sample of its own.

        Sample i becomes `ceil(length / block)` samples, the last of them possibly shorter; empty
        samples vanish. Self-attention on it is block-diagonal attention. Nothing is copied from
        the device. The same object is returned for the same `block`. The number of blocks depends
        on the lengths, so call it outside of `torch.compile`.

        Raises:
            ValueError: if `block` is not an int of at least 1.
        """
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise ValueError(f"block must be an int of at least 1, but got {block!r}")
        if ("split", block) not in self._derived:
            blocks = (self.lengths + block - 1) // block
            sample = torch.repeat_interleave(torch.arange(self.batch_size), blocks)
            first = blocks.cumsum(0) - blocks
            within = torch.arange(sample.shape[0]) - first[sample]
            lengths = (self.lengths[sample] - within * block).clamp_(max=block)
            self._derived["split", block] = JaggedLayout.from_lengths(
                lengths, self.device, rows=self.rows
            )
        return self._derived["split", block]

    def schedule(self, kind: str, *args: Any) -> Any:
        """What the builder registered as `kind` makes of the lengths and `args`, built once.

        Kernels ask for their tile schedules here; every layer and the backward share the result.

        Raises:
            ValueError: if nothing is registered as `kind`.
        """
        return _schedule.schedule(kind, self.lengths, *args)


def _host_lengths(lengths: Tensor | Sequence[int], name: str) -> Tensor:
    if not isinstance(lengths, Tensor):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in lengths):
            raise ValueError(f"{name} must be integers, but got {lengths!r}")
        lengths = torch.tensor(list(lengths), dtype=torch.int64)
    if lengths.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be integers, but got {lengths.dtype}")
    if lengths.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, but they are on {lengths.device}")
    if lengths.dim() != 1:
        raise ValueError(f"{name} must have shape [batch_size], but got {list(lengths.shape)}")
    lengths = lengths.to(torch.int64, copy=True)
    if lengths.numel() and int(lengths.min()) < 0:
        sample = int(lengths.argmin())
        raise ValueError(
            f"{name} must not be negative, but sample {sample} has {int(lengths[sample])}"
        )
    return lengths


def _offsets_of(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check_offsets(offsets: Tensor) -> None:
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets must start at 0, but start at {int(offsets[0])}")
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        i = int(falls[0])
        raise ValueError(
            f"offsets must not decrease, but offsets[{i + 1}]={int(offsets[i + 1])} follows "
            f"offsets[{i}]={int(offsets[i])}"
        )

"""Products of 8- and 4-bit floats with scales of their blocks (Blackwell): `async_dot_scaled`.

32 numbers along K share a scale, a power of two whose biased exponent is a byte (E8M0). Scales lie
in tensor memory, a row of bytes per row of the operand (or column of the right one), or packed, as
`tcgen05.cp` takes them: of 128 rows and 4 blocks, byte [i][j][k] is that of row 32 j + i, block k.
"""

from __future__ import annotations

import numpy as np

from gem.attention.simulator import clusters, context, tcgen05
from gem.attention.simulator.asynchronous import Operation, multiply
from gem.attention.simulator.clocks import Access
from gem.attention.simulator.dtypes import from_bits
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.memory import Buffer
from gem.attention.simulator.tensor_memory import ScaleBuffer, TensorBuffer

BLOCK = 32  # numbers that share a scale
_BIAS = 127
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_FORMATS = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": None}


class ScaledProduct(tcgen05.TensorProduct):
    """A product whose operands are scaled by blocks.

    Attributes:
        formats: of the left and the right operand.
        scales: (left, right) of every CTA; every CTA has those of all columns.
    """

    def __init__(self, *args, formats, scales):
        super().__init__(*args)
        self.formats, self.scales = formats, scales

    def effect(self) -> None:
        right = np.concatenate([_decoded(b, self.formats[1], 0) for b in self.b], axis=1)
        for a, acc, (left_scales, right_scales) in zip(self.a, self.acc, self.scales, strict=True):
            left = _decoded(a, self.formats[0], 1)
            blocks = left.shape[1] // BLOCK
            rows = _exponents(left_scales, left.shape[0], blocks)
            columns = _exponents(right_scales, right.shape[1], blocks)
            new = acc.numbers().copy() if self.accumulate else np.zeros(acc.shape, np.float32)
            for i in range(blocks):
                k = slice(i * BLOCK, (i + 1) * BLOCK)
                scale = rows[:, i, None] + columns[None, :, i]
                new += np.ldexp(multiply(left[:, k], right[k]), scale)
                new[rows[:, i] == _NAN] = np.nan
                new[:, columns[:, i] == _NAN] = np.nan
            acc.put(new)
        self.signal.send(self)

    def reads(self) -> list[Buffer]:
        return [*super().reads(), *(x for pair in self.scales for x in pair)]


_NAN = 255 - _BIAS


def _decoded(x: Buffer, form: str, along: int) -> np.ndarray:
    """An operand's numbers by its format, whatever type its buffer has."""
    bits = x.bits.view(np.uint8)
    if form != "e2m1":
        return from_bits(bits, _Named(_FORMATS[form]))
    return np.stack([_E2M1[bits & 15], _E2M1[bits >> 4]], axis=along + 1).reshape(
        *(n * (1 + (i == along)) for i, n in enumerate(bits.shape))
    )


class _Named:
    """As much of a dtype as its numbers need."""

    def __init__(self, name: str):
        self.name = name


def _exponents(scales: Buffer, rows: int, blocks: int) -> np.ndarray:
    """Of rows and blocks, without the bias."""
    x = scales.numbers() if isinstance(scales, TensorBuffer) else unpacked(scales, rows, blocks)
    return x.view(np.uint8)[:rows, :blocks].astype(np.int32) - _BIAS


def _packed_shapes(rows: int, blocks: int) -> list[tuple[int, ...]]:
    r, c = -(-rows // 128), -(-blocks // 4)
    return [(r, c, 32, 16), (r, c, 32, 4, 4), (1, r, c, 2, 256), (r, c * 512)]


def unpacked(x: Buffer, rows: int, blocks: int) -> np.ndarray:
    """Packed scales as bytes `[rows, blocks]`, both rounded up to 128 and 4."""
    r, c = -(-rows // 128), -(-blocks // 4)
    tiles = np.ascontiguousarray(x.bits).view(np.uint8).reshape(r, c, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(r * 128, c * 4)


def _check_packed(x: Buffer, rows: int, blocks: int, what: str) -> None:
    if x.dtype.name not in ("int8", "uint8") or x.shape not in _packed_shapes(rows, blocks):
        shapes = " or ".join(str(list(s)) for s in _packed_shapes(rows, blocks))
        raise context.error(
            UnsupportedOperation,
            f"{what} of {x.dtype} {x!r}: packed scales of {rows} rows and {blocks} blocks are bytes"
            f" of shape {shapes}",
        )


def _check_scales(x: Buffer, rows: int, blocks: int) -> None:
    what = "async_dot_scaled with scales"
    if not isinstance(x, TensorBuffer):
        _check_packed(x, rows, blocks, what)
    elif not isinstance(x, ScaleBuffer) or x.shape[0] < rows or x.shape[1] < blocks:
        raise context.error(
            UnsupportedOperation,
            f"{what} {x!r} of {x.dtype}; in tensor memory they are bytes of {rows} rows and"
            f" {blocks} columns",
        )


def _check_operand(x: Buffer, form: str) -> None:
    if form not in _FORMATS:
        raise context.error(
            UnsupportedOperation, f"async_dot_scaled of {form!r}: {', '.join(_FORMATS)}"
        )
    if x.dtype.name not in ("uint8", "int8", _FORMATS[form]):
        raise context.error(
            UnsupportedOperation, f"async_dot_scaled of {x.dtype} {x!r} as numbers of {form}"
        )


def dot(A, B, acc, scale_buffers, formats, use_acc, pred, mBarriers, two_ctas, force_async):
    """`async_dot_scaled`."""
    _on_blackwell("async_dot_scaled")
    a, b = tcgen05.operand(A, "its left operand"), tcgen05.operand(B, "its right operand")
    acc = tcgen05.operand(acc, "its accumulator")
    scales = [tcgen05.operand(x, "its scales") for x in scale_buffers]
    for x, form in zip((a, b), formats, strict=True):
        _check_operand(x, form)
    k = a.shape[1] * (1 + (formats[0] == "e2m1"))
    if a.shape[0] != 128 or k != b.shape[0] * (1 + (formats[1] == "e2m1")) or k % BLOCK:
        raise context.error(
            UnsupportedOperation,
            f"async_dot_scaled of {formats[0]}{list(a.shape)} and {formats[1]}{list(b.shape)}: M is"
            f" 128 per CTA, K a multiple of {BLOCK}, and K agrees (two numbers of e2m1 to a byte)",
        )
    tcgen05.check_result(a.shape[0], b, acc, 2 if two_ctas else 1)
    for x, rows in zip(scales, (a.shape[0], acc.shape[1]), strict=True):
        _check_scales(x, rows, k // BLOCK)

    def make(place, pair, use, signal):
        sides = [[clusters.peer_buffer(x, other) for other in pair] for x in (a, b, acc)]
        theirs = [[clusters.peer_buffer(x, other) for x in scales] for other in pair]
        return ScaledProduct(
            context.task, place, *sides, use, signal, formats=formats, scales=theirs
        )

    yield from tcgen05.issue(make, use_acc, pred, mBarriers, two_ctas, force_async)


class TensorCopy(Operation):
    """A copy from shared to tensor memory; it is in order with its task's products."""

    name = "copy"

    def __init__(self, task, where, source: Buffer, to: TensorBuffer):
        super().__init__(task, where)
        self.source, self.to = source, to

    def effect(self) -> None:
        if isinstance(self.to, ScaleBuffer):
            self.to.put(unpacked(self.source, *self.to.shape))
        else:
            self.to.put(self.source.numbers())

    def __str__(self) -> str:
        return f"copy to {self.to.name}"


def tmem_copy(src: Buffer, dst: Buffer):
    """`tmem_copy` (`tcgen05.cp`): a product or a commit after it says that it is complete."""
    _on_blackwell("tmem_copy")
    cta, task, place = context.cta, context.task, context.where()
    if isinstance(src, TensorBuffer) or not isinstance(dst, TensorBuffer):
        raise context.error(
            UnsupportedOperation, f"tmem_copy from {src!r} to {dst!r}: from shared to tensor memory"
        )
    if isinstance(dst, ScaleBuffer):
        if dst.shape[0] % 128 or dst.shape[1] % 4:
            raise context.error(
                UnsupportedOperation,
                f"tmem_copy of scales to {dst!r}: rows are a multiple of 128, columns of 4",
            )
        _check_packed(src, *dst.shape, "tmem_copy")
    elif src.shape != dst.shape or src.dtype != dst.dtype:
        raise context.error(
            UnsupportedOperation, f"tmem_copy from {src.dtype} {src!r} to {dst.dtype} {dst!r}"
        )
    operation = TensorCopy(task, place, src, dst)
    number = task.products.issue(operation)
    access = Access(task.products.agent, number, task.name, place, "copy to tensor memory", True)
    clocks = task.clocks.copy()
    clocks[task.products.agent] = number
    src.read_by(access, clocks, task.fences)
    dst.write_by(access, clocks)
    cta.issue(operation)
    if cta.policy.switch():
        yield


def _on_blackwell(what: str) -> None:
    target = context.cta.target
    if not target.tensor_columns:
        raise context.error(UnsupportedOperation, f"{what} does not exist on {target.name}")

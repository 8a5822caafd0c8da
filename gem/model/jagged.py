"""Moving rows in and out of jagged sequences without padding or a copy back from the device."""

import torch
from torch import Tensor

from gem.attention import JaggedLayout


def sample_of_row(layout: JaggedLayout) -> Tensor:
    """[rows] int64: the sample that each row belongs to."""
    lengths = layout.offsets.diff().long()
    samples = torch.arange(layout.batch_size, device=lengths.device)
    return torch.repeat_interleave(samples, lengths, output_size=layout.rows)


def distance_from_end(layout: JaggedLayout) -> Tensor:
    """[rows] float32: 1 for a sample's last row, 2 for the one before it, ..."""
    rows = torch.arange(layout.rows, device=layout.offsets.device)
    return (layout.offsets[1:].long()[sample_of_row(layout)] - rows).float()


class LastRows:
    """Where the last `count` rows of each sample are."""

    def __init__(self, layout: JaggedLayout, count: int) -> None:
        offsets = layout.offsets.long()
        index = offsets[1:, None] - 1 - torch.arange(count, device=offsets.device)
        self._inside = (index >= offsets[:-1, None])[..., None]
        self._index = index.clamp_(min=0).flatten()

    def take(self, x: Tensor) -> Tensor:
        """x [rows, D] -> [B, count, D], last first; zeros where a sample is shorter."""
        batch, count, _ = self._inside.shape
        if x.shape[0] == 0:
            return x.new_zeros(batch, count, x.shape[1])
        picked = x.index_select(0, self._index)
        return picked.view(batch, count, x.shape[1]) * self._inside


class Blocks:
    """A layout cut into blocks of at most `size` rows, padded only while a block is worked on.

    Rows go in and out by one gather each, split into heads on the way: [rows, H d] to
    [blocks, H, size, d] and back, so that neither side is transposed in memory.

    Attributes:
        sample: [blocks] int64, the sample of each block.
        valid: [blocks, size] bool, False past a sample's end.
    """

    def __init__(self, layout: JaggedLayout, size: int) -> None:
        self.size = size
        offsets = layout.offsets.long()
        device = offsets.device
        total = int(((layout.lengths + size - 1) // size).sum())
        counts = (offsets.diff() + size - 1) // size
        samples = torch.arange(layout.batch_size, device=device)
        self.sample = torch.repeat_interleave(samples, counts, output_size=total)
        first_block = counts.cumsum(0) - counts
        row_sample = sample_of_row(layout)
        within = torch.arange(layout.rows, device=device) - offsets[row_sample]
        self._slot = first_block[row_sample] * size + within  # of each row, in [blocks * size]
        block = torch.arange(total, device=device) - first_block[self.sample]
        start = offsets[self.sample] + block * size
        row = start[:, None] + torch.arange(size, device=device)
        self.valid = row < offsets[self.sample + 1][:, None]
        self._row = torch.where(self.valid, row, 0)  # padding reads some row
        self._by_heads: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, x: Tensor, heads: int) -> Tensor:
        """x [rows, heads * d] -> [blocks, heads, size, d]; padding holds some row's values."""
        return _Pack.apply(x, *self._indices(heads), heads, self.size)

    def unpack(self, x: Tensor) -> Tensor:
        """x [blocks, heads, size, d] -> [rows, heads * d]."""
        return _Unpack.apply(x, *self._indices(x.shape[1]), self.valid)

    def _indices(self, heads: int) -> tuple[Tensor, Tensor]:
        """Gathers on [rows * heads, d] and on [blocks * heads * size, d]; made once per batch."""
        if heads not in self._by_heads:
            head = torch.arange(heads, device=self._row.device)
            into = self._row[:, None, :] * heads + head[:, None]
            block, slot = self._slot // self.size, self._slot % self.size
            out = (block[:, None] * heads + head) * self.size + slot[:, None]
            self._by_heads[heads] = into.flatten(), out.flatten()
        return self._by_heads[heads]


def _gather_blocks(x: Tensor, into: Tensor, heads: int, size: int) -> Tensor:
    flat = x.reshape(-1, x.shape[1] // heads).index_select(0, into)
    return flat.view(-1, heads, size, flat.shape[1])


def _gather_rows(x: Tensor, out: Tensor) -> Tensor:
    heads, width = x.shape[1], x.shape[3]
    return x.reshape(-1, width).index_select(0, out).view(-1, heads * width)


class _Pack(torch.autograd.Function):
    """Rows to blocks; the gradient of a row is the one of its slot, padding has none."""

    @staticmethod
    def forward(ctx, x: Tensor, into: Tensor, out: Tensor, heads: int, size: int) -> Tensor:
        ctx.save_for_backward(out)
        return _gather_blocks(x, into, heads, size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (out,) = ctx.saved_tensors
        return _gather_rows(grad, out), None, None, None, None


class _Unpack(torch.autograd.Function):
    """Blocks to rows; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, into: Tensor, out: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(into, valid)
        ctx.heads = x.shape[1]
        return _gather_rows(x, out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        into, valid = ctx.saved_tensors
        packed = _gather_blocks(grad, into, ctx.heads, valid.shape[1])
        return packed.mul_(valid[:, None, :, None]), None, None, None

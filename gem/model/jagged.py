"""Moving rows in and out of jagged sequences without padding or a copy back from the device."""

import torch
from torch import Tensor

from gem.attention import JaggedLayout


class _Permute(torch.autograd.Function):
    """`x[index]` for a permutation: its gradient is a gather too, not a scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def sample_of_row(layout: JaggedLayout) -> Tensor:
    """[rows] int64: the sample that each row belongs to."""
    lengths = layout.offsets.diff().long()
    samples = torch.arange(layout.batch_size, device=lengths.device)
    return torch.repeat_interleave(samples, lengths, output_size=layout.rows)


class Appended:
    """A layout with `n` more rows at the end of every sample: the place of CLS tokens.

    InterFormer prepends them; under a causal window the last rows are those that see the newest
    events, so here they follow.

    Attributes:
        layout: the longer layout, rows = events + n * B.
        index: [rows] int64, where each row comes from in `cat([events, appended])`.
        position: [rows] float32, the row's distance from its sample's end (0 for the last).
    """

    def __init__(self, events: JaggedLayout, n: int) -> None:
        self.n = n
        self.layout = events.prepend(n)
        device = events.offsets.device
        sample = sample_of_row(events)
        row = torch.arange(events.rows, device=device)
        ends = self.layout.offsets[1:].long()
        extra = (ends[:, None] - n + torch.arange(n, device=device)).flatten()
        self._place = torch.cat([row + n * sample, extra])  # from cat([events, extra]) to rows
        self.index = torch.empty_like(self._place)
        self.index[self._place] = torch.arange(self._place.numel(), device=device)
        rows = torch.arange(self._place.numel(), device=device)
        self.position = (ends[sample_of_row(self.layout)] - 1 - rows).float()

    def join(self, events: Tensor, extra: Tensor) -> Tensor:
        """events [events, ...], extra [B, n, ...] -> [rows, ...] in the longer layout."""
        return _Permute.apply(torch.cat([events, extra.flatten(0, 1)]), self.index, self._place)

    def last(self, rows: Tensor, count: int) -> Tensor:
        """The last `count` rows of each sample, last first; zeros where a sample is shorter.

        rows [rows, D] -> [B, count, D].
        """
        offsets = self.layout.offsets.long()
        index = offsets[1:, None] - 1 - torch.arange(count, device=rows.device)
        inside = index >= offsets[:-1, None]
        picked = rows.index_select(0, index.clamp(min=0).flatten())
        return picked.view(*index.shape, rows.shape[1]) * inside[..., None]


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
        return _Pack.apply(x, self, heads)

    def unpack(self, x: Tensor) -> Tensor:
        """x [blocks, heads, size, d] -> [rows, heads * d]."""
        return _Unpack.apply(x, self)

    def _indices(self, heads: int) -> tuple[Tensor, Tensor]:
        """Gathers on [rows * heads, d] and on [blocks * heads * size, d]; made once per batch."""
        if heads not in self._by_heads:
            head = torch.arange(heads, device=self._row.device)
            into = self._row[:, None, :] * heads + head[:, None]
            block, slot = self._slot // self.size, self._slot % self.size
            out = (block[:, None] * heads + head) * self.size + slot[:, None]
            self._by_heads[heads] = into.flatten(), out.flatten()
        return self._by_heads[heads]

    def _gather_blocks(self, x: Tensor, heads: int) -> Tensor:
        flat = x.reshape(-1, x.shape[1] // heads).index_select(0, self._indices(heads)[0])
        return flat.view(-1, heads, self.size, flat.shape[1])

    def _gather_rows(self, x: Tensor) -> Tensor:
        heads, width = x.shape[1], x.shape[3]
        flat = x.reshape(-1, width).index_select(0, self._indices(heads)[1])
        return flat.view(-1, heads * width)


class _Pack(torch.autograd.Function):
    """Rows to blocks; the gradient of a row is the one of its slot, padding has none."""

    @staticmethod
    def forward(ctx, x: Tensor, blocks: Blocks, heads: int) -> Tensor:
        ctx.blocks = blocks
        return blocks._gather_blocks(x, heads)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.blocks._gather_rows(grad), None, None


class _Unpack(torch.autograd.Function):
    """Blocks to rows; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks, ctx.heads = blocks, x.shape[1]
        return blocks._gather_rows(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        packed = ctx.blocks._gather_blocks(grad, ctx.heads)
        return packed.mul_(ctx.blocks.valid[:, None, :, None]), None

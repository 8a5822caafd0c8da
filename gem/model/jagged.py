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
        return picked.view(*index.shape, -1) * inside[..., None]


class Blocks:
    """A layout cut into blocks of at most `size` rows, padded only while a block is worked on.

    Attributes:
        sample: [blocks] int64, the sample of each block.
    """

    def __init__(self, layout: JaggedLayout, size: int) -> None:
        self.size, self.rows = size, layout.rows
        offsets = layout.offsets.long()
        lengths_host = layout.lengths
        counts_host = (lengths_host + size - 1) // size
        total = int(counts_host.sum())
        device = offsets.device
        counts = (offsets.diff() + size - 1) // size
        samples = torch.arange(layout.batch_size, device=device)
        self.sample = torch.repeat_interleave(samples, counts, output_size=total)
        first_block = counts.cumsum(0) - counts
        row_sample = sample_of_row(layout)
        within = torch.arange(layout.rows, device=device) - offsets[row_sample]
        # [rows] the slot of each row in [blocks * size]
        self.slot = first_block[row_sample] * size + within
        block = torch.arange(total, device=device) - first_block[self.sample]
        start = offsets[self.sample] + block * size
        index = start[:, None] + torch.arange(size, device=device)
        self.valid = index < offsets[self.sample + 1][:, None]  # [blocks, size]
        self.index = torch.where(self.valid, index, 0).flatten()

    def pack(self, x: Tensor) -> Tensor:
        """x [rows, ...] -> [blocks, size, ...]; slots past a sample's end hold any row."""
        return _Pack.apply(x, self)

    def unpack(self, x: Tensor) -> Tensor:
        """x [blocks, size, ...] -> [rows, ...]."""
        return _Unpack.apply(x, self)

    def _gather_blocks(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.index).unflatten(0, (-1, self.size))

    def _gather_rows(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self.slot)


class _Pack(torch.autograd.Function):
    """Rows to blocks; the gradient of a row is the one of its slot, padding has none."""

    @staticmethod
    def forward(ctx, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks = blocks
        return blocks._gather_blocks(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.blocks._gather_rows(grad), None


class _Unpack(torch.autograd.Function):
    """Blocks to rows; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks = blocks
        return blocks._gather_rows(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        blocks = ctx.blocks
        packed = blocks._gather_blocks(grad)
        return packed.mul_(blocks.valid.view(*blocks.valid.shape, *[1] * (grad.ndim - 1))), None

"""flex_attention, compiled, over the packed batch as one sequence with a document mask.

The block mask is built from the lengths: for each block of queries only the blocks of keys that its
samples (and the window) reach are listed, so that nothing of queries x keys is ever made. It is
layout, so that building it does not count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.peers.base import AutogradRoute, Contender, copied_per_sample, in_output_shape
from gem.attention.testing import Problem

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a mask that hold anything: int arrays `[n]` of query and key blocks.

    Attributes:
        rows, columns: query block and key block of each, sorted by row and then column.
        full: whether every pair of the block is visible.
        shape: (query blocks, key blocks).
    """

    rows: np.ndarray
    columns: np.ndarray
    full: np.ndarray
    shape: tuple[int, int]


def find_blocks(
    q_lengths: np.ndarray,
    k_lengths: np.ndarray,
    left: int | None = None,
    right: int | None = None,
    block: int = BLOCK,
) -> Blocks:
    """The blocks that packed samples and a window touch.

    A window needs queries and keys of one layout. A listed block may still hold no visible pair;
    none is missing.
    """
    q_end, k_end = q_lengths.cumsum(), k_lengths.cumsum()
    q_total, k_total = int(q_end[-1]), int(k_end[-1])
    q_blocks, k_blocks = -(-q_total // block), -(-k_total // block)
    q_low = np.arange(q_blocks) * block
    q_high = np.minimum(q_low + block, q_total)
    # The samples of a block's first and last query, and the keys from the one to the other.
    first = np.searchsorted(q_end, q_low, side="right")
    last = np.searchsorted(q_end, q_high - 1, side="right")
    k_low, k_high = (k_end - k_lengths)[first], k_end[last]
    if left is not None:
        k_low = np.maximum(k_low, q_low - left)
    if right is not None:
        k_high = np.minimum(k_high, q_high + right)
    begin = k_low // block
    count = np.where(k_high > k_low, -(-k_high // block) - begin, 0)
    rows = np.repeat(np.arange(q_blocks), count)
    columns = np.arange(len(rows)) - np.repeat(count.cumsum() - count, count) + begin[rows]
    c_low = columns * block
    c_high = np.minimum(c_low + block, k_total)
    sample = first[rows]
    full = (first == last)[rows]
    full &= (c_low >= (k_end - k_lengths)[sample]) & (c_high <= k_end[sample])
    # The kernel asks no mask of a full block, so that ragged ends must not be one.
    full &= (q_high - q_low == block)[rows] & (c_high - c_low == block)
    if left is not None:
        full &= c_low >= q_high[rows] - 1 - left
    if right is not None:
        full &= c_high - 1 <= q_low[rows] + right
    return Blocks(rows, columns, full, (q_blocks, k_blocks))


def lists(
    keys: np.ndarray, values: np.ndarray, chosen: np.ndarray, groups: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Values by key, first those not chosen, then those chosen (bool, one per value).

    Counts `[groups]` and, padded with 0, values `[groups, width]`; int32. The width is that of the
    longest list of either: the kernels of torch 2.11 walk both tables by the strides of the first.
    """
    order = np.lexsort((values, keys))
    keys, values, chosen = keys[order], values[order], chosen[order]
    parts = [(keys[part], values[part]) for part in (~chosen, chosen)]
    counts = [np.bincount(k, minlength=groups) for k, _ in parts]
    width = max(1, *(int(c.max(initial=0)) for c in counts))
    for (k, v), count in zip(parts, counts, strict=True):
        table = np.zeros((groups, width), np.int32)
        table[k, np.arange(len(k)) - (count.cumsum() - count)[k]] = v
        yield count.astype(np.int32), table


def block_mask(
    blocks: Blocks, lengths: tuple[int, int], mask_mod, device: torch.device, block: int = BLOCK
) -> BlockMask:
    tensors = []
    for by, of, groups in (
        (blocks.rows, blocks.columns, blocks.shape[0]),
        (blocks.columns, blocks.rows, blocks.shape[1]),
    ):
        for pair in lists(by, of, blocks.full, groups):
            tensors += [torch.from_numpy(x).to(device)[None, None] for x in pair]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    return BlockMask(
        seq_lengths=lengths,
        **dict(zip(names, tensors, strict=True)),
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod,
    )


def document_mask(q_sample: Tensor, k_sample: Tensor, left: int | None, right: int | None):
    """Whether a query and a key of the packed sequences see each other."""
    if left is None and right is None:

        def mask(b, h, i, j):
            return q_sample[i] == k_sample[j]
    elif left is None:

        def mask(b, h, i, j):
            return (q_sample[i] == k_sample[j]) & (j <= i + right)
    elif right is None:

        def mask(b, h, i, j):
            return (q_sample[i] == k_sample[j]) & (j >= i - left)
    else:

        def mask(b, h, i, j):
            return (q_sample[i] == k_sample[j]) & (j >= i - left) & (j <= i + right)

    return mask


@functools.cache
def compiled():
    import torch._dynamo

    # One compilation per row. With symbolic lengths the kernels would know less, and the backward
    # would be compiled before it is known that it runs more than once, which it would then refuse.
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 256)
    return torch.compile(flex_attention, dynamic=False)


class FlexRoute(AutogradRoute):
    def __init__(self, problem: Problem, function=None) -> None:
        super().__init__(problem)
        self.function = function or compiled()
        device, layout = problem.q.device, problem.k_layout
        k_lengths = layout.lengths.numpy()
        q_lengths = k_lengths
        if problem.q_layout is None:
            q_lengths = np.full(layout.batch_size, problem.q.shape[0])
        left, right = problem.sides
        blocks = find_blocks(q_lengths, k_lengths, left, right)
        q_sample, k_sample = (
            torch.from_numpy(np.repeat(np.arange(len(n), dtype=np.int32), n)).to(device)
            for n in (q_lengths, k_lengths)
        )
        mask_mod = document_mask(q_sample, k_sample, left, right)
        sizes = len(q_sample), len(k_sample)
        self.mask = block_mask(blocks, sizes, mask_mod, device)

    def forward(self) -> Tensor:
        if self.problem.q.device.type == "cpu":  # no gradients there
            return super().forward()
        p = self.problem
        # With gradients asked for, so that one compilation serves both passes.
        q, k, v = (x.detach().requires_grad_() for x in (p.q, p.k, p.v))
        return self.attend(q, k, v).detach()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.problem
        q = copied_per_sample(p, q)
        out = self.function(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            block_mask=self.mask,
            scale=p.factor,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return in_output_shape(p, out[0].transpose(0, 1).contiguous())


class Flex(Contender):
    name = "flex"

    def routes(self, problems):
        return {"": lambda: [FlexRoute(problem) for problem in problems]}

"""PyTorch's scaled_dot_product_attention on tensors padded to the longest sample.

The copies into the padded form and back count, in both directions. They are gathers of whole rows
by indices that the lengths decide. Padded keys are masked by a bias, which is the only mask that
takes them out of the softmax; only where all samples have one length (or one length and a causal
mask) does the flash kernel serve, since it takes no bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.peers.base import AutogradRoute, Contender, Unavailable
from gem.attention.testing import Problem

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def as_words(x: Tensor) -> Tensor:
    """Rows of 8-byte words: gathers then move 8 bytes per index computation, not 2."""
    rows = x.reshape(x.shape[0], -1)
    return rows.view(torch.int64) if rows.shape[1] * rows.itemsize % 8 == 0 else rows


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    rows = as_words(x.contiguous()).index_select(0, index)
    return rows.view(x.dtype).view(index.shape[0], *x.shape[1:])


class _Pad(torch.autograd.Function):
    """Packed rows to padded ones; what lies in the padding is some row's copy.

    x `[rows, ...]`, places `[batch, length]` (the packed row of each), back `[rows]` (the padded
    row of each), empty: samples that become 0. The gradient of padding is dropped.
    """

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, back: Tensor, empty: Tensor | None) -> Tensor:
        ctx.back = back
        padded = gather_rows(x, places.flatten())
        if empty is not None:
            padded.view(*places.shape, *x.shape[1:]).index_fill_(0, empty, 0.0)
        return padded

    @staticmethod
    def backward(ctx, grad: Tensor):
        return gather_rows(grad, ctx.back), None, None, None


class _Unpad(torch.autograd.Function):
    """Padded rows to packed ones; the gradient of padding is 0."""

    @staticmethod
    def forward(ctx, x: Tensor, back: Tensor) -> Tensor:
        ctx.shape, ctx.back = x.shape, back
        return gather_rows(x, back)

    @staticmethod
    def backward(ctx, grad: Tensor):
        padded = grad.new_zeros(ctx.shape)
        as_words(padded).index_copy_(0, ctx.back, as_words(grad.contiguous()))
        return padded, None


class PaddedRoute(AutogradRoute):
    def __init__(self, problem: Problem, kernel: str) -> None:
        super().__init__(problem)
        self.kernel = KERNELS[kernel]
        layout, device = problem.k_layout, problem.k.device
        self.group = problem.q.shape[1] // problem.k.shape[1]
        # The efficient kernel has no grouped heads: k and v are copied for it.
        self.expand = self.group > 1 and kernel == "efficient"
        self.copy_q = kernel == "cudnn"  # it takes no tensor with a stride of 0
        left, right = problem.sides
        lengths = layout.lengths.to(device)
        equal = bool((layout.lengths == layout.max_length).all())
        self.causal = equal and (left, right) == (None, 0)
        self.padded = not equal
        # A bias needs strides that are multiples of 8 elements.
        self.length = layout.max_length if equal else -(-layout.max_length // 8) * 8
        self.bias = None
        if self.padded or not (self.causal or (left, right) == (None, None)):
            if kernel == "flash":
                raise Unavailable("the flash kernel takes no mask of padded keys")
            self.bias = self._bias(lengths, left, right)
        if self.padded:
            position = torch.arange(self.length, device=device)
            valid = position < lengths[:, None]
            first = layout.offsets[:-1].long()
            places = first[:, None] + position
            # Padding copies rows near by, which lie in the cache.
            self.places = places.clamp(max=max(0, layout.rows - 1))
            self.back = valid.flatten().nonzero()[:, 0]
            # With keys and values of 0 a sample without keys gives 0 and adds nothing to dq.
            empty = (layout.lengths == 0).nonzero()[:, 0].to(device)
            self.empty = empty if problem.q_layout is None and empty.numel() else None

    def _bias(self, lengths: Tensor, left: int | None, right: int | None) -> Tensor:
        """0 or -inf: `[B, 1, 1, L]`, or `[B, 1, L, L]` where the mask depends on the query."""
        p = self.problem
        j = torch.arange(self.length, device=lengths.device)
        seen = (j < lengths[:, None])[:, None, :]
        if (left, right) != (None, None):
            i = j[:, None]
            window = torch.ones(self.length, self.length, dtype=torch.bool, device=j.device)
            if left is not None:
                window &= j >= i - left
            if right is not None:
                window &= j <= i + right
            # A padded query sees something, so that no softmax is empty.
            seen = (seen & window) | (i >= lengths[:, None, None])
        # No softmax may be empty; see `empty` for samples without keys.
        seen = seen | (lengths == 0)[:, None, None]
        bias = torch.zeros(seen.shape, dtype=p.q.dtype, device=j.device)
        bias.masked_fill_(~seen, -torch.inf)
        return bias[:, None]

    def _heads_first(self, x: Tensor) -> Tensor:
        """[rows, heads, dim] to [batch, heads, length, dim], padded."""
        if self.padded:
            x = _Pad.apply(x, self.places, self.back, self.empty)
        return x.view(-1, self.length, *x.shape[1:]).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.problem
        k, v = self._heads_first(k), self._heads_first(v)
        if self.expand:
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        if p.q_layout is None:
            q = q.transpose(0, 1).expand(p.k_layout.batch_size, -1, -1, -1)
            if self.copy_q:
                q = q.contiguous()
        else:
            q = self._heads_first(q)
        with sdpa_kernel(self.kernel):
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                self.bias,
                is_causal=self.causal,
                scale=p.factor,
                enable_gqa=self.group > 1 and not self.expand,
            )
        out = out.transpose(1, 2)
        if p.q_layout is None:
            return out
        out = out.flatten(0, 1)
        return _Unpad.apply(out, self.back) if self.padded else out


class SdpaPadded(Contender):
    name = "sdpa_padded"
    last_resorts = ("efficient",)  # where the others ran it was always several times slower

    def routes(self, problems):
        on_gpu = problems[0].q.device.type == "cuda"
        kernels = ("cudnn", "flash", "efficient") if on_gpu else ("math",)

        def build(kernel: str):
            return lambda: [PaddedRoute(problem, kernel) for problem in problems]

        return {kernel: build(kernel) for kernel in kernels}

"""Padded scaled_dot_product_attention by the memory-efficient kernel."""

from __future__ import annotations

import torch

from bench.rivals.padded import Kernel, Padded

_NEEDED = [True, True, True, False]  # of the gradients of q, k, v and the bias


def _forward(q, k, v, bias, scale):
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, False, scale=scale
    )


def _backward(dout, q, k, v, bias, scale, out, lse, *state):
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, bias, out, lse, *state, 0.0, _NEEDED, False, scale=scale
    )[:3]


_padded = Padded(Kernel("cuda", _forward, _backward, expands=True))
unsupported, forward, backward = _padded.unsupported, _padded.forward, _padded.backward

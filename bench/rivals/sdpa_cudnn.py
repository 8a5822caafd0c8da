"""Padded scaled_dot_product_attention by cuDNN."""

from __future__ import annotations

import torch

from bench.rivals.padded import Kernel, Padded


def _forward(q, k, v, bias, scale):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, 0.0, False, False, scale=scale
    )


def _backward(dout, q, k, v, bias, scale, out, lse, *state):
    *lengths, seed, offset, _ = state
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, offset, bias, *lengths, 0.0, False, scale=scale
    )


_padded = Padded(Kernel("cuda", _forward, _backward, expands=False))
unsupported, forward, backward = _padded.unsupported, _padded.forward, _padded.backward

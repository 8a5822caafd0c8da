"""FlashAttention-4, variable length; a shared q is copied for each sample, and the copy kept.

What `flash_attn_varlen_func` of flash-attn-4 4.0.0b36 calls in either direction, since a backend
computes both below autograd.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from bench.rivals import kept
from gem.attention.backends import Call


@functools.cache
def _interface() -> ModuleType:
    # Compiled kernels survive the process.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module("flash_attn.cute.interface")


def unsupported(call: Call) -> str | None:
    """None if it can serve the call, else why not."""
    if call.device.type != "cuda":
        return "needs a CUDA device"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {str(call.dtype).removeprefix('torch.')}"
    try:
        _interface()
    except Exception as error:  # noqa: BLE001 - it may fail in any way
        return f"cannot be imported: {error}"
    return None


def _options(call: Call, queries: int) -> dict:
    """Lengths and mask of either direction; `queries` counts those of a shared q."""
    if call.form == "broadcast":
        batch = call.k_lengths.shape[0] + 1
        q_offsets = queries * torch.arange(batch, dtype=torch.int32, device=call.device)
        longest = queries
    else:
        q_offsets, longest = call.q_offsets, int(call.q_lengths.max())
    return {
        "softmax_scale": call.scale,
        "window_size_left": call.left,
        "window_size_right": call.right,
        "cu_seqlens_q": q_offsets,
        "cu_seqlens_k": call.k_offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": int(call.k_lengths.max()),
    }


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    options, shape = _options(call, q.shape[0]), q.shape
    if call.form == "broadcast":
        shape = (call.k_lengths.shape[0], *q.shape)
        q = q.expand(shape).flatten(0, 1)
    out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **options)
    kept.put(out, (q, lse))
    return out.view(shape), lse.T.view(shape[:-1])


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see `gem.attention.backends`."""
    rows, lse = kept.take(out)
    dq, dk, dv = _interface()._flash_attn_bwd(
        rows,
        k,
        v,
        out.reshape(rows.shape),
        dout.reshape(rows.shape),
        lse,
        dlse=None if dlse is None else dlse.reshape(rows.shape[:-1]).T.contiguous(),
        **_options(call, q.shape[0]),
    )
    return dq if call.form == "jagged" else dq.view(-1, *q.shape).sum(0), dk, dv

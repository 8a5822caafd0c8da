"""The loop reference as a backend: slow, and right. For debugging; `auto` never takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from gem.attention.backends import Call
from gem.attention.reference import broadcast_attention_reference, jagged_attention_reference


def unsupported(call: Call) -> str | None:
    """None: it serves every call."""
    return None


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if call.form == "broadcast":
        return broadcast_attention_reference(q, k, v, call.k_offsets, scale=call.scale)
    return jagged_attention_reference(
        q,
        k,
        v,
        call.q_offsets,
        call.k_offsets,
        scale=call.scale,
        left=call.left,
        right=call.right,
    )


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    out, lse = _run(call, *(x.to(_work_dtype(call.dtype)) for x in (q, k, v)))
    return out.to(call.dtype), lse.contiguous()


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
    with torch.enable_grad():
        inputs = [x.detach().to(_work_dtype(call.dtype)).requires_grad_() for x in (q, k, v)]
        out, lse = _run(call, *inputs)
        outputs, grads = [out], [dout.to(out.dtype)]
        if dlse is not None:
            outputs.append(lse)
            grads.append(dlse.to(lse.dtype))
        grads = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if g is None else g.to(x.dtype).contiguous()
        for x, g in zip((q, k, v), grads, strict=True)
    )

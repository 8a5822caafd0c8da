"""The loop reference as a backend: slow, and right. For debugging; `auto` never takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from gem.attention.backends import Call
from gem.attention.reference import (
    broadcast_attention_reference,
    jagged_attention_reference,
    visible,
)


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
    """dq, dk and dv; see `gem.attention.backends`.

    Written out, since autograd is off inside a custom op: with probabilities P and scores S,
    dV = P^T dO, dS = P (dO V^T - sum(dO O) + dlse), dQ = scale dS K, dK = scale dS^T Q.
    """
    work = _work_dtype(call.dtype)
    grads = [torch.zeros_like(x, dtype=work) for x in (q, k, v)]
    q, k, v, out, dout, lse = (x.to(work) for x in (q, k, v, out, dout, lse))
    group = call.heads // call.kv_heads
    k_bounds = call.k_offsets.tolist()
    q_bounds = None if call.form == "broadcast" else call.q_offsets.tolist()
    for i in range(len(k_bounds) - 1):
        keys = slice(*k_bounds[i : i + 2])
        rows = slice(None) if q_bounds is None else slice(*q_bounds[i : i + 2])
        place = i if q_bounds is None else rows
        for h in range(call.heads):
            q_h, k_h, v_h = q[rows, h], k[keys, h // group], v[keys, h // group]
            seen = visible(q_h.shape[0], k_h.shape[0], call.left, call.right, q.device)
            p = (q_h @ k_h.T * call.scale - lse[place][:, h, None]).exp().masked_fill(~seen, 0.0)
            do_h = dout[place][:, h]
            ds = do_h @ v_h.T - (do_h * out[place][:, h]).sum(-1, keepdim=True)
            if dlse is not None:
                ds = ds + dlse[place][:, h, None]
            ds = (ds * p).masked_fill(~seen, 0.0)
            grads[0][rows, h] += ds @ k_h * call.scale
            grads[1][keys, h // group] += ds.T @ q_h * call.scale
            grads[2][keys, h // group] += p.T @ do_h
    return tuple(grad.to(call.dtype) for grad in grads)

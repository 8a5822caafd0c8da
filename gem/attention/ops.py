"""The custom ops `gem::attention` and `gem::attention_backward`: dispatch and autograd.

Everything that a compiled graph sees of attention is these two ops. Layouts come in as tensors, and
the backend is chosen inside, so that new lengths do not compile anew.

They are defined by `torch.library.Library`. `torch.library.custom_op` would do the same for 0.07 ms
more of the host's time per call and its gradient, of which a training step has dozens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem.attention import backends

_LAYOUTS = "Tensor? q_offsets, Tensor? q_lengths, Tensor k_offsets, Tensor k_lengths"
_OPTIONS = "float scale, int? left, int? right, str backend, bool deterministic"
_library = torch.library.Library("gem", "DEF")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_LAYOUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_LAYOUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _call(
    direction: str,
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor | None,
    left: int | None,
    right: int | None,
    **rest,
) -> backends.Call:
    # A side that no sample reaches is none. Kernels add sides to positions in 32 bits.
    if left is not None and left >= _longest(rest["k_lengths"]):
        left = None
    if right is not None and right >= _longest(rest["q_lengths"]):
        right = None
    return backends.Call(
        form="broadcast" if q_offsets is None else "jagged",
        direction=direction,
        device=q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        q_offsets=q_offsets,
        left=left,
        right=right,
        **rest,
    )


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    q_lengths: Tensor | None,
    k_offsets: Tensor,
    k_lengths: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """out and lse of checked arguments; broadcast attention if `q_offsets` is None."""
    call = _call(
        "forward",
        q,
        k,
        q_offsets,
        q_lengths=q_lengths,
        k_offsets=k_offsets,
        k_lengths=k_lengths,
        scale=scale,
        left=left,
        right=right,
        deterministic=deterministic,
    )
    # The kernel chose its precision; autocast would round the float32 sums inside it.
    with torch.autocast(q.device.type, enabled=False):
        return backends.select(backend, call).forward(call, q, k, v)


def _fake_attention(q, k, v, q_offsets, q_lengths, k_offsets, k_lengths, *options):
    batch = () if q_offsets is not None else (k_lengths.shape[0],)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*batch, *q.shape), q.new_empty(*batch, *q.shape[:2], dtype=dtype)


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    q_lengths: Tensor | None,
    k_offsets: Tensor,
    k_lengths: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, each of its input's shape and dtype."""
    call = _call(
        "backward",
        q,
        k,
        q_offsets,
        q_lengths=q_lengths,
        k_offsets=k_offsets,
        k_lengths=k_lengths,
        scale=scale,
        left=left,
        right=right,
        deterministic=deterministic,
    )
    with torch.autocast(q.device.type, enabled=False):
        grads = backends.select(backend, call).backward(call, dout, dlse, q, k, v, out, lse)
    for name, grad, x in zip(("dq", "dk", "dv"), grads, (q, k, v), strict=True):
        # Autograd would silently sum a dq of shape [batch, ...] over the batch.
        assert grad.shape == x.shape, f"{name} has shape {grad.shape}, not {x.shape}"
    return grads


def _fake_attention_backward(dout, dlse, q, k, v, *rest):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    """The derivative of `gem::attention`; a second one is refused."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """keys: of dispatch, below autograd."""
        out, lse = attention.redispatch(keys, *inputs)
        ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:7])
        ctx.options = inputs[7:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        q, k, v, out, *rest = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = attention_backward(dout, dlse, q, k, v, out, *rest, *ctx.options)
        return None, *grads, *[None] * (4 + len(ctx.options))


def _differentiable(keys: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    keys = keys & torch._C._after_autograd_keyset  # as torch.library itself goes below autograd
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:3]):
        return _Attention.apply(keys, *inputs)
    return attention.redispatch(keys, *inputs)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", _differentiable, "Autograd", with_keyset=True)
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("gem::attention", _fake_attention, lib=_library)
torch.library.register_fake("gem::attention_backward", _fake_attention_backward, lib=_library)

attention = torch.ops.gem.attention.default
attention_backward = torch.ops.gem.attention_backward.default

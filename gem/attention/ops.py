"""The custom ops `gem::attention` and `gem::attention_backward`: dispatch and autograd.

Everything that a compiled graph sees of attention is these two ops. Layouts come in as tensors, and
the backend is chosen inside, so that new lengths do not compile anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem.attention import backends


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


@torch.library.custom_op(
    "gem::attention",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor? q_lengths, Tensor k_offsets, "
        "Tensor k_lengths, float scale, int? left, int? right, str backend, bool deterministic) "
        "-> (Tensor, Tensor)"
    ),
)
def attention(
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


@attention.register_fake
def _(q, k, v, q_offsets, q_lengths, k_offsets, k_lengths, *options):
    batch = () if q_offsets is not None else (k_lengths.shape[0],)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*batch, *q.shape), q.new_empty(*batch, *q.shape[:2], dtype=dtype)


@torch.library.custom_op(
    "gem::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? q_offsets, Tensor? q_lengths, Tensor k_offsets, Tensor k_lengths, float scale, "
        "int? left, int? right, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
    ),
)
def attention_backward(
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


@attention_backward.register_fake
def _(dout, dlse, q, k, v, *rest):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, q_lengths, k_offsets, k_lengths, *options = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, q_lengths, k_offsets, k_lengths)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, out, lse, *layouts = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = attention_backward(dout, dlse, q, k, v, out, lse, *layouts, *ctx.options)
    return *grads, *[None] * (len(layouts) + len(ctx.options))


attention.register_autograd(_backward, setup_context=_setup_context)

"""The attention functions: they check their arguments and call the custom ops. No arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem.attention import backends, ops
from gem.attention.layout import JaggedLayout

MAX_HEAD_DIM = 256
_INT32_MAX = 2**31 - 1
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: JaggedLayout,
    k_layout: JaggedLayout,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within each sample of a packed batch.

    The queries of sample i see the keys of sample i. Where their numbers differ, the last query
    is aligned with the last key. A query that sees nothing gives 0 (log-sum-exp -inf, gradients
    0). Rows past the last offset are never read; their output and gradients are 0.

    Args:
        q: `[rows_q, heads, dim]`, float16, bfloat16, float32 or float64, dim at most 256.
        k, v: `[rows_k, kv_heads, dim]`, of q's dtype and device; heads is a multiple of kv_heads
            and query head h reads key head `h // (heads // kv_heads)`.
        q_layout, k_layout: where the samples' rows lie; the same object for self-attention.
        scale: factor of the scores (default `dim ** -0.5`).
        causal: a query sees no key to its right; the same as a window with right = 0.
        window: `(left, right)`: a query sees keys from `left` before it to `right` after it,
            inclusive, each an int of at least 0 or None (unbounded).
        return_lse: also return the log-sum-exp of the scaled scores.
        backend: "auto" for the fastest that supports the call, or a name.
        deterministic: the same bits on every run.

    Returns:
        out `[rows_q, heads, dim]`; with `return_lse` also the natural log-sum-exp
        `[rows_q, heads]`, float32 (float64 for float64), differentiable too.

    Raises:
        TypeError: if the dtypes of q, k and v differ.
        ValueError: if a shape, dtype, device, layout or option does not fit, or if the backend
            named by hand cannot serve the call.
    """
    _check_tensors(q, k, v)
    _check_layout(q_layout, "q_layout", q, "q")
    _check_layout(k_layout, "k_layout", k, "k and v")
    if q_layout.batch_size != k_layout.batch_size:
        raise ValueError(
            f"q_layout has {q_layout.batch_size} samples, but k_layout has {k_layout.batch_size}"
        )
    left, right = window_sides(causal, window)
    out, lse = ops.attention(
        q,
        k,
        v,
        q_layout.offsets,
        q_layout.lengths,
        k_layout.offsets,
        k_layout.lengths,
        _check_scale(scale, q),
        left,
        right,
        check_backend(backend),
        bool(deterministic),
    )
    return (out, lse) if return_lse else out


def broadcast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_layout: JaggedLayout,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of one set of queries over the keys of every sample.

    The pooling by multi-head attention of Set Transformer (arXiv 1810.00825, section 3.2): q is
    shared by the batch and never copied per sample, and its gradient is summed over the batch in
    float32. An empty sample gives 0 (log-sum-exp -inf) and has no part in the gradients.

    Args:
        q: `[queries, heads, dim]`.
        k, v: `[rows_k, kv_heads, dim]`, of q's dtype and device; heads is a multiple of kv_heads.
        k_layout: where the samples' keys lie.
        scale, return_lse, backend, deterministic: as in `jagged_attention`.

    Returns:
        out `[batch, queries, heads, dim]`; with `return_lse` also the natural log-sum-exp
        `[batch, queries, heads]`, float32 (float64 for float64).

    Raises:
        TypeError, ValueError: as `jagged_attention`.
    """
    _check_tensors(q, k, v)
    _check_layout(k_layout, "k_layout", k, "k and v")
    out, lse = ops.attention(
        q,
        k,
        v,
        None,
        None,
        k_layout.offsets,
        k_layout.lengths,
        _check_scale(scale, q),
        None,
        None,
        check_backend(backend),
        bool(deterministic),
    )
    return (out, lse) if return_lse else out


def window_sides(
    causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    """(left, right) of the options `causal` and `window`; None is unbounded.

    Raises:
        ValueError: if `window` is not a pair of ints of at least 0 or None, or contradicts
            `causal`.
    """
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be None or a pair (left, right), but got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise ValueError(
                f"window must hold ints of at least 0 or None (unbounded), but got {window!r}"
            )
    # More than a layout has rows is unbounded, and need not fit into an integer's 64 bits.
    left, right = (side if side is None else min(side, _INT32_MAX) for side in window)
    if causal and right not in (None, 0):
        raise ValueError(f"causal attention has a right window of 0, but window is {window!r}")
    return left, 0 if causal else right


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, but got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise ValueError(f"{name} must be a dense tensor [rows, heads, dim]")
        if x.dim() != 3:
            raise ValueError(f"{name} must have shape [rows, heads, dim], but has {list(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, but have {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.dtype not in _DTYPES:
        raise ValueError(
            f"q, k and v must be float16, bfloat16, float32 or float64, but are {q.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, but are on {q.device}, {k.device} and {v.device}"
        )
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"k and v must have the same rows and heads, but have shapes {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(
            f"q, k and v must have one head dim, but have {q.shape[2]}, {k.shape[2]} and "
            f"{v.shape[2]}"
        )
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim must be 1 to {MAX_HEAD_DIM}, but is {q.shape[2]}")
    if q.shape[1] < 1 or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v, but are {q.shape[1]} and "
            f"{k.shape[1]}"
        )


def _check_layout(layout: JaggedLayout, name: str, x: Tensor, rows_of: str) -> None:
    if not isinstance(layout, JaggedLayout):
        raise ValueError(f"{name} must be a JaggedLayout, but got {type(layout).__name__}")
    if layout.rows != x.shape[0]:
        raise ValueError(f"{name} describes {layout.rows} rows, but {rows_of} have {x.shape[0]}")
    if layout.device != x.device:
        raise ValueError(f"{name} is on {layout.device}, but {rows_of} are on {x.device}")


def _check_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[2] ** -0.5
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not math.isfinite(scale):
        raise ValueError(f"scale must be None or a finite number, but got {scale!r}")
    return float(scale)


def check_backend(backend: str) -> str:
    if backend not in backends.names():
        raise ValueError(f"backend must be one of {backends.names()}, but got {backend!r}")
    return backend

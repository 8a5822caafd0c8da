"""Attention in plain loops over the offsets: the truth that every backend is held against."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    queries: int, keys: int, left: int | None, right: int | None, device: torch.device | str
) -> Tensor:
    """Which keys each query of one sample sees: bool `[queries, keys]`.

    The last query is aligned with the last key. Query i stands at key i + keys - queries and sees
    from `left` keys before that to `right` keys after it, inclusive; None is unbounded.
    """
    i = torch.arange(queries, device=device)[:, None] + (keys - queries)
    j = torch.arange(keys, device=device)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of one sample: q `[queries, heads, dim]`, k and v `[keys, kv_heads, dim]`.

    Returns:
        out like q, and the natural log-sum-exp `[queries, heads]`. A query that sees nothing has
        out 0, log-sum-exp -inf and no gradient.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = visible(q.shape[0], k.shape[0], left, right, q.device)
    blind = ~seen.any(dim=1)
    # Blind rows get a finite stand-in first: the gradient of an all -inf softmax is NaN.
    masked = scores.masked_fill(~seen, -torch.inf).masked_fill(blind[:, None], 0.0)
    lse = masked.logsumexp(dim=-1) if k.shape[0] else masked.sum(dim=-1)
    weights = (masked - lse[..., None]).exp().masked_fill(blind[:, None], 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out, lse.masked_fill(blind, -torch.inf).transpose(0, 1)


def jagged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    scale: float | None = None,
    left: int | None = None,
    right: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`gem.attention.jagged_attention` as a loop over samples, in the dtype of its arguments.

    Differentiable by autograd. Rows past the last offset are not read and give 0 (log-sum-exp
    -inf).

    Args:
        q: `[rows_q, heads, dim]`.
        k, v: `[rows_k, kv_heads, dim]`.
        q_offsets, k_offsets: integers `[batch + 1]`.
        scale: default `dim ** -0.5`.
        left, right: the window; None is unbounded, causal is right = 0.

    Returns:
        out `[rows_q, heads, dim]`, lse `[rows_q, heads]`, natural.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_bounds, k_bounds = q_offsets.tolist(), k_offsets.tolist()
    outs, lses = [], []
    # An empty sample first, so that the result depends on the inputs even in an empty batch.
    for rows, keys in zip(
        [slice(0), *_slices(q_bounds)], [slice(0), *_slices(k_bounds)], strict=True
    ):
        out, lse = attend(q[rows], k[keys], v[keys], scale, left, right)
        outs.append(out)
        lses.append(lse)
    spare = q.shape[0] - q_bounds[-1]
    outs.append(q.new_zeros(spare, *q.shape[1:]))
    lses.append(q.new_full((spare, q.shape[1]), -torch.inf))
    return torch.cat(outs), torch.cat(lses)


def broadcast_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`gem.attention.broadcast_attention` as a loop over samples, in the dtype of its arguments.

    Args:
        q: `[queries, heads, dim]`, one set for the whole batch.
        k, v: `[rows_k, kv_heads, dim]`.
        k_offsets: integers `[batch + 1]`.
        scale: default `dim ** -0.5`.

    Returns:
        out `[batch, queries, heads, dim]`, lse `[batch, queries, heads]`, natural.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, lses = [], []
    for keys in [slice(0), *_slices(k_offsets.tolist())]:
        out, lse = attend(q, k[keys], v[keys], scale, None, None)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs)[1:], torch.stack(lses)[1:]


def _slices(bounds: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]

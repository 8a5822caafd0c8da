"""Rotary embedding of positions or times (RoFormer, arXiv 2104.09864, equation 34)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_angles(
    positions_or_times: Tensor, head_dim: int, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles by which each row's pairs of features turn.

    Pair i of `head_dim // 2` turns by `position * base ** (-2 i / head_dim)`. Two rows' score then
    depends on the difference of their positions, or of whatever is given in their place: seconds,
    the logarithm of an age, ...

    Args:
        positions_or_times: `[rows]`, integer or float.
        head_dim: even.
        base: the slowest pair turns about `base` times slower than the fastest.

    Returns:
        cos, sin: each `[rows, head_dim // 2]`, float32 (float64 for float64 positions).

    Raises:
        ValueError: if a shape or an argument's value does not fit.
    """
    if positions_or_times.dim() != 1:
        raise ValueError(
            f"positions must have shape [rows], but have {list(positions_or_times.shape)}"
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, but is {head_dim}")
    if not base > 0:
        raise ValueError(f"base must be positive, but is {base}")
    dtype = torch.float64 if positions_or_times.dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, device=positions_or_times.device, dtype=dtype)
    frequencies = base ** (-pairs / head_dim)
    angles = positions_or_times.to(dtype)[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns feature i of each head and feature i + dim / 2 by the row's angle i.

    Args:
        x: `[rows, heads, dim]`, dim even.
        cos, sin: each `[rows, dim // 2]`; no gradient flows to them.

    Returns:
        `[rows, heads, dim]` in x's dtype; computed in float32 at least.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"x must have shape [rows, heads, even dim], but has {list(x.shape)}")
    wanted = (x.shape[0], x.shape[2] // 2)
    for name, y in (("cos", cos), ("sin", sin)):
        if y.shape != wanted:
            raise ValueError(f"{name} must have shape {list(wanted)}, but has {list(y.shape)}")
    return _Rotary.apply(x, cos, sin)


class _Rotary(torch.autograd.Function):
    """The gradient is the opposite turn, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[2] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.empty(x.shape, dtype=torch.result_type(x, cos), device=x.device)
    torch.mul(a, cos, out=turned[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned[..., half:]).addcmul_(a, sin)
    return turned.to(x.dtype)

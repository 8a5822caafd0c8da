"""Rotary embedding of positions or times (RoFormer, arXiv 2104.09864, equation 34)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_angles(
    positions_or_times: Tensor, head_dim: int, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles by which each row's pairs of features turn.

    Pair i of `head_dim // 2` turns by `position * base ** (-2 i / head_dim)`. The score of two
    rows then depends on the difference of their positions, or of whatever is given in their place:
    seconds, the logarithm of an age, ...

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
    """Turns the pair of features 2i and 2i + 1 of each head by the row's angle i.

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
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    pairs = x.to(dtype).contiguous().unflatten(-1, (-1, 2))
    # Eager a complex product is one pass, on a CPU three times faster; compilers fuse real ones.
    if not torch.compiler.is_compiling():
        if pairs.storage_offset() % 2:
            pairs = pairs.clone()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    else:
        a, b = pairs.unbind(-1)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)

"""The rule by which a backend is right, for tests and benchmarks.

For the output and for each gradient on its own, the error against the float64 reference is at most
twice that of a yardstick on the same input, by maximum and by root mean square, plus one unit in
the last place. The yardstick makes the roundings that a flash kernel in that dtype makes: operands
in the dtype; scores, softmax and sums in float32; probabilities and score gradients rounded to the
dtype before their products. (Eager attention in bfloat16 rounds the scores as well, which can be
off by far more, so it is no yardstick.) In float32 and float64 the yardstick rounds no more than
the result does, and the unit is a few units in the last place instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gem.attention.functional import broadcast_attention, jagged_attention, window_sides
from gem.attention.layout import JaggedLayout
from gem.attention.reference import (
    broadcast_attention_reference,
    jagged_attention_reference,
    visible,
)

# Where results are as exact as the yardstick, chance decides which of the two is nearer.
UNITS = {
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.float64: 1e-12,
}
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one attention call and the gradient of its output.

    Attributes:
        q: `[rows_q, heads, dim]`, or `[queries, heads, dim]` for broadcast attention.
        k, v: `[rows_k, kv_heads, dim]`.
        dout: of the output's shape.
        k_layout: where the keys lie.
        q_layout: where the queries lie; None for broadcast attention.
        scale, causal, window: as in `jagged_attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    k_layout: JaggedLayout
    q_layout: JaggedLayout | None = None
    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right) of the window; None is unbounded."""
        return window_sides(self.causal, self.window)

    @property
    def factor(self) -> float:
        """The scale of the scores, its default filled in."""
        return self.q.shape[2] ** -0.5 if self.scale is None else self.scale


def random_problem(
    q_lengths: Sequence[int] | int,
    k_lengths: Sequence[int] | None = None,
    *,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    spare: int = 0,
    std: float = 1.0,
    generator: torch.Generator | None = None,
    **options,
) -> Problem:
    """A problem with normally distributed inputs, fresh at every call.

    Args:
        q_lengths: queries per sample; an int for broadcast attention with that many queries.
        k_lengths: keys per sample (default: self-attention, with one layout).
        heads, kv_heads, dim: kv_heads defaults to heads.
        dtype, device: of q, k, v and dout.
        spare: rows past the last offset, filled with NaN.
        std: standard deviation of q, k and v.
        generator: of the numbers, on the CPU (default: seeded anew by the system).
        **options: scale, causal and window of the problem.
    """
    if generator is None:
        generator = torch.Generator()
        generator.seed()

    def make(rows: int, empty: int, *shape: int) -> Tensor:
        x = torch.randn(rows, *shape, dim, generator=generator, dtype=torch.float64)
        x = torch.cat([x, torch.full((empty, *shape, dim), torch.nan, dtype=x.dtype)])
        return x.to(device, dtype)

    broadcast = isinstance(q_lengths, int)
    k_lengths = q_lengths if k_lengths is None else k_lengths
    kv_heads = heads if kv_heads is None else kv_heads
    k_rows = sum(k_lengths)
    k_layout = JaggedLayout.from_lengths(k_lengths, device, rows=k_rows + spare)
    if broadcast:
        q_layout, q = None, make(q_lengths, 0, heads)
        dout = make(len(k_lengths) * q_lengths, 0, heads).view(len(k_lengths), *q.shape)
    else:
        rows = sum(q_lengths)
        q_layout = (
            k_layout
            if q_lengths is k_lengths
            else JaggedLayout.from_lengths(q_lengths, device, rows=rows + spare)
        )
        q, dout = make(rows, spare, heads), make(rows, spare, heads)
    k, v = make(k_rows, spare, kv_heads), make(k_rows, spare, kv_heads)
    return Problem(std * q, std * k, std * v, dout, k_layout, q_layout, **options)


def attend(problem: Problem, backend: str = "auto", deterministic: bool = False) -> dict:
    """out, lse, dq, dk and dv of the public functions, by name."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    options = {
        "scale": problem.scale,
        "return_lse": True,
        "backend": backend,
        "deterministic": deterministic,
    }
    if problem.q_layout is None:
        out, lse = broadcast_attention(q, k, v, problem.k_layout, **options)
    else:
        out, lse = jagged_attention(
            q,
            k,
            v,
            problem.q_layout,
            problem.k_layout,
            causal=problem.causal,
            window=problem.window,
            **options,
        )
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def reference(problem: Problem) -> dict:
    """The same by the loop reference in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    k_offsets = problem.k_layout.offsets
    if problem.q_layout is None:
        out, lse = broadcast_attention_reference(q, k, v, k_offsets, scale=problem.factor)
    else:
        left, right = problem.sides
        out, lse = jagged_attention_reference(
            q,
            k,
            v,
            problem.q_layout.offsets,
            k_offsets,
            scale=problem.factor,
            left=left,
            right=right,
        )
    grads = torch.autograd.grad(out, (q, k, v), problem.dout.double())
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def yardstick(problem: Problem) -> dict:
    """The same with a flash kernel's roundings, sample by sample."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    broadcast = problem.q_layout is None
    group = q.shape[1] // k.shape[1]
    left, right = problem.sides
    k_bounds = problem.k_layout.offsets.tolist()
    q_bounds = None if broadcast else problem.q_layout.offsets.tolist()
    result = {
        "out": torch.zeros_like(dout),
        "lse": torch.full(dout.shape[:-1], -torch.inf, dtype=work, device=q.device),
        "dq": torch.zeros_like(q, dtype=work),
        "dk": torch.zeros_like(k, dtype=work),
        "dv": torch.zeros_like(v, dtype=work),
    }

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(work)

    for i in range(problem.k_layout.batch_size):
        keys = slice(*k_bounds[i : i + 2])
        rows = slice(None) if broadcast else slice(*q_bounds[i : i + 2])
        place = i if broadcast else rows
        if keys.start == keys.stop:
            continue
        # [heads, rows, dim]
        q_i, do_i = q[rows].to(work).transpose(0, 1), dout[place].to(work).transpose(0, 1)
        k_i, v_i = (
            x[keys].to(work).transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v)
        )
        seen = visible(q_i.shape[1], k_i.shape[1], left, right, q.device)
        s = (q_i @ k_i.mT * problem.factor).masked_fill_(~seen, -torch.inf)
        top = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        out = rounded((rounded(p) @ v_i / total).masked_fill_(total == 0, 0.0))
        lse = top + total.log()
        p = (s - lse).exp().masked_fill_(lse == -torch.inf, 0.0)
        delta = (do_i * out).sum(-1, keepdim=True)
        ds, p = rounded(p * (do_i @ v_i.mT - delta)), rounded(p)
        shape = (k.shape[1], group, k_i.shape[1], k.shape[2])
        result["out"][place] = out.transpose(0, 1).to(q.dtype)
        result["lse"][place] = lse[..., 0].transpose(0, 1)
        result["dq"][rows] += (ds @ k_i * problem.factor).transpose(0, 1)
        dk = (ds.mT @ q_i * problem.factor).view(shape).sum(1)
        result["dk"][keys] = dk.transpose(0, 1)
        result["dv"][keys] = (p.mT @ do_i).view(shape).sum(1).transpose(0, 1)
    for name in ("dq", "dk", "dv"):
        result[name] = result[name].to(q.dtype)
    return result


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor's error beside the yardstick's, both relative to the reference's size.

    Attributes:
        errors, yardstick: (by maximum, by root mean square).
        unit: what is allowed beyond, relative (`UNITS`).
    """

    errors: tuple[float, float]
    yardstick: tuple[float, float]
    unit: float

    @property
    def ratio(self) -> float:
        """The worse of the two errors over its yardstick with the unit: at most 1 is right."""
        allowed = (2 * y + self.unit for y in self.yardstick)
        ratios = [e / a if e else 0.0 for e, a in zip(self.errors, allowed, strict=True)]
        return max(math.inf if math.isnan(r) else r for r in ratios)


def compare(results: dict, problem: Problem) -> dict[str, Comparison]:
    """Each tensor of `results` (see `attend`) beside the reference and the yardstick.

    Where the reference is infinite (the log-sum-exp of a query that sees nothing) the result must
    be the same infinity; other entries that are not finite count as an infinite error.
    """
    exact, rough = reference(problem), yardstick(problem)
    dtype = problem.q.dtype
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    compared = {}
    for name, result in results.items():
        if result.shape != exact[name].shape:
            raise AssertionError(
                f"{name} has shape {list(result.shape)}, not {list(exact[name].shape)}"
            )
        errors = _errors(result, exact[name])
        unit = UNITS[lse_dtype if name == "lse" else dtype]
        compared[name] = Comparison(errors, _errors(rough[name], exact[name]), unit)
    return compared


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Error by maximum and by root mean square, relative to the same of the exact tensor."""
    if exact.numel() == 0:
        return 0.0, 0.0
    result = result.double()
    same = result == exact  # infinities too
    error = torch.where(same, 0.0, result - exact)
    error = torch.where(error.isfinite(), error.abs(), torch.inf)
    size = torch.where(exact.isfinite(), exact, 0.0).abs()
    largest = float(size.max()) or 1.0
    mean = float(size.square().mean().sqrt()) or 1.0
    return float(error.max()) / largest, float(error.square().mean().sqrt()) / mean


def assert_close_to_reference(results: dict, problem: Problem) -> dict[str, Comparison]:
    """Raises AssertionError for each tensor of `results` that breaks the rule of this module."""
    compared = compare(results, problem)
    wrong = [
        f"{name}: error {c.errors[0]:.2e} by maximum and {c.errors[1]:.2e} by root mean square, "
        f"yardstick {c.yardstick[0]:.2e} and {c.yardstick[1]:.2e}"
        for name, c in compared.items()
        if not c.ratio <= 1
    ]
    if wrong:
        raise AssertionError("further from the reference than allowed\n" + "\n".join(wrong))
    return compared

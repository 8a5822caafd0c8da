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

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gem.attention.backends import Call
from gem.attention.functional import broadcast_attention, jagged_attention, window_sides
from gem.attention.layout import JaggedLayout
from gem.attention.reference import (
    broadcast_attention_reference,
    jagged_attention_reference,
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


def call_of(problem: Problem) -> Call:
    """The forward call that a backend gets to see."""
    q_layout, k_layout = problem.q_layout, problem.k_layout
    left, right = problem.sides
    return Call(
        form="broadcast" if q_layout is None else "jagged",
        direction="forward",
        device=problem.q.device,
        dtype=problem.q.dtype,
        heads=problem.q.shape[1],
        kv_heads=problem.k.shape[1],
        head_dim=problem.q.shape[2],
        scale=problem.factor,
        left=left,
        right=right,
        q_offsets=q_layout and q_layout.offsets,
        q_lengths=q_layout and q_layout.lengths,
        k_offsets=k_layout.offsets,
        k_lengths=k_layout.lengths,
    )


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


def reference(problem: Problem, gradients: bool = True) -> dict:
    """The same in float64: by the loop reference, or chunk by chunk where the scores are many.

    Without `gradients`, out and lse alone where that saves work.
    """
    if _scores(problem) > LOOP_LIMIT:
        return reference_in_chunks(problem, gradients=gradients)
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


def reference_in_chunks(problem: Problem, limit: int | None = None, gradients: bool = True) -> dict:
    """`reference` for big problems: samples of like length together, `limit` scores at a time.

    Nothing is copied to the host, and memory beyond the results is bounded by a few times
    `limit` numbers (or by those of one sample, where that is more).
    """
    result = _Results(problem, torch.float64, gradients)
    for chunk in _chunks(problem, torch.float64, limit):
        q, k, v = (x.detach().requires_grad_(gradients) for x in (chunk.q, chunk.k, chunk.v))
        k_all, v_all = (x.repeat_interleave(chunk.group, dim=1) for x in (k, v))
        # In float64 the place of the scale does not matter; the scores are the big tensor.
        scores = (q * problem.factor @ k_all.mT).masked_fill(~chunk.seen, -torch.inf)
        blind = ~chunk.seen.any(-1, keepdim=True)
        with torch.no_grad():
            lse = scores.logsumexp(-1)
        # Blind rows get a finite stand-in: the gradient of an all -inf softmax is NaN.
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        out = weights @ v_all
        grads = torch.autograd.grad(out, (q, k, v), chunk.dout) if gradients else ()
        result.put(chunk, out.detach(), lse, *grads)
    return result.tensors()


def yardstick(problem: Problem, limit: int | None = None, gradients: bool = True) -> dict:
    """The same with a flash kernel's roundings, chunk by chunk as `reference_in_chunks`."""
    dtype = problem.q.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    result = _Results(problem, work, gradients)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(work)

    with _true_float32():
        for chunk in _chunks(problem, work, limit):
            q, do = chunk.q, chunk.dout
            k, v = (x.repeat_interleave(chunk.group, dim=1) for x in (chunk.k, chunk.v))
            s = (q @ k.mT).mul_(problem.factor).masked_fill_(~chunk.seen, -torch.inf)
            top = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
            p = (s - top).exp_()
            total = p.sum(-1, keepdim=True)
            out = rounded((rounded(p) @ v / total).masked_fill_(total == 0, 0.0))
            lse = top + total.log()
            if not gradients:
                result.put(chunk, out, lse[..., 0])
                continue
            p = s.sub_(lse).exp_().masked_fill_(lse == -torch.inf, 0.0)
            delta = (do * out).sum(-1, keepdim=True)
            ds = rounded((do @ v.mT).sub_(delta).mul_(p))
            dq = ds @ k * problem.factor
            shape = (k.shape[0], -1, chunk.group, *k.shape[2:])
            dk = (ds.mT @ q * problem.factor).view(shape).sum(2)
            dv = (rounded(p).mT @ do).view(shape).sum(2)
            result.put(chunk, out, lse[..., 0], dq, dk, dv)
    results = result.tensors()
    return {n: x if n == "lse" else x.to(dtype) for n, x in results.items()}


# Problems with more scores than this leave the plain loops.
LOOP_LIMIT = 2**24
# Errors are taken of so many numbers at a time.
ERROR_PART = 2**26


def _scores(problem: Problem) -> int:
    q_lengths = problem.q.shape[0] if problem.q_layout is None else problem.q_layout.lengths
    return int((problem.k_layout.lengths * q_lengths).sum()) * problem.q.shape[1]


@contextlib.contextmanager
def _true_float32() -> Iterator[None]:
    """Float32 products on a GPU without the TF32 rounding that a user may have allowed."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Some samples of a problem, padded with zeros to a common length.

    q and dout are `[n, heads, queries, dim]`, k and v `[n, kv_heads, keys, dim]`, seen
    `[n, 1, queries, keys]`; padded keys are not seen, padded queries see every key and have a
    dout of 0. `places` says where each row of q (or of dout) and of k lies in the packed tensors,
    the row past their end for padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    seen: Tensor
    group: int
    places: tuple[Tensor, Tensor]


def _chunks(problem: Problem, dtype: torch.dtype, limit: int | None) -> Iterator[_Chunk]:
    """The samples that have queries and keys, sorted by length; a chunk holds `limit` scores."""
    q, k, device = problem.q, problem.k, problem.q.device
    heads, broadcast = q.shape[1], problem.q_layout is None
    if limit is None:
        limit = 2**26 if device.type == "cuda" else 2**20
    k_lengths, k_offsets = problem.k_layout.lengths, problem.k_layout.offsets
    if broadcast:
        q_lengths = torch.full_like(k_lengths, q.shape[0])
        q_offsets = torch.arange(len(k_lengths) + 1, device=device) * q.shape[0]
    else:
        q_lengths, q_offsets = problem.q_layout.lengths, problem.q_layout.offsets
    dout = problem.dout.flatten(0, 1) if broadcast else problem.dout
    order = (k_lengths * 2**31 + q_lengths).argsort()
    order = order[(q_lengths * k_lengths)[order] > 0]
    q_sizes, k_sizes = q_lengths[order].tolist(), k_lengths[order].tolist()
    on_device = order.to(device)
    begin = 0
    while begin < len(order):
        end, queries = begin, 0
        while end < len(order):
            longest = max(queries, q_sizes[end])
            if end > begin and (end + 1 - begin) * heads * longest * k_sizes[end] > limit:
                break
            queries, end = longest, end + 1
        samples, keys = on_device[begin:end], k_sizes[end - 1]
        q_place, q_valid, q_length = _places(q_offsets, samples, queries, dout.shape[0])
        k_place, k_valid, k_length = _places(k_offsets, samples, keys, k.shape[0])
        seen = _seen(q_length, k_length, q_valid, k_valid, problem.sides)
        yield _Chunk(
            q.to(dtype).transpose(0, 1).expand(end - begin, -1, -1, -1)
            if broadcast
            else _padded(q, q_place, q_valid, dtype),
            _padded(k, k_place, k_valid, dtype),
            _padded(problem.v, k_place, k_valid, dtype),
            _padded(dout, q_place, q_valid, dtype),
            seen,
            heads // k.shape[1],
            (q_place, k_place),
        )
        begin = end


def _places(
    offsets: Tensor, samples: Tensor, length: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each padded position `[n, length]` (`rows` for padding), which are real, lengths."""
    first = offsets[samples].long()[:, None]
    lengths = offsets[samples + 1].long()[:, None] - first
    position = torch.arange(length, device=offsets.device)
    valid = position < lengths
    return torch.where(valid, first + position, rows), valid, lengths


def _padded(x: Tensor, place: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    rows = x[place.clamp(max=x.shape[0] - 1)].to(dtype)
    return torch.where(valid[..., None, None], rows, 0.0).transpose(1, 2)


def _seen(
    q_length: Tensor,
    k_length: Tensor,
    q_valid: Tensor,
    k_valid: Tensor,
    sides: tuple[int | None, int | None],
) -> Tensor:
    left, right = sides
    seen = k_valid[:, None, :]
    if left is None and right is None:
        return seen[:, None]
    i = torch.arange(q_valid.shape[1], device=q_valid.device) + (k_length - q_length)
    i, j = i[:, :, None], torch.arange(k_valid.shape[1], device=q_valid.device)
    if left is not None:
        seen = seen & (j >= i - left)
    if right is not None:
        seen = seen & (j <= i + right)
    return (seen | (~q_valid[:, :, None] & k_valid[:, None, :]))[:, None]


class _Results:
    """The packed results of a problem, filled chunk by chunk."""

    def __init__(self, problem: Problem, dtype: torch.dtype, gradients: bool) -> None:
        q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
        self.broadcast = problem.q_layout is None
        self.shape = dout.shape
        flat = dout.flatten(0, 1) if self.broadcast else dout
        rows = {"out": flat}
        if gradients:
            rows |= {"dq": q if self.broadcast else flat, "dk": k, "dv": v}
        # One row more than needed takes what padded positions write.
        self.buffers = {
            name: torch.zeros(x.shape[0] + 1, *x.shape[1:], dtype=dtype, device=q.device)
            for name, x in rows.items()
        }
        self.buffers["lse"] = torch.full(
            (flat.shape[0] + 1, q.shape[1]), -torch.inf, dtype=dtype, device=q.device
        )

    def put(self, chunk: _Chunk, *tensors: Tensor) -> None:
        """In the order of `NAMES`: `[n, heads, rows, dim]` each; lse `[n, heads, rows]`."""
        q_place, k_place = chunk.places
        where = {"out": q_place, "lse": q_place, "dq": q_place, "dk": k_place, "dv": k_place}
        for name, x in zip(NAMES, tensors, strict=False):
            if name == "dq" and self.broadcast:
                self.buffers[name][:-1] += x.sum(0).transpose(0, 1)
            else:
                rows = x.transpose(1, 2).flatten(0, 1)
                self.buffers[name].index_copy_(0, where[name].flatten(), rows)

    def tensors(self) -> dict:
        results = {name: self.buffers[name][:-1] for name in NAMES if name in self.buffers}
        for name, shape in (("out", self.shape), ("lse", self.shape[:-1])):
            results[name] = results[name].view(shape)
        return results


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


class Judge:
    """The reference and the yardstick of one problem, computed once for many results.

    Args:
        gradients: whether gradients will be compared too.

    Attributes:
        yardstick: the yardstick's errors by name, each (by maximum, by root mean square).
    """

    def __init__(self, problem: Problem, gradients: bool = True) -> None:
        self.exact = reference(problem, gradients)
        rough = yardstick(problem, gradients=gradients)
        self.yardstick = {name: _errors(x, self.exact[name]) for name, x in rough.items()}
        self.dtype = problem.q.dtype

    def compare(self, results: dict) -> dict[str, Comparison]:
        """Each tensor of `results`, as `compare` of this module."""
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        compared = {}
        for name, result in results.items():
            exact = self.exact[name]
            if result.shape != exact.shape:
                raise AssertionError(
                    f"{name} has shape {list(result.shape)}, not {list(exact.shape)}"
                )
            unit = UNITS[lse_dtype if name == "lse" else self.dtype]
            compared[name] = Comparison(_errors(result, exact), self.yardstick[name], unit)
        return compared


def compare(results: dict, problem: Problem) -> dict[str, Comparison]:
    """Each tensor of `results` (see `attend`) beside the reference and the yardstick.

    Where the reference is infinite (the log-sum-exp of a query that sees nothing) the result must
    be the same infinity; other entries that are not finite count as an infinite error.
    """
    return Judge(problem).compare(results)


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Error by maximum and by root mean square, relative to the same of the exact tensor."""
    if exact.numel() == 0:
        return 0.0, 0.0
    error_max, error_sum, size_max, size_sum = exact.new_zeros(4).double().unbind()
    step = max(1, ERROR_PART // max(1, exact[0].numel()))
    for begin in range(0, exact.shape[0], step):
        truth, part = exact[begin : begin + step], result[begin : begin + step].double()
        same = part == truth  # infinities too
        error = torch.where(same, 0.0, part - truth)
        error = torch.where(error.isfinite(), error.abs_(), torch.inf)
        size = torch.where(truth.isfinite(), truth, 0.0).abs_()
        error_max, size_max = error_max.maximum(error.max()), size_max.maximum(size.max())
        error_sum, size_sum = error_sum + error.square_().sum(), size_sum + size.square_().sum()
    sums = torch.stack([error_sum, size_sum]).div(exact.numel()).sqrt()
    worst, largest, mean_error, mean_size = torch.stack([error_max, size_max, *sums]).tolist()
    return worst / (largest or 1.0), mean_error / (mean_size or 1.0)


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

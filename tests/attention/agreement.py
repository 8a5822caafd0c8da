"""Whether two runs of one kernel differ by rounding alone: on a GPU and in the simulator.

Both take the same blocks in the same order, so that what differs is the order of sums within a
product or a row, `exp2` and `log2` in their last bits, and fused multiplications. With u = 2^-24,
dim D, n keys and R the largest sum of |q k| that a score of the row has, times |scale|:

- A tensor core adds 16 products at once to a running sum of at most R and cuts the result off, by
  2u relative; a CPU's sum of D products rounds D times, at random, some 2u sqrt(D) of R in all. A
  score is off by E = R u (D/8 + 2 sqrt(D)).
- lse is off by a mean of its scores' errors, the sum of n rounded exponentials (each 4u) and its
  own logarithm: E + u (8 + 2 sqrt(n) + 4 |lse|).
- out is rounded to the half type, whose spacing is at most eps relative: two numbers that nearly
  agree become neighbours at the worst, eps |out|. The same happens to a probability with a chance
  of about 2 E / eps, at most 1/16; that moves out by eps w v for a key of weight w. With B^2 the
  sum of w^2 v^2 over the keys, the root mean square of that is eps B / 4; one key alone moves it by
  eps B at the most. B is also the size that out has if values are of random sign. Each element is
  allowed eps (|out| + 2 B): the neighbour, and eight times that root mean square.
- Gradients of the same out and lse round probabilities and score gradients in the same way. A row
  that becomes its neighbour everywhere has moved by eps of its norm; of a row that is smaller than
  most (where terms cancel), eps of the tensor's usual row is allowed.
- By root mean square over a tensor, out may differ by eps / 4 of max(|out|, B), a gradient by that
  of itself: of two results that are rounded independently of each other (as by kernels that split
  keys otherwise) it is 0.4 eps, of two that agree before rounding nearly 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gem.attention.testing import Problem, reference

U = 2.0**-24
RMS = 0.25  # of eps


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two results are apart, each as a share of what is allowed.

    Attributes:
        out: the worst element of out.
        out_rms: out by root mean square.
        lse: the worst element of lse, infinite where only one of the two is -inf.
        unequal: the share of out's elements that differ at all.
    """

    out: float
    out_rms: float
    lse: float
    unequal: float

    @property
    def worst(self) -> float:
        """The largest share: at most 1 is rounding."""
        return max(self.out, self.out_rms, self.lse)

    def __str__(self) -> str:
        return (
            f"out {self.out:.3f} and lse {self.lse:.3f} of their bounds, out by root mean square"
            f" {self.out_rms:.3f}; {self.unequal:.2%} of out's elements differ"
        )


def difference(
    problem: Problem, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> Difference:
    """Compares (out, lse) of two runs; see the module's docstring.

    Args:
        problem: on the CPU.
        one, other: on the CPU; shapes and dtypes as the forward returns them.

    Raises:
        AssertionError: shapes or dtypes differ.
    """
    for x, y in zip(one, other, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, x.dtype, y.shape, y.dtype)
    out, lse = (x.double() for x in one)
    out_too, lse_too = (x.double() for x in other)
    eps = torch.finfo(problem.q.dtype).eps
    typical, lse_bound = _typical(problem), _lse_bound(problem)
    apart = (out - out_too).abs()
    size = torch.maximum(out.abs(), typical)
    lse_apart = torch.where(lse == lse_too, 0.0, lse - lse_too).abs()  # equal infinities
    return Difference(
        _largest(apart / (eps * (out.abs() + 2 * typical))),
        _share(apart.norm().item(), RMS * eps * size.norm().item()),
        _largest(lse_apart / lse_bound),
        (apart != 0).double().mean().item() if apart.numel() else 0.0,
    )


def gradient_difference(problem: Problem, one: tuple, other: tuple) -> dict[str, float]:
    """The worst of rows and root mean square, as a share of what is allowed, of dq, dk and dv.

    Args:
        problem: on the CPU.
        one, other: (dq, dk, dv) of two runs on the CPU, from the same out and lse.
    """
    eps, found = torch.finfo(problem.q.dtype).eps, {}
    for name, x, y in zip(("dq", "dk", "dv"), one, other, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, (name, x.shape, y.shape)
        x, y = x.double(), y.double()
        rows, apart = x.norm(dim=-1), (x - y).norm(dim=-1).nan_to_num(nan=torch.inf)
        usual = rows.square().mean().sqrt()
        by_row = _largest(apart / (eps * torch.maximum(rows, usual)).clamp(min=1e-30))
        found[name] = max(by_row, _share(apart.norm().item(), RMS * eps * rows.norm().item()))
    return found


def _share(x: float, allowed: float) -> float:
    return x / allowed if x else 0.0


def _largest(x: Tensor) -> float:
    """The maximum of what is not 0 / 0; NaN of an input counts as infinite."""
    if not x.numel():
        return 0.0
    return x.nan_to_num(nan=torch.inf).max().item()


def _typical(problem: Problem) -> Tensor:
    """B of every element of out: the softmax of twice the scores has the squares of the weights."""
    twice = dataclasses.replace(problem, v=problem.v.double().square(), scale=2 * problem.factor)
    squares, plain = reference(twice), reference(problem)
    share = (squares["lse"] - 2 * plain["lse"]).nan_to_num(0.0).exp()
    return (squares["out"] * share[..., None]).sqrt().clamp(min=torch.finfo(torch.float16).tiny)


def _lse_bound(problem: Problem) -> Tensor:
    dim, keys = problem.q.shape[2], int(problem.k_layout.lengths.max())
    sizes = dataclasses.replace(
        problem, q=problem.q.abs(), k=problem.k.abs(), scale=abs(problem.factor)
    )
    reach = reference(sizes)["lse"].clamp(min=0.0)  # no less than the largest of the sums
    score = reach * U * (dim / 8 + 2 * dim**0.5)
    lse = reference(problem)["lse"].abs().nan_to_num(posinf=0.0)
    return score + U * (8 + 2 * keys**0.5 + 4 * lse)

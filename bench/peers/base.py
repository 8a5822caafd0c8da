"""What a contender is: a name and its routes; a route computes one problem.

A contender is a class derived from `Contender`. `routes(problems)` returns the ways in which it can
compute them, each a list with one `Route` per problem; all are checked and timed, and the fastest
stands for the contender. `bench/peers/__init__.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gem.attention.testing import Problem


class Unavailable(Exception):
    """The contender cannot serve this machine or this row; its message is the reason."""


class Route:
    """One way to compute attention and its gradients for one problem.

    What the lengths alone decide (offsets, indices, masks, schedules) is made in the constructor
    and does not count; all that touches q, k, v or dout belongs into `forward` and `backward`.

    Attributes:
        compiles: whether a first call may compile something, so that its time says nothing.
    """

    compiles = True

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def forward(self) -> Tensor:
        """out of the problem's `dout` shape. Timed."""
        raise NotImplementedError

    def first_forward(self) -> Tensor:
        """`forward`, once and before all else; it may keep what `prepare_backward` would make."""
        return self.forward()

    def prepare_backward(self) -> None:
        """A forward that keeps what `backward` needs. Not timed."""
        raise NotImplementedError

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the shapes and dtypes of q, k and v. Timed; may run many times."""
        raise NotImplementedError

    def release(self) -> None:
        """Drops what `first_forward` and `prepare_backward` kept."""


class AutogradRoute(Route):
    """A route through a differentiable function `attend(q, k, v) -> out`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend(self.problem.q, self.problem.k, self.problem.v)

    def prepare_backward(self) -> None:
        p = self.problem
        self.inputs = tuple(x.detach().requires_grad_() for x in (p.q, p.k, p.v))
        with torch.enable_grad():
            self.out = self.attend(*self.inputs)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.autograd.grad(self.out, self.inputs, self.problem.dout, retain_graph=True)

    def release(self) -> None:
        self.inputs = self.out = None


class Contender:
    """Somebody's attention.

    Attributes:
        name: its column.
        ours: whether it is a backend of this package.
        last_resorts: labels of routes that are tried only where those before them fail.
    """

    name: str
    ours = False
    last_resorts: tuple[str, ...] = ()

    def routes(self, problems: Sequence[Problem]) -> dict[str, Callable[[], list[Route]]]:
        """By label, what builds one route per problem.

        Raises:
            Unavailable: if none can serve the problems; the builders may raise it too.
        """
        raise NotImplementedError


def per_sample_offsets(problem: Problem) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and keys (int32) and their longest, with B copies of a shared q."""
    k_layout = problem.k_layout
    if problem.q_layout is not None:
        q_layout = problem.q_layout
        return q_layout.offsets, k_layout.offsets, q_layout.max_length, k_layout.max_length
    queries = problem.q.shape[0]
    q_offsets = queries * torch.arange(
        k_layout.batch_size + 1, dtype=torch.int32, device=problem.q.device
    )
    return q_offsets, k_layout.offsets, queries, k_layout.max_length


def copied_per_sample(problem: Problem, q: Tensor) -> Tensor:
    """q of every query that the packed form has: a shared q is copied for each sample."""
    if problem.q_layout is not None:
        return q
    return q.expand(problem.k_layout.batch_size, *q.shape).flatten(0, 1)


def in_output_shape(problem: Problem, out: Tensor) -> Tensor:
    return out.view(problem.dout.shape)

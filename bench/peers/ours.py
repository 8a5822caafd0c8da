"""The backends of this package, forward through the public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.peers.base import Contender, Route, Unavailable
from gem.attention import backends, broadcast_attention, jagged_attention
from gem.attention.backends import torch_
from gem.attention.testing import Problem, call_of


class BackendRoute(Route):
    out = lse = None

    def __init__(self, problem: Problem, backend: str, deterministic: bool = False) -> None:
        super().__init__(problem)
        self.backend, self.deterministic = backend, deterministic
        if backend == "torch":
            # It compiles nothing, and its tiles take seconds to make, so that they must be there
            # for a first call to be like any other.
            self.compiles = False
            torch_.plan_of(call_of(problem), problem.q, problem.k)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._attend()[0]

    def first_forward(self) -> Tensor:
        with torch.no_grad():
            self.out, self.lse = self._attend()
        return self.out

    def _attend(self) -> tuple[Tensor, Tensor]:
        p = self.problem
        options = {
            "scale": p.scale,
            "return_lse": True,
            "backend": self.backend,
            "deterministic": self.deterministic,
        }
        if p.q_layout is None:
            return broadcast_attention(p.q, p.k, p.v, p.k_layout, **options)
        return jagged_attention(
            p.q, p.k, p.v, p.q_layout, p.k_layout, causal=p.causal, window=p.window, **options
        )

    def prepare_backward(self) -> None:
        if self.out is None:
            self.first_forward()

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        p = self.problem
        layouts = (None, None) if p.q_layout is None else (p.q_layout.offsets, p.q_layout.lengths)
        with torch.no_grad():
            return torch.ops.gem.attention_backward(
                p.dout,
                None,
                p.q,
                p.k,
                p.v,
                self.out,
                self.lse,
                *layouts,
                p.k_layout.offsets,
                p.k_layout.lengths,
                p.factor,
                *p.sides,
                self.backend,
                self.deterministic,
            )

    def release(self) -> None:
        self.out = self.lse = None


class Backend(Contender):
    """One backend by name."""

    ours = True

    def __init__(self, name: str, deterministic: bool = False) -> None:
        self.name, self.deterministic = name, deterministic

    def routes(self, problems):
        if self.name not in backends.names():
            raise Unavailable("not among the attention backends")
        return {
            "": lambda: [
                BackendRoute(problem, self.name, self.deterministic) for problem in problems
            ]
        }

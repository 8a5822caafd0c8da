"""FlashAttention-4, FlashAttention-3 and torch's varlen_attn."""

from __future__ import annotations

import importlib
import inspect
import os
from types import ModuleType

import torch
from torch import Tensor

from bench.peers.base import (
    AutogradRoute,
    Contender,
    Route,
    Unavailable,
    copied_per_sample,
    in_output_shape,
    per_sample_offsets,
)
from gem.attention.testing import Problem


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a peer's import may fail in any way
        raise Unavailable(f"{name} cannot be imported: {error}") from error


def _need_gpu(problem: Problem) -> None:
    if problem.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")


class Fa4Route(AutogradRoute):
    """`flash_attn_varlen_func`; a shared q is copied B times, or handed over as a dense view."""

    def __init__(self, problem: Problem, view: bool) -> None:
        super().__init__(problem)
        # Compiled kernels survive the process.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        self.function = _import("flash_attn.cute").flash_attn_varlen_func
        self.view = view
        q_offsets, k_offsets, max_q, max_k = per_sample_offsets(problem)
        self.options = {"cu_seqlens_k": k_offsets, "max_seqlen_k": max_k}
        if not view:
            self.options |= {"cu_seqlens_q": q_offsets, "max_seqlen_q": max_q}
        left, right = problem.sides
        if (left, right) == (None, 0):
            self.options["causal"] = True
        elif (left, right) != (None, None):
            self.options["window_size"] = (left, right)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.problem
        if self.view:
            q = q.unsqueeze(0).expand(p.k_layout.batch_size, -1, -1, -1)
        else:
            q = copied_per_sample(p, q)
        out, _ = self.function(q, k, v, softmax_scale=p.factor, return_lse=True, **self.options)
        return in_output_shape(p, out)


class Fa4(Contender):
    name = "fa4"

    def routes(self, problems):
        _need_gpu(problems[0])
        return {"": lambda: [Fa4Route(problem, view=False) for problem in problems]}


class Fa4View(Contender):
    name = "fa4_view"

    def routes(self, problems):
        if problems[0].q_layout is not None:
            raise Unavailable("only where q is shared by the batch")
        _need_gpu(problems[0])
        return {"": lambda: [Fa4Route(problem, view=True) for problem in problems]}


class Fa3Route(Route):
    """`torch.ops.flash_attn_3`, whose two directions are called directly."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.lengths = per_sample_offsets(problem)
        left, right = problem.sides
        causal = (left, right) == (None, 0)
        self.mask = (causal, *(-1 if side is None or causal else side for side in (left, right)))

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        p, (q_offsets, k_offsets, max_q, max_k) = self.problem, self.lengths
        q = copied_per_sample(p, p.q)
        # k_new, v_new, q_v, out; ...; cu_seqlens_k_new, seqused_q, seqused_k; ...; page table to
        # v_descale; ...; chunk, softcap, interleaved, metadata, splits, pack_gqa, sm_margin
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            q,
            p.k,
            p.v,
            *[None] * 4,
            q_offsets,
            k_offsets,
            *[None] * 3,
            max_q,
            max_k,
            *[None] * 9,
            p.factor,
            *self.mask,
            0,
            0.0,
            True,
            None,
            1,
            None,
            0,
        )
        return q, out, lse

    def forward(self) -> Tensor:
        with torch.no_grad():
            return in_output_shape(self.problem, self._forward()[1])

    def prepare_backward(self) -> None:
        with torch.no_grad():
            self.q, self.out, self.lse = self._forward()

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        p, (q_offsets, k_offsets, max_q, max_k) = self.problem, self.lengths
        with torch.no_grad():
            dq, dk, dv = (torch.empty_like(x) for x in (self.q, p.k, p.v))
            torch.ops.flash_attn_3.bwd(
                p.dout.reshape(self.q.shape),
                self.q,
                p.k,
                p.v,
                self.out,
                self.lse,
                dq,
                dk,
                dv,
                q_offsets,
                k_offsets,
                None,
                None,
                max_q,
                max_k,
                p.factor,
                *self.mask,
                0.0,
                False,
                0,
            )
            if p.q_layout is None:
                dq = dq.view(-1, *p.q.shape).sum(0)
        return dq, dk, dv

    def release(self) -> None:
        self.q = self.out = self.lse = None


class Fa3(Contender):
    name = "fa3"

    def routes(self, problems):
        _need_gpu(problems[0])
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            # `fa3` loads the operators alone; the package of that name registers them at import.
            try:
                _import("fa3")
            except Unavailable as reason:
                try:
                    _import("flash_attn_3._C")
                except Unavailable:
                    raise reason from None
        if not hasattr(torch.ops.flash_attn_3, "bwd"):
            raise Unavailable("the loaded FlashAttention-3 has no fwd and bwd operators")
        return {"": lambda: [Fa3Route(problem) for problem in problems]}


class VarlenRoute(AutogradRoute):
    """`torch.nn.attention.varlen.varlen_attn`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.function = _import("torch.nn.attention.varlen").varlen_attn
        parameters = inspect.signature(self.function).parameters
        left, right = problem.sides
        sides = (-1 if left is None else left, -1 if right is None else right)
        self.options = {}
        if "window_size" in parameters:
            self.options["window_size"] = sides
        elif sides == (-1, 0):
            self.options["is_causal"] = True
        elif sides != (-1, -1):
            raise Unavailable("this version has no window")
        if "scale" in parameters:
            self.options["scale"] = problem.factor
        if problem.q.shape[1] != problem.k.shape[1] and "enable_gqa" in parameters:
            self.options["enable_gqa"] = True
        self.lengths = per_sample_offsets(problem)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.problem
        out = self.function(copied_per_sample(p, q), k, v, *self.lengths, **self.options)
        return in_output_shape(p, out)


class VarlenAttn(Contender):
    name = "varlen_attn"

    def routes(self, problems):
        _need_gpu(problems[0])
        return {"": lambda: [VarlenRoute(problem) for problem in problems]}

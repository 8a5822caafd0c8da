"""Whether a backend's first training step is right: loss and gradients against float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.train_data import unseen
from gem.data import Batch
from gem.train.trainer import Trainer

# A gradient may be off by twice as much as that of the yardstick, and by this beyond.
UNITS = {"bfloat16": torch.finfo(torch.bfloat16).eps, "float32": 1e-4}
LOSS_TOLERANCE = 0.005  # relative


@dataclass(frozen=True)
class FirstStep:
    """A first step's loss and, by name, the gradients of the dense matrices, on the host.

    Gradients of some vectors are 0 but for rounding, as of a bias before a softmax.
    """

    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, exact: FirstStep) -> dict[str, float]:
        """By matrix: the error's norm over the gradient's."""
        return {
            name: float((self.gradients[name] - truth).norm() / truth.norm())
            for name, truth in exact.gradients.items()
            if truth.any()
        }


@dataclass(frozen=True)
class Judge:
    """Whether a first step is right.

    Attributes:
        exact: by PyTorch operators in float32. yardstick: by them in the run's precision.
        unit: what is allowed beyond the yardstick, relative.
    """

    exact: FirstStep
    yardstick: FirstStep
    unit: float

    def compare(self, step: FirstStep) -> dict[str, Any]:
        """Of the loss the relative error, of the worst gradient the error over what is allowed."""
        errors, allowed = step.errors(self.exact), self.yardstick.errors(self.exact)
        ratios = {name: error / (2 * allowed[name] + self.unit) for name, error in errors.items()}
        worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
        return {
            "loss": abs(step.loss / self.exact.loss - 1),
            "gradient_ratio": ratios[worst],
            "worst_gradient": worst,
            "worst_gradient_error": errors[worst],
        }


def is_right(errors: dict[str, Any]) -> bool:
    return errors["loss"] <= LOSS_TOLERANCE and errors["gradient_ratio"] <= 1


def wake(trainer: Trainer) -> None:
    """Gives random values to parameters that start at 0, and layer scales a weight of 1.

    Heads start at 0, so that no logit or gradient would depend on attention in a first step; and
    so do gates and sinks. The same numbers for every trainer of a model.
    """
    generator = torch.Generator().manual_seed(0)
    optimizers = trainer.optimizers
    with torch.no_grad():
        for name, parameter in zip(optimizers.names, optimizers.dense, strict=True):
            if name.endswith("gamma"):
                parameter.fill_(1.0)
            elif not parameter.any():
                std = parameter.shape[-1] ** -0.5
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def first_step(trainer: Trainer, check: Batch) -> FirstStep:
    """The first training step, after `wake`."""
    wake(trainer)
    trainer.model.train()
    gradients, optimizers = {}, trainer.optimizers

    def keep(name: str):
        return lambda gradient: gradients.__setitem__(name, gradient.detach().float().cpu())

    named = zip(optimizers.names, optimizers.dense, strict=True)
    hooks = [p.register_hook(keep(name)) for name, p in named if p.ndim >= 2]
    trainer.step(unseen(check))
    for hook in hooks:
        hook.remove()
    trainer.guard.check()
    return FirstStep(trainer.window.state_dict()["kept"]["losses"].item(), gradients)


def make_judge(start: Callable[[str, str], Trainer], check: Batch, precision: str) -> Judge:
    """By first steps of PyTorch operators on `check`.

    Args:
        start: makes a trainer of a backend and a precision. precision: the run's.
    """
    exact, yardstick = (first_step(start("torch", name), check) for name in ("float32", precision))
    return Judge(exact, yardstick, UNITS[precision])

"""AdamW for the dense part, learning rates for both parts, clipping."""

import math

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from gem.config import OptimConfig
from gem.train.sharding import lookups

# Learned inputs rather than weights: decay would only pull them towards each other.
_UNDECAYED = ("bias", "seed", "quer", "cls", "gamma", "scale", "sink")


def lr_factor(step: int, total: int, warmup: int, final: float) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, then half a cosine.

    Rises over `warmup` steps to 1, then falls to `final` at the last of `total` steps.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and learned seeds."""
    leaf = name.rsplit(".", 1)[-1]
    return parameter.ndim >= 2 and not any(word in leaf for word in _UNDECAYED)


class Optimizers:
    """Both optimizers of a sharded model behind one step.

    Tables are updated inside `backward`, so that `set_step` comes before the forward pass and
    `step` updates the dense part alone.

    Args:
        model: the sharded model.
        config: rates, decay, warm-up, clipping.
        total_steps: where the cosine ends.
    """

    def __init__(
        self, model: DistributedModelParallel, config: OptimConfig, total_steps: int
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.tables = list(lookups(model))
        self.names, self.dense = [], []
        for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
            self.names.append(name)
            self.dense.append(parameter)
        keyed = dict(zip(self.names, self.dense, strict=True))
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for n, p in keyed.items() if decays(n, p)]},
                {"params": [p for n, p in keyed.items() if not decays(n, p)], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # A rate of 0 makes the first moments and changes no weight: state is never lazy.
        for parameter in self.dense:
            parameter.grad = torch.zeros_like(parameter)
        self.adamw.step()
        for state in self.adamw.state.values():
            state["step"].zero_()
        self.adamw.zero_grad()
        self.combined = CombinedOptimizer(
            [model.fused_optimizer, KeyedOptimizerWrapper(keyed, lambda _: self.adamw)]
        )

    def set_step(self, step: int) -> float:
        """Sets both learning rates for a step (from 0); returns the dense one."""
        c = self.config
        factor = lr_factor(step, self.total_steps, c.warmup_steps, c.final_lr_fraction)
        for tables in self.tables:
            tables.set_learning_rate(c.embedding_lr * factor)
        for group in self.adamw.param_groups:
            group["lr"] = c.lr * factor
        return c.lr * factor

    def clip(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Scales dense gradients down to `clip_norm`.

        Returns:
            Their norm before, and each parameter's: scalars on the device. Parameters without a
            gradient are left out.
        """
        kept = [(n, p) for n, p in zip(self.names, self.dense, strict=True) if p.grad is not None]
        norms = torch._foreach_norm([parameter.grad for _, parameter in kept])
        total = torch.linalg.vector_norm(torch.stack(norms))
        if self.config.clip_norm is not None:
            parameters = [parameter for _, parameter in kept]
            nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, total, foreach=True)
        return total, dict(zip((name for name, _ in kept), norms, strict=True))

    def step(self, skip: Tensor) -> None:
        """Updates the dense part unless `skip` (a float32 0/1 scalar on the device) is 1.

        The fused kernel reads the flag on the device: the host does not wait for it.
        """
        self.adamw.found_inf = skip
        self.adamw.grad_scale = None
        self.adamw.step()
        self.adamw.zero_grad()

"""Prediction heads: one MLP per task on the same flattened tokens."""

import math

import torch
from torch import Tensor, nn

from gem.model.layers import mlp


class TaskHeads(nn.Module):
    """`logit_t = MLP_t(LN(flatten(tokens)))` (InterFormer Alg. 1's head, one per task).

    Args:
        priors: each task's expected positive rate, which its head starts from. tokens: N.
        width: D.
        hidden: widths of each head's MLP. dropout: between its layers.
    """

    def __init__(
        self, priors: list[float], tokens: int, width: int, hidden: list[int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(tokens * width)
        self.heads = nn.ModuleList(mlp([tokens * width, *hidden, 1], dropout) for _ in priors)
        for head, prior in zip(self.heads, priors, strict=True):
            nn.init.zeros_(head[-1].weight)
            nn.init.constant_(head[-1].bias, math.log(prior / (1 - prior)))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, N, D] -> float32 logits [B, tasks]."""
        flat = self.norm(tokens.flatten(1))
        return torch.cat([head(flat) for head in self.heads], dim=1).float()

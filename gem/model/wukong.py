"""Wukong: stacked factorisation machines over tokens (Zhang et al., arXiv 2403.02545, section 3).

Shapes: B batch, N tokens in, M = fmb + lcb tokens out, D width, K rank.
"""

import torch
from torch import Tensor, nn

from gem.model.layers import TokenLinear, mlp


class FactorizationMachineBlock(nn.Module):
    """`FMB(X) = reshape(MLP(LN(flatten(X (X^T Y)))))`, the paper's optimised FM.

    The full FM is the [N, N] matrix of dot products `X X^T`; projecting its columns on a learned
    Y [N, K] costs O(N D K) instead of O(N^2 D).

    Args:
        tokens: N. width: D. out: tokens it returns. rank: K. hidden: widths of the MLP.
    """

    def __init__(self, tokens: int, width: int, out: int, rank: int, hidden: list[int]) -> None:
        super().__init__()
        self.out, self.width = out, width
        self.projection = nn.Parameter(torch.randn(tokens, rank) / tokens**0.5)
        self.norm = nn.LayerNorm(tokens * rank)
        self.mlp = mlp([tokens * rank, *hidden, out * width])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, out, D]."""
        interactions = x @ (x.transpose(1, 2) @ self.projection)  # [B, N, K]
        return self.mlp(self.norm(interactions.flatten(1))).view(-1, self.out, self.width)


class WukongLayer(nn.Module):
    """`X' = LN(concat(FMB(X), LCB(X)) + residual(X))`, LCB and residual linear on the token axis.

    A stack of i layers holds interactions of the orders 1 .. 2^i. The residual is compressed by
    a token-axis linear map where the number of tokens changes.

    Args:
        tokens: N. width: D. fmb, lcb: tokens of either block; their sum is M. rank: K.
        hidden: widths of FMB's MLP.
    """

    def __init__(
        self, tokens: int, width: int, fmb: int, lcb: int, rank: int, hidden: list[int]
    ) -> None:
        super().__init__()
        self.fmb = FactorizationMachineBlock(tokens, width, fmb, rank, hidden)
        self.lcb = TokenLinear(tokens, lcb)
        same = tokens == fmb + lcb
        self.residual = nn.Identity() if same else TokenLinear(tokens, fmb + lcb)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, fmb + lcb, D]."""
        return self.norm(torch.cat([self.fmb(x), self.lcb(x)], dim=1) + self.residual(x))

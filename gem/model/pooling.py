"""Summaries of a jagged sequence by broadcast attention: a few queries, shared by the batch.

Shapes: rows all samples' events, B batch, D width, T tokens out.
"""

import torch
from torch import Tensor, nn

from gem.attention import BroadcastAttention, JaggedLayout
from gem.model.layers import transposed_pair


def reader(
    width: int, heads: int, queries: int | None, backend: str, deterministic: bool
) -> BroadcastAttention:
    """Broadcast attention with a sink, whose values at first come out as they are."""
    attention = BroadcastAttention(
        width, heads, queries, sink=True, backend=backend, deterministic=deterministic
    )
    attention.v_proj, attention.out_proj = transposed_pair(width)
    return attention


class PMA(nn.Module):
    """Pooling by multi-head attention: `PMA(S) = MHA(Q, S, S)` with T learned queries.

    Set Transformer (arXiv 1810.00825, section 3.2); in InterFormer the PMA tokens of eq. 11.
    An empty sequence gives 0.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        tokens: int,
        *,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.queries = tokens
        self.norm = nn.LayerNorm(width)
        self.attention = reader(width, heads, tokens, backend, deterministic)

    def forward(self, s: Tensor, layout: JaggedLayout) -> Tensor:
        """s [rows, D] -> [B, T, D]."""
        return self.attention(self.norm(s), layout)


class SumKronLinear(nn.Module):
    """`Y = sum_i Z_i^T X W_i`, i = 1 .. k: k (N T + D^2) parameters in place of N T D^2.

    Kunlun (arXiv 2602.10016), hierarchical seed pooling.

    Args:
        tokens: N. out: T. width: D. rank: k.
    """

    def __init__(self, tokens: int, out: int, width: int, rank: int) -> None:
        super().__init__()
        self.token_weights = nn.Parameter(torch.randn(rank, out, tokens) * tokens**-0.5)
        self.width_weights = nn.Parameter(torch.randn(rank, width, width) * (rank * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, T, D]."""
        mixed = torch.einsum("ktn,bnd->bktd", self.token_weights, x)
        return torch.einsum("bktd,kde->bte", mixed, self.width_weights)


class HSP(nn.Module):
    """Hierarchical seed pooling: N seeds read the sequence, SumKronLinear makes T tokens of them.

    Kunlun (arXiv 2602.10016): `H = MHA(Norm(E), S, S)` with seeds E [N, D] shared by the batch,
    N > T, then `Y = SumKronLinear(H)`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        seeds: int,
        tokens: int,
        rank: int,
        *,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.queries = seeds
        self.norm = nn.LayerNorm(width)
        self.seed_norm = nn.LayerNorm(width)
        self.seeds = nn.Parameter(torch.randn(seeds, width))
        self.attention = reader(width, heads, None, backend, deterministic)
        self.compress = SumKronLinear(seeds, tokens, width, rank)

    def forward(self, s: Tensor, layout: JaggedLayout) -> Tensor:
        """s [rows, D] -> [B, T, D]."""
        seeds = self.seed_norm(self.seeds)
        return self.compress(self.attention(self.norm(s), layout, queries=seeds))

"""One GEM layer in the InterFormer form (arXiv 2411.09852, Alg. 1): cross, then interaction and
sequence side by side, both reading the layer's summaries.

Shapes: B batch, N feature tokens, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem.model.layers import Gate, TokenLinear
from gem.model.sequence import SequenceBlock, SequenceState
from gem.model.wukong import WukongLayer


class WeightGeneration(nn.Module):
    """`X_sum = Gate(LCE(X))`: N tokens to n, the features' say in the sequence block (eq. 10).

    Args:
        tokens: N. out: n. width: D.
        candidate: tokens on a table that an event's field uses too. The first of the n tokens
            start as these, one each, so that from the first step on events are compared with the
            candidate's own category, not with a random mixture of all features.
    """

    def __init__(self, tokens: int, out: int, width: int, candidate: Sequence[int] = ()) -> None:
        super().__init__()
        self.compress = TokenLinear(tokens, out)
        self.gate = Gate(width)
        with torch.no_grad():
            for row, token in zip(self.compress.weight, candidate, strict=False):
                row.mul_(0.1)[token] += 1

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, n, D]."""
        return self.gate(self.compress(x))


class SequenceSummary(nn.Module):
    """`S_sum = Gate([S_CLS || S_recent || S_pool])` (eq. 11); recent events are taken as they are.

    Args:
        pool: PMA or HSP. width: D.
    """

    def __init__(self, pool: nn.Module, width: int) -> None:
        super().__init__()
        self.pool = pool
        self.norm = nn.LayerNorm(width)
        self.gate = Gate(width)

    def forward(self, state: SequenceState) -> Tensor:
        """-> [B, cls + recent + pooled, D]."""
        recent, pooled = state.recent.take(state.s), self.pool(state.s, state.layout)
        tokens = torch.cat([state.cls, recent, pooled], dim=1)
        return self.gate(self.norm(tokens))


class InterFormerLayer(nn.Module):
    """`X_sum, S_sum = cross(X, S); X' = Wukong([X || S_sum]); S' = MHA(PFFN(X_sum, S))`.

    Args:
        generation: X to X_sum, shared by the sequences; None if no block reads it.
        interaction: on N + all summary tokens.
        summaries, sequences: one per sequence, in the order of the states.
    """

    def __init__(
        self,
        generation: WeightGeneration | None,
        interaction: WukongLayer,
        summaries: list[SequenceSummary],
        sequences: list[SequenceBlock],
    ) -> None:
        super().__init__()
        self.generation = generation
        self.interaction = interaction
        self.summaries = nn.ModuleList(summaries)
        self.sequences = nn.ModuleList(sequences)

    def forward(self, x: Tensor, states: list[SequenceState]) -> tuple[Tensor, list[SequenceState]]:
        """x [B, N, D] and a state per sequence -> X' [B, M, D] and the new states."""
        summary = [summarise(s) for summarise, s in zip(self.summaries, states, strict=True)]
        weights = None if self.generation is None else self.generation(x)
        after = [b(state, weights) for b, state in zip(self.sequences, states, strict=True)]
        return self.interaction(torch.cat([x, *summary], dim=1)), after

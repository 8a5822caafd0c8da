"""One GEM layer in the InterFormer form (arXiv 2411.09852, Alg. 1): cross, then interaction and
sequence side by side, both reading the layer's summaries.

Shapes: B batch, N feature tokens, D width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gem.attention import JaggedLayout
from gem.model.jagged import Appended, Blocks
from gem.model.layers import Gate, TokenLinear
from gem.model.sequence import SequenceBlock
from gem.model.wukong import WukongLayer


@dataclass(frozen=True)
class SequenceState:
    """A sequence on its way through the layers, with what all layers reuse.

    Attributes:
        s: [rows, D] events and, at each sample's end, its CLS tokens.
        place: where CLS tokens and events lie.
        blocks: the same rows in blocks, for products with per-sample weights.
        rotary: (cos, sin), each [rows, d / 2], or None.
    """

    s: Tensor
    place: Appended
    blocks: Blocks
    rotary: tuple[Tensor, Tensor] | None

    @property
    def layout(self) -> JaggedLayout:
        return self.place.layout


class WeightGeneration(nn.Module):
    """`X_sum = Gate(LCE(X))`: N tokens to n, the features' say in the sequence block (eq. 10)."""

    def __init__(self, tokens: int, out: int, width: int) -> None:
        super().__init__()
        self.compress = TokenLinear(tokens, out)
        self.gate = Gate(width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] -> [B, n, D]."""
        return self.gate(self.compress(x))


class SequenceSummary(nn.Module):
    """`S_sum = Gate([S_CLS || S_pool || S_recent])` (eq. 11).

    Args:
        pool: PMA or HSP; its tokens see CLS rows and events alike.
        width: D. cls: CLS tokens at a sample's end. recent: newest events taken as they are.
    """

    def __init__(self, pool: nn.Module, width: int, cls: int, recent: int) -> None:
        super().__init__()
        self.pool, self.tail = pool, cls + recent
        self.norm = nn.LayerNorm(width)
        self.gate = Gate(width)

    def forward(self, state: SequenceState) -> Tensor:
        """-> [B, cls + pooled + recent, D]."""
        tail = state.place.last(state.s, self.tail)
        tokens = torch.cat([tail, self.pool(state.s, state.layout)], dim=1)
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

    def forward(
        self, x: Tensor, states: list[SequenceState]
    ) -> tuple[Tensor, list[SequenceState]]:
        """x [B, N, D] and a state per sequence -> X' [B, M, D] and the new states."""
        summary = [summarise(s) for summarise, s in zip(self.summaries, states, strict=True)]
        weights = None if self.generation is None else self.generation(x)
        after = []
        for block, state in zip(self.sequences, states, strict=True):
            s = block(state.s, weights, state.layout, state.blocks, state.rotary)
            after.append(replace(state, s=s))
        return self.interaction(torch.cat([x, *summary], dim=1)), after

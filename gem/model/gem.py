"""GEM: features and jagged histories to one logit per task.

`embedding -> N x (cross; interaction || sequence) -> cross -> heads`, in the form of InterFormer
(arXiv 2411.09852) with Wukong's interaction (2403.02545) and Kunlun's GDPA and HSP (2602.10016).
"""

import torch
from torch import Tensor, nn

from gem.attention import JaggedLayout, rotary_angles
from gem.config import ModelConfig, PoolingConfig, PoolingKind
from gem.data import Batch, JaggedSequence, Schema
from gem.model.embedding import Embeddings, EventTokens, FeatureTokens
from gem.model.flops import model_flops
from gem.model.heads import TaskHeads
from gem.model.interformer import (
    InterFormerLayer,
    SequenceSummary,
    WeightGeneration,
)
from gem.model.jagged import Blocks, LastRows, distance_from_end
from gem.model.pooling import HSP, PMA
from gem.model.sequence import GDPA, SequenceAttention, SequenceBlock, SequenceState
from gem.model.wukong import WukongLayer

BLOCK = 64


class Gem(nn.Module):
    """The model of a `gem_*` config.

    Args:
        schema: the features and tasks. config: sizes.
        backend, deterministic: of attention, as in `gem.attention.jagged_attention`.
        device: where the embedding tables are made; on `meta` the whole model is a description
            that can count its parameters and FLOPs.
    """

    def __init__(
        self,
        schema: Schema,
        config: ModelConfig,
        *,
        backend: str = "auto",
        deterministic: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.schema, self.config = schema, config
        self.sequences = list(schema.sequences) if config.use_sequences else []
        kernel = {"backend": backend, "deterministic": deterministic}
        width, dim = config.d_model, config.embedding_dim
        self.embeddings = Embeddings(schema, dim, width, self.sequences, device)
        self.feature_tokens = FeatureTokens(schema, width, [s.name for s in self.sequences])
        self.event_tokens = nn.ModuleList(EventTokens(s, width) for s in self.sequences)
        tokens = self.feature_tokens.tokens
        self.candidate = self._shared_tokens()
        has_cls = self.sequences and config.cls_tokens
        self.cls = self._generation(tokens, config.cls_tokens, True) if has_cls else None

        summary = len(self.sequences) * summary_size(config)
        self.layers = nn.ModuleList()
        for index in range(config.layers):
            self.layers.append(self._layer(index, tokens, summary, kernel))
            tokens = config.wukong.fmb + config.wukong.lcb
        self.final = nn.ModuleList(self._summary(kernel) for _ in self.sequences)
        priors = [task.prior for task in schema.tasks]
        self.heads = TaskHeads(priors, tokens + summary, width, config.head_mlp, config.dropout)

    def _shared_tokens(self) -> list[int]:
        """Feature tokens on a table that a sequence uses; token 0 holds the dense values."""
        tables = {
            self.schema.table_of(f"{sequence.name}.{field.name}", field)
            for sequence in self.sequences
            for field in sequence.fields
        }
        return [
            i + 1
            for i, feature in enumerate(self.schema.sparse)
            if self.schema.table_of(feature.name, feature) in tables
        ]

    def _generation(self, tokens: int, out: int, on_features: bool) -> WeightGeneration:
        candidate = self.candidate if on_features else ()
        return WeightGeneration(tokens, out, self.config.d_model, candidate)

    def _summary(self, kernel: dict) -> SequenceSummary:
        c, width = self.config.pooling, self.config.d_model
        pool = make_pool(c, width, self.config.heads, kernel)
        return SequenceSummary(pool, width)

    def _layer(self, index: int, tokens: int, summary: int, kernel: dict) -> InterFormerLayer:
        c, width = self.config, self.config.d_model
        interaction = WukongLayer(
            tokens + summary, width, c.wukong.fmb, c.wukong.lcb, c.wukong.rank, c.wukong.mlp
        )
        # CompSkip (Kunlun): even layers have the feed-forward alone, odd ones attention alone.
        has_ffn = not c.comp_skip or index % 2 == 0
        has_attention = not c.comp_skip or index % 2 == 1
        seen = {"window": c.window, "causal": c.causal, "cls": c.cls_tokens > 0}
        blocks = [
            SequenceBlock(
                GDPA(width, c.heads, c.summary_tokens, c.ffn_tokens) if has_ffn else None,
                SequenceAttention(width, c.heads, **seen, **kernel) if has_attention else None,
            )
            for _ in self.sequences
        ]
        generates = blocks and has_ffn
        generation = self._generation(tokens, c.summary_tokens, index == 0) if generates else None
        summaries = [self._summary(kernel) for _ in self.sequences]
        return InterFormerLayer(generation, interaction, summaries, blocks)

    def forward(self, batch: Batch) -> Tensor:
        """batch of B rows -> float32 logits [B, tasks], in the schema's order of tasks."""
        sparse, events = self.embeddings(batch)
        x = self.feature_tokens(batch, sparse)
        states = []
        if self.sequences:
            cls = x.new_zeros(len(x), 0, x.shape[2]) if self.cls is None else self.cls(x)
            lengths = torch.full((len(x),), cls.shape[1])
            cls_layout = JaggedLayout.from_lengths(lengths, x.device)
            for feature, tokens in zip(self.sequences, self.event_tokens, strict=True):
                sequence = batch.sequences[feature.name]
                s = tokens(events[feature.name], sequence.age, sequence.dense)
                states.append(self._start(sequence, s, cls, cls_layout))
        for layer in self.layers:
            x, states = layer(x, states)
        summary = [head(state) for head, state in zip(self.final, states, strict=True)]
        return self.heads(torch.cat([x, *summary], dim=1))

    def flops(self, lengths: dict[str, Tensor], batch_size: int) -> dict[str, float]:
        """Forward FLOPs of a batch by part; see `gem.model.flops.model_flops`."""
        return model_flops(self, lengths, batch_size)

    def _start(
        self, sequence: JaggedSequence, s: Tensor, cls: Tensor, cls_layout: JaggedLayout
    ) -> SequenceState:
        """Makes what all layers reuse."""
        layout, rotary = sequence.layout, None
        if self.config.rotary:
            head_dim = self.config.d_model // self.config.heads
            rotary = position_and_time_rotary(distance_from_end(layout), sequence.age, head_dim)
        blocks, recent = Blocks(layout, BLOCK), LastRows(layout, self.config.pooling.recent)
        return SequenceState(s, cls, layout, cls_layout, blocks, recent, rotary)


def summary_size(config: ModelConfig) -> int:
    """Tokens in one sequence's summary: CLS, recent events, pooled."""
    return config.cls_tokens + config.pooling.recent + config.pooling.tokens


def make_pool(config: PoolingConfig, width: int, heads: int, kernel: dict) -> nn.Module:
    if config.kind is PoolingKind.hsp:
        return HSP(width, heads, config.queries, config.tokens, config.rank, **kernel)
    return PMA(width, heads, config.tokens, **kernel)


def position_and_time_rotary(position: Tensor, age: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Half of a head's planes turn with the position, half with log time (Kunlun's ROTE).

    ROTE rotates by `log(1 + dt / t_scale)`; here t_scale is a minute and dt the age, so that the
    angle between two events grows with the ratio of their ages.

    Returns:
        cos, sin: each [rows, head_dim / 2] float32.
    """
    half = head_dim // 2
    by_position = rotary_angles(position, half, base=10_000.0)
    by_time = rotary_angles((age / 60.0).log1p() * TIME_TURNS, half, base=100.0)
    cos, sin = zip(by_position, by_time, strict=True)
    return torch.cat(cos, dim=-1), torch.cat(sin, dim=-1)


TIME_TURNS = 4.0

"""Forward FLOPs of a batch from its true lengths: two per multiply-add of every matrix product.

Norms, activations and embedding reads count nothing. Attention counts the pairs that the mask lets
through, so that no padding and no skipped tile flatters the figure.
"""

from torch import Tensor, nn

from gem.config import ModelConfig
from gem.model.interformer import InterFormerLayer, SequenceSummary, WeightGeneration
from gem.model.layers import TokenLinear
from gem.model.pooling import HSP
from gem.model.sequence import SequenceBlock
from gem.model.wukong import WukongLayer


def visible_pairs(lengths: Tensor, left: int | None, right: int | None) -> int:
    """Query-key pairs of self-attention with a window, summed over samples.

    lengths [B] on the host; query i sees keys i - left .. i + right, None is unbounded.
    """
    t = lengths.long()

    def seen(reach: int | None) -> Tensor:  # sum over i < t of min(i, reach)
        inner = t if reach is None else t.clamp(max=reach + 1)
        total = inner * (inner - 1) // 2
        return total if reach is None else total + (t - inner) * reach

    return int((t + seen(left) + seen(right)).sum())


def model_flops(model: nn.Module, lengths: dict[str, Tensor], batch_size: int) -> dict[str, float]:
    """Forward FLOPs of a `Gem` by part.

    Args:
        lengths: by sequence, events per sample [B] on the host.
        batch_size: B.

    Returns:
        embedding (tokens from ids and values), attention (scores and weighted sums alone),
        sequence (projections and GDPA), interaction (Wukong, weight generation), heads.
    """
    config = model.config
    width = config.d_model
    total = dict.fromkeys(("embedding", "attention", "sequence", "interaction", "heads"), 0.0)
    projection = 2 * config.embedding_dim * width
    sparse, layouts = model.feature_tokens.tokens - 1, []
    total["embedding"] += batch_size * sparse * projection
    total["embedding"] += batch_size * linear_flops(model.feature_tokens.dense)
    total["heads"] += batch_size * linear_flops(model.heads)
    for feature, tokens in zip(model.sequences, model.event_tokens, strict=True):
        events = lengths[feature.name]
        per_event = len(feature.fields) * projection + linear_flops(tokens)
        total["embedding"] += int(events.sum()) * per_event
        layouts.append(events)
    if model.cls is not None:
        total["interaction"] += batch_size * _generation(model.cls, width)
    for layer in model.layers:
        _add_layer(total, layer, layouts, batch_size, config)
    for summary, events in zip(model.final, layouts, strict=True):
        _add_summary(total, summary, events, batch_size, config)
    return total


def linear_flops(module: nn.Module) -> int:
    """Of one row through all linear layers of a module."""
    return sum(2 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _generation(module: WeightGeneration, width: int) -> int:
    out = module.compress.weight.shape[0]
    return _token_linear(module.compress, width) + out * linear_flops(module.gate)


def _token_linear(module: nn.Module, width: int) -> int:
    return 2 * module.weight.numel() * width if isinstance(module, TokenLinear) else 0


def _add_layer(
    total: dict[str, float],
    layer: InterFormerLayer,
    layouts: list[Tensor],
    batch_size: int,
    config: ModelConfig,
) -> None:
    width = config.d_model
    total["interaction"] += batch_size * _wukong(layer.interaction, width)
    if layer.generation is not None:
        total["interaction"] += batch_size * _generation(layer.generation, width)
    for summary, block, events in zip(layer.summaries, layer.sequences, layouts, strict=True):
        _add_summary(total, summary, events, batch_size, config)
        _add_block(total, block, events, batch_size, config)


def _wukong(layer: WukongLayer, width: int) -> int:
    tokens, rank = layer.fmb.projection.shape
    fm = 2 * 2 * tokens * rank * width
    linear = _token_linear(layer.lcb, width) + _token_linear(layer.residual, width)
    return fm + linear_flops(layer.fmb.mlp) + linear


def _add_summary(
    total: dict[str, float],
    summary: SequenceSummary,
    events: Tensor,
    batch_size: int,
    config: ModelConfig,
) -> None:
    rows, width = int(events.sum()), config.d_model
    pool = summary.pool
    queries = tokens = pool.queries
    if isinstance(pool, HSP):
        rank, tokens, _ = pool.compress.token_weights.shape
        kronecker = 2 * rank * tokens * width * (queries + width)
        total["sequence"] += batch_size * kronecker
    total["attention"] += 4 * queries * width * rows
    total["sequence"] += 4 * width * width * rows  # keys and values
    total["sequence"] += 2 * width * width * queries * (batch_size + 1)  # output, queries
    gated = batch_size * (config.cls_tokens + config.pooling.recent + tokens)
    total["sequence"] += gated * linear_flops(summary.gate)


def _add_block(
    total: dict[str, float],
    block: SequenceBlock,
    events: Tensor,
    batch_size: int,
    config: ModelConfig,
) -> None:
    rows, cls, width = int(events.sum()), batch_size * config.cls_tokens, config.d_model
    if (gdpa := block.feed_forward) is not None:
        generated = _token_linear(gdpa.tokens, width) + gdpa.keys * linear_flops(gdpa.weights)
        total["sequence"] += 4 * gdpa.keys * width * (rows + cls) + batch_size * generated
    if (attention := block.attention) is not None:
        pairs = visible_pairs(events, attention.left, attention.right)
        total["attention"] += 4 * width * (pairs + rows * config.cls_tokens)
        total["sequence"] += width * width * (8 * rows + 4 * cls)

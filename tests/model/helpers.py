"""A small schema and random batches of it, built without files."""

import torch
from torchrec import KeyedJaggedTensor

from gem.attention import JaggedLayout
from gem.config import ModelConfig, PoolingConfig, WukongConfig
from gem.data import Batch, JaggedSequence, Schema
from gem.data.schema import DenseFeature, IdFeature, Pooling, SequenceFeature, Task


def small_schema() -> Schema:
    """Two sequences, names that clash with nn.Module's own, a shared and an own table."""
    return Schema(
        user="user",
        time="time",
        tasks=[Task("click"), Task("conversion", given="click")],
        dense=[DenseFeature("price"), DenseFeature("hour")],
        sparse=[
            IdFeature("item", rows=50, table="items"),
            IdFeature("type", rows=5),
            IdFeature("tags", rows=20, pooling=Pooling.sum),
        ],
        sequences=[
            SequenceFeature(
                "items",
                [IdFeature("item", rows=50, table="items"), IdFeature("type", rows=4)],
                dense=[DenseFeature("price")],
            ),
            SequenceFeature("keys", [IdFeature("item", rows=50, table="items")]),
        ],
    )


def small_config(**changes) -> ModelConfig:
    values = {
        "name": "test",
        "d_model": 16,
        "embedding_dim": 8,
        "layers": 2,
        "heads": 2,
        "summary_tokens": 3,
        "cls_tokens": 2,
        "ffn_tokens": 5,
        "window": 4,
        "pooling": PoolingConfig(queries=3, tokens=3, recent=2),
        "wukong": WukongConfig(fmb=3, lcb=2, rank=4, mlp=[16]),
        "head_mlp": [16],
    }
    return ModelConfig(**{**values, **changes})


def jagged_ids(keys: list[str], rows: list[int], lengths: torch.Tensor) -> KeyedJaggedTensor:
    values = [torch.randint(r, (int(n.sum()),)) for r, n in zip(rows, lengths, strict=True)]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=lengths.flatten().int(),
        length_per_key=[len(v) for v in values],
    )


def random_batch(schema: Schema, lengths: dict[str, list[int]], seed: int = 0) -> Batch:
    """B samples whose sequences have the given lengths; id lists of 0 to 2 ids."""
    torch.manual_seed(seed)
    batch = len(next(iter(lengths.values())))
    counts = torch.randint(0, 3, (len(schema.sparse), batch))
    sequences = {}
    for feature in schema.sequences:
        events = torch.tensor(lengths[feature.name], dtype=torch.int64)
        total = int(events.sum())
        fields = feature.fields
        sequences[feature.name] = JaggedSequence(
            ids=jagged_ids(
                [f.name for f in fields],
                [f.rows for f in fields],
                events.expand(len(fields), -1),
            ),
            age=torch.rand(total) * 1e6,
            dense=torch.randn(total, len(feature.dense)),
            layout=JaggedLayout.from_lengths(events, "cpu"),
        )
    return Batch(
        dense=torch.randn(batch, len(schema.dense)),
        sparse=jagged_ids([f.name for f in schema.sparse], [f.rows for f in schema.sparse], counts),
        sequences=sequences,
        labels=torch.randint(0, 2, (batch, len(schema.tasks))).float(),
        weights=torch.ones(batch, len(schema.tasks)),
        probabilities=None,
        users=torch.arange(batch),
        times=torch.arange(batch),
        rows=torch.zeros(batch, 2, dtype=torch.int64),
    )

"""The model as a whole: shapes, gradients, independence of samples, counting."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from gem.attention import JaggedLayout
from gem.config import ModelConfig, PoolingConfig, PoolingKind
from gem.data.schema import Schema
from gem.model.flops import visible_pairs
from gem.model.gem import Gem
from tests.model.helpers import random_batch, small_config, small_schema

LENGTHS = {"items": [3, 0, 40, 1, 0], "keys": [0, 2, 5, 0, 0]}
CONFIGS = {
    "plain": {},
    "hsp": {"pooling": PoolingConfig(PoolingKind.hsp, queries=6, tokens=3, rank=2, recent=1)},
    "comp_skip": {"comp_skip": True},
    "no_cls_no_recent": {"cls_tokens": 0, "pooling": PoolingConfig(recent=0)},
    "bidirectional": {"causal": False, "window": 3},
    "full_attention_no_rotary": {"window": None, "rotary": False},
    "no_sequences": {"use_sequences": False},
    "same_width": {"embedding_dim": 16},
}


def make(**changes) -> Gem:
    """A model whose heads are past their start, at which every logit is its prior's."""
    torch.manual_seed(0)
    model = Gem(small_schema(), small_config(**changes))
    for head in model.heads.heads:
        torch.nn.init.normal_(head[-1].weight)
    return model


def test_predictions_start_at_the_prior():
    schema = small_schema()
    schema.tasks[0].prior = 0.05
    logits = Gem(schema, small_config())(random_batch(schema, LENGTHS))
    wanted = torch.tensor([0.05, 0.5]).expand(5, 2)
    torch.testing.assert_close(logits.sigmoid(), wanted)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_every_parameter_gets_a_finite_gradient(changes):
    model = make(**changes)
    batch = random_batch(model.schema, LENGTHS)
    logits = model(batch)
    assert logits.shape == (5, 2) and logits.dtype == torch.float32
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_sample_does_not_see_its_neighbours(changes):
    """The logits of sample 2 stay when everything of the other samples changes."""
    model = make(**changes).eval()
    batch = random_batch(model.schema, LENGTHS, seed=1)
    alone = take(batch, model.schema, 2)
    torch.testing.assert_close(model(batch)[2:3], model(alone), rtol=1e-4, atol=1e-5)


def take(batch, schema: Schema, i: int):
    """Sample i of a batch as a batch of one."""
    sequences = {}
    for feature in schema.sequences:
        sequence = batch.sequences[feature.name]
        rows = slice(int(sequence.layout.offsets[i]), int(sequence.layout.offsets[i + 1]))
        sequences[feature.name] = replace(
            sequence,
            ids=one(sequence.ids, i),
            age=sequence.age[rows],
            dense=sequence.dense[rows],
            layout=JaggedLayout.from_lengths(sequence.layout.lengths[i : i + 1], "cpu"),
        )
    return replace(
        batch,
        dense=batch.dense[i : i + 1],
        sparse=one(batch.sparse, i),
        sequences=sequences,
        labels=batch.labels[i : i + 1],
        weights=batch.weights[i : i + 1],
    )


def one(ids, i: int):
    from torchrec import JaggedTensor, KeyedJaggedTensor

    parts = {key: jagged.to_dense()[i] for key, jagged in ids.to_dict().items()}
    return KeyedJaggedTensor.from_jt_dict(
        {k: JaggedTensor(v, lengths=torch.tensor([len(v)])) for k, v in parts.items()}
    )


def test_history_matters_and_its_order_too():
    model = make().eval()
    batch = random_batch(model.schema, LENGTHS)
    logits = model(batch)
    sequence = batch.sequences["items"]
    older = replace(
        batch,
        sequences={**batch.sequences, "items": replace(sequence, age=sequence.age * 10 + 3600)},
    )
    changed = (model(older) - logits).abs().amax(dim=1)
    assert (changed[[0, 2, 3]] > 1e-6).all()
    assert (changed[[1, 4]] < 1e-6).all()


def test_without_sequences_history_is_not_read():
    model = make(use_sequences=False).eval()
    batch = random_batch(model.schema, LENGTHS)
    other = random_batch(model.schema, {"items": [9] * 5, "keys": [1] * 5}, seed=3)
    mixed = replace(batch, sequences=other.sequences)
    assert torch.equal(model(batch), model(mixed))


def test_candidate_and_history_share_a_table():
    names = [n for n, _ in make().embeddings.named_parameters()]
    assert sum("table_items." in n for n in names) == 1, names
    assert not any("bags" in n and "items" in n for n in names), names


@pytest.mark.parametrize("lengths", [[0, 0], [1, 0], [300, 0]], ids=str)
def test_extreme_lengths(lengths):
    model = make()
    batch = random_batch(model.schema, {"items": lengths, "keys": lengths[::-1]})
    logits = model(batch)
    assert torch.isfinite(logits).all()
    logits.sum().backward()


@pytest.mark.parametrize("window", [(None, None), (None, 0), (2, 0), (0, 0), (3, 1), (100, 100)])
def test_visible_pairs_counts_the_mask(window):
    lengths = torch.tensor([0, 1, 2, 7, 30])
    left, right = window
    expected = 0
    for n in lengths.tolist():
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        seen = torch.ones(n, n, dtype=torch.bool)
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
        expected += int(seen.sum())
    assert visible_pairs(lengths, left, right) == expected


@pytest.mark.parametrize(
    "changes",
    [CONFIGS["plain"], CONFIGS["hsp"], CONFIGS["no_sequences"]],
    ids=["plain", "hsp", "no_sequences"],
)
def test_flops_agree_with_the_products_that_pytorch_counts(changes):
    """All but attention, whose padded chunks PyTorch would count: within a few per cent."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make(**changes)
    lengths = {"items": [64 - 2] * 4, "keys": [64 - 2] * 4}
    batch = random_batch(model.schema, lengths)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    counts = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in counts.items() if "attention" not in str(op))
    parts = model.flops({k: torch.tensor(v) for k, v in lengths.items()}, 4)
    assert parts["sequence"] > 0 or not model.sequences
    without_attention = sum(parts.values()) - parts["attention"]
    assert without_attention == pytest.approx(counted, rel=0.05)


MODELS = sorted(Path("conf/model").glob("*.yaml"))


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_every_size_builds_on_meta_and_counts(path):
    config = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path))
    )
    with torch.device("meta"):
        model = Gem(small_schema(), config, device=torch.device("meta"))
    dense = sum(p.numel() for n, p in model.named_parameters() if "embeddings" not in n)
    flops = model.flops({"items": torch.tensor([500]), "keys": torch.tensor([50])}, 1)
    assert all(p.is_meta for p in model.parameters())
    assert dense > 10_000 and all(v > 0 for v in flops.values())

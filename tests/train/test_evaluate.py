"""Metrics of a split whose users and batches are spread over ranks; predictions to parquet."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from gem.config import OptimConfig
from gem.train.distributed import open_ranks
from gem.train.evaluate import evaluate, filled, predict
from gem.train.metrics import gauc, logit, normalized_entropy
from gem.train.sharding import shard
from tests.train.helpers import MemoryLoader, TinyModel, make_batch, make_schema, take_rows

TASKS = make_schema().tasks
OPTIM = OptimConfig(lr=0.01, embedding_lr=0.1)
WHOLE = 50


def _batches(rank, world_size):
    """A split of 50 rows in batches of 10; of two ranks the second has 20 rows and two batches
    that are empty, one of them its first."""
    whole = make_batch(WHOLE, seed=3)
    cuts = [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]
    if world_size == 2:
        cuts = [(0, 10), (10, 20), (20, 30)] if rank == 0 else [(0, 0), (30, 40), (40, 50)]
        cuts.append((0, 0))
    return [take_rows(whole, *cut) for cut in cuts]


def _evaluate(rank, world_size, directory=None):
    with open_ranks(torch.device("cpu")) as ranks:
        torch.manual_seed(0)
        model = shard(TinyModel(), OPTIM, ranks)
        loader = MemoryLoader(_batches(rank, world_size), "test")
        if directory is not None:
            return predict(model, loader, TASKS, ranks, torch.float32, directory)
        return evaluate(model, loader, TASKS, ranks, torch.float32)


def test_two_ranks_find_what_one_finds(two_ranks):
    """Users have rows on both ranks and in several batches; GAUC counts them whole."""
    one = _evaluate(0, 1)
    first, second = two_ranks(_evaluate, 2)
    assert second is None
    for task, metrics in one.items():
        assert first[task].keys() == metrics.keys()
        for name, value in metrics.items():
            assert first[task][name] == pytest.approx(value, rel=1e-6, nan_ok=True), (task, name)


def test_metrics_are_those_of_the_split_in_one_piece(ranks):
    torch.manual_seed(0)
    model = shard(TinyModel(), OPTIM, ranks).eval()
    found = evaluate(model, MemoryLoader(_batches(0, 1), "test"), TASKS, ranks, torch.float32)
    whole = make_batch(WHOLE, seed=3)
    with torch.no_grad():
        z = model(whole).double().numpy()
    y, w = whole.labels.double().numpy(), whole.weights.double().numpy()
    clicked = w[:, 1] > 0
    assert found["click"]["rows"] == WHOLE
    assert found["conversion"]["rows"] == clicked.sum() < WHOLE
    assert found["conversion"]["base_rate"] == pytest.approx(y[clicked, 1].mean())
    expected = normalized_entropy(z[clicked, 1], y[clicked, 1])
    assert found["conversion"]["ne"] == pytest.approx(expected, rel=1e-6)
    expected = gauc(z[:, 0], y[:, 0], whole.users.numpy())
    assert found["click"]["gauc"] == pytest.approx(expected, rel=1e-6)
    truth = logit(whole.probabilities[:, 0].numpy())
    assert found["click"]["oracle_ne"] == pytest.approx(normalized_entropy(truth, y[:, 0]))
    assert "oracle_ne" not in found["conversion"]


def test_evaluation_leaves_the_model_training_and_the_loader_reusable(ranks):
    model = shard(TinyModel(dropout=0.5), OPTIM, ranks).train()
    loader = MemoryLoader(_batches(0, 1), "valid")
    first = evaluate(model, loader, TASKS, ranks, torch.float32, limit=2)
    assert model.training
    assert first["click"]["rows"] == 20
    assert evaluate(model, loader, TASKS, ranks, torch.float32)["click"]["rows"] == WHOLE
    again = evaluate(model, loader, TASKS, ranks, torch.float32, limit=2)
    assert again["click"] == first["click"]


def test_a_split_without_rows_has_no_metrics(ranks):
    model = shard(TinyModel(), OPTIM, ranks)
    found = evaluate(model, MemoryLoader([], "test"), TASKS, ranks, torch.float32)
    assert found["click"]["rows"] == 0 and np.isnan(found["click"]["ne"])


def test_a_single_process_leaves_empty_batches_out(ranks):
    loader = MemoryLoader(_batches(1, 2))
    seen = [(batch.batch_size, real) for batch, real in filled(loader, ranks)]
    assert sorted(seen) == [(10, True), (10, True)]


def test_predictions_hold_every_row_once(two_ranks, tmp_path):
    assert two_ranks(_evaluate, 2, tmp_path) == [WHOLE, WHOLE]
    tables = [pq.read_table(path) for path in sorted(tmp_path.glob("part-*.parquet"))]
    assert [len(table) for table in tables] == [30, 20]
    rows = [row for table in tables for row in table.to_pylist()]
    whole = make_batch(WHOLE, seed=3)
    assert [row["row"] for row in rows] == whole.rows[:, 1].tolist()
    assert [row["user"] for row in rows] == whole.users.tolist()
    assert [row["time"] for row in rows] == whole.times.tolist()
    assert [row["click_label"] for row in rows] == whole.labels[:, 0].tolist()
    for row, weight, label in zip(rows, whole.weights[:, 1], whole.labels[:, 1], strict=True):
        assert row["conversion_label"] == (float(label) if weight else None)
        assert 0 < row["click"] < 1


def test_predictions_are_sigmoids_of_the_logits(ranks, tmp_path):
    torch.manual_seed(0)
    model = shard(TinyModel(), OPTIM, ranks)
    batch = make_batch(6, 0)
    predict(model, MemoryLoader([batch]), TASKS, ranks, torch.float32, tmp_path)
    scores = pq.read_table(tmp_path / "part-00000-of-00001.parquet")["click"].to_numpy()
    with torch.no_grad():
        expected = model.eval()(replace(batch)).sigmoid()[:, 0].numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-6)

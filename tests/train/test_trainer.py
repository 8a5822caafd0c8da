"""The loop: it learns, reports, validates, stops early."""

import math

import pytest
import torch

from gem.config import OptimConfig, TrainerConfig
from gem.data.schema import Task
from gem.train.flops import step_flops
from gem.train.loss import TaskLoss
from gem.train.metrics import normalized_entropy
from gem.train.optim import decays, lr_factor
from gem.train.progress import plain, read_rows, short, train_line
from gem.train.trainer import total_steps
from tests.train.helpers import make_batch
from tests.train.test_resume import make_trainer


def test_it_learns(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, dropout=0.0, epochs=15, log_every=6)
    trainer.fit()
    rows = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "train"]
    assert rows[-1]["ne"]["click"] < 0.5 < 0.9 < rows[0]["ne"]["click"]
    assert rows[-1]["auc"]["click"] > 0.9


def test_a_row_says_what_its_interval_was(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, dropout=0.0, max_steps=4, log_every=4)
    batches = trainer.loaders["train"].batches[:]
    kept = []
    add = trainer.window.add
    trainer.window.add = lambda *args: (kept.append(args), add(*args))
    trainer.fit()
    (row,) = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "train"]
    z = torch.cat([logits.detach() for _, logits, *_ in kept]).double().numpy()
    y = torch.cat([batch.labels for batch, *_ in kept]).double().numpy()
    w = torch.cat([batch.weights for batch, *_ in kept]).double().numpy()
    for i, task in enumerate(("click", "conversion")):
        expected = normalized_entropy(z[:, i], y[:, i], w[:, i])
        assert row["ne"][task] == pytest.approx(expected, rel=1e-9)
    assert row["loss"] == pytest.approx(sum(float(k[3]) for k in kept) / 4, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(sum(float(k[4]) for k in kept) / 4, rel=1e-6)
    assert row["step"] == 4 and row["epoch"] == pytest.approx(4 / len(batches))
    tokens = sum(batch.sequences["clicks"].layout.rows for batch, *_ in kept)
    assert row["tokens_per_s"] / row["examples_per_s"] == pytest.approx(tokens / 64)
    flops = sum(
        step_flops(trainer.model.module, {"clicks": b.sequences["clicks"].layout.lengths}, 16)
        for b, *_ in kept
    )
    ratio = row["tflops"] * 1e12 / row["examples_per_s"]
    assert ratio == pytest.approx(flops / 64)
    assert 0 <= row["data_wait"] <= 1 and row["memory_gib"] > 0 and row["mfu"] is None


def test_the_best_validation_is_kept_and_patience_ends_the_run(tmp_path, ranks, monkeypatch):
    values = iter([0.9, 0.8, 0.85, 0.81, 0.7])

    def scripted(*args):
        value = next(values)
        metrics = {"ne": value, "auc": 0.6, "gauc": 0.6, "calibration": 1.0, "loss": 0.3}
        return {"click": metrics | {"ne": 5.0}, "conversion": metrics}

    monkeypatch.setattr("gem.train.trainer.evaluate", scripted)
    trainer = make_trainer(
        tmp_path, ranks, valid_every=2, patience=2, monitor_task="conversion", keep_last=1
    )
    trainer.fit()
    assert trainer.progress.step == 8, "two validations after the best at step 4"
    assert (trainer.progress.best, trainer.progress.best_step) == (0.8, 4)
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("*"))
    assert found == ["best", "last", "step-4", "step-8"]
    assert trainer.checkpoints.path("best").name == "step-4"
    assert trainer.checkpoints.path("last").name == "step-8"
    assert not trainer.interrupted


def test_an_undefined_validation_is_no_best(tmp_path, ranks, monkeypatch):
    nothing = dict.fromkeys(("ne", "auc", "gauc", "calibration", "loss"), math.nan)
    monkeypatch.setattr(
        "gem.train.trainer.evaluate", lambda *args: {"click": nothing, "conversion": nothing}
    )
    trainer = make_trainer(tmp_path, ranks, max_steps=2, valid_every=1)
    trainer.fit()
    assert trainer.progress.best is None
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["split"] == "valid" and row["ne"]["click"] is None and row["loss"] == 0


def test_loss_is_the_mean_over_the_rows_of_a_task():
    loss = TaskLoss([Task("a", loss_weight=2.0), Task("b")], 1, torch.device("cpu"))
    logits = torch.tensor([[0.0, 3.0], [0.0, 0.0]], requires_grad=True)
    labels, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    value = loss(loss.sums(logits, labels, weights), weights.sum(0))
    assert value.item() == pytest.approx(2 * math.log(2) + math.log(2))
    value.backward()
    assert logits.grad[0, 1] == 0


def test_a_task_without_a_row_adds_nothing():
    loss = TaskLoss([Task("a"), Task("b")], 1, torch.device("cpu"))
    logits = torch.zeros(3, 2, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]] * 3)
    value = loss(loss.sums(logits, torch.ones(3, 2), weights), weights.sum(0))
    assert value.item() == pytest.approx(math.log(2))
    value.backward()
    assert logits.grad[:, 1].eq(0).all()


def test_learning_rate_warms_up_and_falls_on_a_cosine():
    factors = [lr_factor(step, 110, 10, 0.1) for step in range(110)]
    assert factors[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert factors[10] == 1.0 and factors[-1] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    middle = 10 + 99 // 2
    assert factors[middle] == pytest.approx(0.55, abs=0.01)
    assert lr_factor(0, 5, 0, 0.0) == 1.0 and lr_factor(9, 5, 0, 0.0) == 0.0
    assert lr_factor(0, 1, 0, 0.5) == 1.0


def test_norms_biases_and_seeds_do_not_decay():
    matrix, vector = torch.zeros(3, 3), torch.zeros(3)
    assert decays("layers.0.linear.weight", matrix)
    assert not decays("layers.0.norm.weight", vector)
    assert not decays("layers.0.linear.bias", vector)
    assert not decays("features.bias", matrix)
    assert not decays("pool.seeds", matrix)
    assert not decays("pool.queries", matrix)
    assert not decays("feed_forward.key_bias", matrix)


def test_decay_pulls_matrices_alone(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks)
    decay = OptimConfig(lr=0.1, embedding_lr=0.1).weight_decay
    groups = trainer.optimizers.adamw.param_groups
    assert [group["weight_decay"] for group in groups] == [decay, 0.0]
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [
        [(16, 25), (2, 16)],
        [(16,), (2,)],
    ]


def test_clipping_scales_to_the_norm_and_reports_it_before(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks)
    trainer.optimizers.config.clip_norm = 0.5
    for parameter in trainer.optimizers.dense:
        parameter.grad = torch.full_like(parameter, 3.0)
    count = sum(p.numel() for p in trainer.optimizers.dense)
    norm, norms = trainer.optimizers.clip()
    trainer.optimizers.config.clip_norm = 1.0
    assert norm.item() == pytest.approx(3 * count**0.5)
    assert norms["mlp.0.bias"].item() == pytest.approx(3 * 16**0.5)
    clipped = torch.cat([p.grad.flatten() for p in trainer.optimizers.dense])
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_total_steps():
    assert total_steps(TrainerConfig(max_steps=5, epochs=2), 10) == 5
    assert total_steps(TrainerConfig(max_steps=None, epochs=2), 10) == 20
    assert total_steps(TrainerConfig(max_steps=50, epochs=None), 10) == 50


def test_step_flops_count_the_backward():
    class Model(torch.nn.Module):
        def flops(self, lengths, batch_size):
            return {"attention": 10.0, "heads": 100.0 * batch_size}

    assert step_flops(Model(), {}, 2) == 3 * 200 + 3.5 * 10
    assert step_flops(torch.nn.Linear(1, 1), {}, 2) is None


def test_the_line_of_an_interval():
    row = {
        "step": 50,
        "loss": 0.25,
        "ne": {"click": 0.8, "conversion": math.nan},
        "auc": {"click": 0.75, "conversion": math.nan},
        "grad_norm": 0.123456,
        "examples_per_s": 12345.0,
        "tokens_per_s": 2.5e6,
        "tflops": 1.5,
        "mfu": math.nan,
        "memory_gib": 1.25,
        "data_wait": 0.031,
    }
    assert train_line(row, 1000) == (
        "step   50/1000  loss 0.2500  click NE 0.8000 AUC 0.7500  conversion NE - AUC -  "
        "grad 0.123  12.3k ex/s  2.5M tok/s  1.5 TFLOP/s  1.25 GiB  data 3%"
    )
    assert "1.5 TFLOP/s (MFU 30.0%)" in train_line(row | {"mfu": 0.3}, 1000)


def test_numbers_for_people_and_programs():
    assert [short(v) for v in (0.5, 999, 1234, 5.6e6, 7e9)] == ["0.5", "999", "1.23k", "5.6M", "7G"]
    assert plain({"a": {"b": math.nan}, "c": math.inf, "d": 1}) == {
        "a": {"b": None},
        "c": None,
        "d": 1,
    }


def test_a_step_keeps_nothing_of_the_last_one(tmp_path, ranks):
    """Gradients are dropped, and the window holds no graph."""
    trainer = make_trainer(tmp_path, ranks)
    trainer.step(make_batch(8, 0))
    assert all(parameter.grad is None for parameter in trainer.optimizers.dense)
    kept = [t for tensors in trainer.window._kept.values() for t in tensors]
    assert kept and not any(t.requires_grad for t in kept)

"""A step that is not finite is named, updates nothing, and stops the run or does not."""

from dataclasses import replace

import pytest
import torch

from gem.train.guard import Guard, NonFiniteError
from tests.train.helpers import make_batch
from tests.train.test_resume import make_trainer, snapshot


def poisoned(batch, row):
    dense = batch.dense.clone()
    dense[row] = float("inf")
    return replace(batch, dense=dense)


def weights(trainer):
    return {n: v for n, v in snapshot(trainer).items() if not n.endswith("/step")}


def test_the_error_names_step_task_and_row_one_step_late(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, dropout=0.0)
    trainer.step(make_batch(8, 0))
    before = weights(trainer)
    trainer.step(poisoned(make_batch(8, 1, first_row=40), 3))
    after = weights(trainer)
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{name} was touched by a bad step"
    message = (
        "step 2: the loss of click, conversion is not finite; rows of its batch: file 0 row 43"
    )
    with pytest.raises(NonFiniteError, match=message):
        trainer.step(make_batch(8, 2))


def test_a_skipped_step_leaves_no_trace(tmp_path, ranks, caplog):
    """The weights are those of a run that never saw the batch."""
    with_it = make_trainer(tmp_path, ranks, dropout=0.0, on_nonfinite="skip")
    with_it.step(make_batch(8, 0))
    with_it.step(poisoned(make_batch(8, 1), 3))
    with_it.progress.step = 1
    with_it.step(make_batch(8, 2))
    with_it.guard.check()
    without = make_trainer(tmp_path, ranks, dropout=0.0)
    without.step(make_batch(8, 0))
    without.step(make_batch(8, 2))
    a, b = snapshot(with_it), snapshot(without)
    for name, value in b.items():
        assert torch.equal(a[name], value), name
    assert with_it.guard.skipped == 1
    assert "skipped: step 2" in caplog.text


def test_a_gradient_alone_is_named_by_its_parameter(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, dropout=0.0)
    layer = trainer.model.module.mlp[3]
    handle = layer.weight.register_hook(lambda g: g * float("nan"))
    before = snapshot(trainer)
    trainer.step(make_batch(8, 0))
    handle.remove()
    after = snapshot(trainer)
    for name in ("/model/mlp.0.weight", "/model/mlp.3.weight"):
        assert torch.equal(before[name], after[name])
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient of mlp.3.weight is not finite"):
        trainer.guard.check()


def test_tables_are_kept_from_their_own_bad_gradient(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, dropout=0.0)
    batch = make_batch(8, 0)
    tables = trainer.optimizers.tables[0]
    tables.register_forward_hook(
        lambda m, i, out: out.register_hook(lambda g: g * float("nan")) and None, prepend=True
    )
    before = [w.clone() for w in tables.split_embedding_weights()]
    trainer.step(batch)
    for old, new in zip(before, tables.split_embedding_weights(), strict=True):
        assert torch.equal(old, new)
    with pytest.raises(NonFiniteError, match="embedding tables is not finite"):
        trainer.guard.check()


def test_a_bad_step_is_never_saved(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks, max_steps=2, save_every=2, valid_every=None)
    batches = trainer.loaders["train"].batches
    batches[:] = [poisoned(batch, 0) for batch in batches]
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_nothing_is_said_of_finite_steps(tmp_path, ranks):
    guard = Guard("error", ["click"], torch.device("cpu"))
    guard.check()
    trainer = make_trainer(tmp_path, ranks)
    for i in range(3):
        trainer.step(make_batch(8, i))
    trainer.guard.check()
    assert trainer.guard.skipped == 0

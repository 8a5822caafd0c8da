"""A checkpoint is whole or absent, found by the names users have, and of this model or refused."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gem.train import checkpoint as module
from gem.train.checkpoint import (
    Checkpoints,
    differences,
    find_checkpoint,
    load_tensors,
    random_state,
    run_directory,
    set_random_state,
)
from gem.train.distributed import open_ranks
from tests.train.test_resume import interrupt_after, make_trainer


def save(checkpoints, step, best=False, value=None):
    tensors = {"w": torch.full((3,), float(step if value is None else value))}
    return checkpoints.save(tensors, {"rank": 0}, {"step": step}, best)


def test_keeps_the_last_and_the_best(tmp_path, ranks):
    checkpoints = Checkpoints(tmp_path, ranks, keep_last=2)
    for step in (1, 2, 10, 11, 12):
        save(checkpoints, step, best=step == 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best",
        "last",
        "step-11",
        "step-12",
        "step-2",
    ]
    assert os.readlink(tmp_path / "last") == "step-12", "relative, so that a run can be moved"
    assert os.readlink(tmp_path / "best") == "step-2"
    back = {"w": torch.zeros(3)}
    load_tensors(checkpoints.path("best"), back, ranks)
    assert back["w"].tolist() == [2.0] * 3


def test_a_step_already_saved_is_not_written_again(tmp_path, ranks):
    checkpoints = Checkpoints(tmp_path, ranks, keep_last=2)
    save(checkpoints, 3)
    save(checkpoints, 3, best=True, value=99)
    back = {"w": torch.zeros(3)}
    load_tensors(checkpoints.path("best"), back, ranks)
    assert back["w"].tolist() == [3.0] * 3


def _killed_while_writing(directory, when):
    with open_ranks(torch.device("cpu")) as ranks:
        checkpoints = Checkpoints(directory, ranks, keep_last=2)
        save(checkpoints, 1)
        if when == "tensors":
            original = module.dcp.save

            def dies(*args, **kwargs):
                original(*args, **kwargs)
                os._exit(9)

            module.dcp.save = dies
        elif when == "own":
            original = torch.save

            def half(value, target):
                if isinstance(target, Path):
                    target.write_bytes(b"half")
                    os._exit(9)
                original(value, target)

            torch.save = half
        else:
            module.Checkpoints._point = lambda *args: os._exit(9)
        save(checkpoints, 2)


@pytest.mark.parametrize("when", ["tensors", "own", "pointer"])
def test_killed_while_writing_leaves_whole_checkpoints_only(tmp_path, when):
    # Forked before this process opens a group of its own.
    process = multiprocessing.get_context("fork").Process(
        target=_killed_while_writing, args=(tmp_path, when)
    )
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 9
    assert find_checkpoint(str(tmp_path)).name == "step-1"
    names = {p.name for p in tmp_path.glob("step-*")}
    assert names == ({"step-1"} if when != "pointer" else {"step-1", "step-2"})
    with open_ranks(torch.device("cpu")) as ranks:
        for path in tmp_path.glob("step-*"):
            back = {"w": torch.zeros(3)}
            load_tensors(path, back, ranks)
            assert back["w"].tolist() == [float(path.name[5:])] * 3
        save(Checkpoints(tmp_path, ranks, keep_last=2), 3)
    assert not list(tmp_path.glob(".step-*")), "what was left is cleared away"
    assert find_checkpoint(str(tmp_path)).name == "step-3"


def test_a_full_disk_is_one_sentence(tmp_path, ranks, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(OSError, match="cannot write the checkpoint .*No space left on device"):
        save(Checkpoints(tmp_path, ranks, keep_last=2), 1)
    assert not list(tmp_path.glob("step-*"))


def test_find_takes_a_run_its_checkpoints_or_one_of_them(tmp_path, ranks):
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", ranks, keep_last=5)
    save(checkpoints, 1, best=True)
    last = save(checkpoints, 2)
    for given in (run, run / "checkpoints", last, run / "checkpoints" / "last"):
        assert find_checkpoint(str(given)) == last
    assert find_checkpoint(str(run), prefer="best").name == "step-1"
    assert run_directory(last) == run
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere: there is no such directory"):
        find_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="neither a checkpoint nor a run directory"):
        find_checkpoint(str(tmp_path))


def test_tensors_of_another_model_are_one_sentence(tmp_path, ranks):
    path = save(Checkpoints(tmp_path, ranks, keep_last=2), 1)
    for tensors in ({"v": torch.zeros(3)}, {"w": torch.zeros(4)}):
        with pytest.raises(ValueError, match="does not hold this model") as caught:
            load_tensors(path, tensors, ranks)
        assert "\n" not in str(caught.value)


def test_differences_name_the_key_and_both_values():
    saved = {"model": {"d": 1, "mlp": [8, 8]}, "data": {"schema": {"sparse": [{"rows": 5}]}}}
    now = {"model": {"d": 2, "mlp": [8]}, "data": {"schema": {"sparse": [{"rows": 6}]}}}
    assert differences(saved, now) == [
        "model.d was 1 and is 2",
        "model.mlp was [8, 8] and is [8]",
        "data.schema.sparse[0].rows was 5 and is 6",
    ]
    assert differences(saved, json.loads(json.dumps(saved))) == []
    assert differences({"a": 1}, {}) == ["a was 1 and is (absent)"]


def test_random_states_survive_a_file(tmp_path):
    import random

    device = torch.device("cpu")
    np.random.normal()
    random.gauss(0, 1)
    torch.save(random_state(device), tmp_path / "state.pt")
    expected = (random.gauss(0, 1), np.random.normal(), torch.randn(3))
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), device)
    found = (random.gauss(0, 1), np.random.normal(), torch.randn(3))
    assert found[:2] == expected[:2] and torch.equal(found[2], expected[2])


def test_a_checkpoint_holds_the_state_of_both_optimizers(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks)
    interrupt_after(trainer, 3)
    trainer.fit()
    fresh = make_trainer(tmp_path, ranks)
    fresh.load(trainer.checkpoints.path("last"))
    for a, b in zip(trainer.optimizers.tables, fresh.optimizers.tables, strict=True):
        for (x,), (y,) in zip(a.split_optimizer_states(), b.split_optimizer_states(), strict=True):
            assert torch.equal(x, y) and x.any()
    for p, q in zip(trainer.optimizers.dense, fresh.optimizers.dense, strict=True):
        a, b = trainer.optimizers.adamw.state[p], fresh.optimizers.adamw.state[q]
        assert a["step"] == b["step"] == 3
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) and b["exp_avg_sq"].any()

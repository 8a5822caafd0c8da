"""Whole runs of the command line, on a data set of a few hundred rows."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from gem.train.app import run
from gem.train.cli import register
from gem.train.distributed import run_stamp

ROOT = Path(__file__).parents[2]
SMALL = [
    "data.dataset.num_rows=800",
    "data.dataset.num_users=40",
    "data.dataset.num_items=100",
    "data.dataset.max_length=32",
    "data.split.valid_fraction=0.1",
    "data.split.test_fraction=0.1",
    "data.workers=0",
    "data.batch_size=32",
    "data.eval_batch_size=64",
    "model.layers=1",
    "trainer.device=cpu",
    "trainer.threads=1",
]
TEST_KEYS = {"ne", "auc", "gauc", "calibration", "rows", "base_rate", "oracle_ne", "oracle_auc"}

register()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def train(cache, tmp_path):
    """Runs a config in this process."""

    def go(*overrides, output="run"):
        given = [f"paths.output={tmp_path / output}", f"paths.cache={cache}", *SMALL, *overrides]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("train", overrides=given)
        return run(config)

    return go


def command(cache, *overrides, torchrun=0, **env):
    base = [sys.executable]
    if torchrun:
        base += ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)]
        base += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return {
        "args": [*base, str(ROOT / "train.py"), f"paths.cache={cache}", *SMALL, *overrides],
        "env": os.environ | {"OMP_NUM_THREADS": "1"} | env,
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def test_train_then_evaluate_and_predict(train, tmp_path, capsys):
    objective = train("debug=fast", "data.dataset.num_rows=800", "data.batch_size=32")
    directory = tmp_path / "run"
    names = {path.name for path in directory.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "result.json", "curves.png", "checkpoints"}
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((directory / "tensorboard").iterdir())

    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["data"]["schema"]["tasks"][1]["given"] == "click"
    assert "${" not in (directory / "config.yaml").read_text()

    result = json.loads((directory / "result.json").read_text())
    assert result.keys() == {"steps", "seconds", "examples_per_s", "test"}
    assert result["steps"] == 4 and result["seconds"] > 0 and result["examples_per_s"] > 0
    assert result["test"].keys() == {"click", "conversion"}
    for metrics in result["test"].values():
        assert metrics.keys() == TEST_KEYS
    assert result["test"]["click"]["rows"] == 80
    assert result["test"]["click"]["oracle_auc"] > 0.5
    assert result["test"]["conversion"]["rows"] < 80

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(r["split"], r["step"]) for r in rows] == [
        ("train", 2),
        ("valid", 2),
        ("train", 4),
        ("valid", 4),
    ]
    assert objective == min(r["ne"]["click"] for r in rows if r["split"] == "valid")

    printed = capsys.readouterr().out
    assert re.search(r"step 2/4  loss \d", printed)
    assert "oracle NE" in printed

    train("mode=eval", f"ckpt={directory}", output="eval")
    again = json.loads((tmp_path / "eval" / "result.json").read_text())
    assert again["test"] == result["test"], "the best checkpoint is the one that was tested"

    train("mode=predict", f"ckpt={directory}", "split=valid", output="scores")
    (path,) = (tmp_path / "scores" / "predictions").glob("*.parquet")
    table = pq.read_table(path)
    assert len(table) == 80
    assert table.column_names == [
        "file",
        "row",
        "user",
        "time",
        "click",
        "click_label",
        "conversion",
        "conversion_label",
    ]

    with pytest.raises(ValueError, match="is of another model: model.d_model was 32 and is 16"):
        train("mode=eval", f"ckpt={directory}", "model.d_model=16")
    with pytest.raises(ValueError, match=r"of another model: data.schema.sequences.*max_length"):
        train("mode=eval", f"ckpt={directory}", "data.schema.sequences.0.max_length=7")
    with pytest.raises(ValueError, match=r"is of another run: seed was 0 and is 1"):
        train("debug=fast", f"resume={directory}", "seed=1", "data.batch_size=32")
    train("debug=fast", f"resume={directory}", "trainer.max_steps=6", "data.batch_size=32")
    assert json.loads((directory / "result.json").read_text())["steps"] == 6
    assert "trainer.max_steps was 4 and is 6" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"neither a checkpoint nor a run"):
        train("mode=eval", f"ckpt={cache_of(tmp_path)}")


def cache_of(path):
    (path / "empty").mkdir()
    return path / "empty"


def test_the_same_seed_is_the_same_run(train, tmp_path):
    keys = ["trainer.max_steps=3", "trainer.log_every=1", "logger.tensorboard=false"]
    losses = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(*keys, f"seed={seed}", output=name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1] != losses[2]


def test_overfitting_two_batches(train, tmp_path):
    train("debug=overfit", "trainer.max_steps=30", "logger.tensorboard=false", "optim.lr=5e-3")
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train_rows = [row for row in rows if row["split"] == "train"]
    assert train_rows[-1]["loss"] < 0.5 * train_rows[0]["loss"]


def test_a_signal_saves_and_the_same_command_with_resume_goes_on(cache, tmp_path):
    """Killed in mid-epoch by SIGTERM; one directory, no row twice, the end as without the stop."""
    keys = [
        "trainer.epochs=2",
        "trainer.max_steps=15",
        "trainer.log_every=1",
        "trainer.valid_every=null",
        "trainer.save_every=null",
        "logger.tensorboard=false",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    process = subprocess.Popen(**command(cache, *keys), cwd=tmp_path)
    line = "none"
    for line in process.stdout:
        if line.startswith("step  3/15"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert line.startswith("step  3/15"), err
    assert process.returncode == 128 + signal.SIGTERM, err
    told = re.search(r"stopped after step (\d+); go on with the same command and resume=(\S+)", out)
    assert told and Path(told[2]) == tmp_path / "run"
    assert "Traceback" not in err

    keys[-1] = f"resume={told[2]}"
    done = subprocess.run(**command(cache, *keys), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a run that goes well is quiet"
    assert f"resumed at step {told[1]}" in done.stdout
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["split"] == "train"] == list(range(1, 16))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 15
    assert not (tmp_path / "outputs").exists(), "resumed in its own directory"


def test_torchrun_makes_one_directory_and_two_ranks_one_result(cache, tmp_path):
    keys = ["trainer.max_steps=2", "trainer.log_every=1", "name=two"]
    done = subprocess.run(**command(cache, *keys, torchrun=2), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (directory,) = (tmp_path / "outputs" / "two").iterdir()
    assert json.loads((directory / "result.json").read_text())["test"]["click"]["rows"] == 80
    assert "2 steps on 2 x cpu" in done.stdout
    assert done.stdout.count("step 1/2") == 1
    assert len(list((directory / "checkpoints" / "last").resolve().glob("rank-*.pt"))) == 2


def test_multirun_trains_one_after_the_other(cache, tmp_path):
    keys = ["seed=0,1", "trainer.max_steps=1", "logger.tensorboard=false", "name=sweep"]
    given = command(cache, *keys)
    given["args"].insert(2, "-m")
    done = subprocess.run(**given, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    results = sorted((tmp_path / "outputs" / "sweep").glob("sweep_*/*/result.json"))
    assert [path.parent.name for path in results] == ["0", "1"]


def test_an_error_in_the_data_is_one_sentence(cache, tmp_path):
    keys = ["data=parquet", f"data.dataset.path={tmp_path / 'none'}", "data.workers=0"]
    args = command(cache, *keys)
    args["args"] = [a for a in args["args"] if not a.startswith("data.dataset.") or "path" in a]
    done = subprocess.run(**args, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "none" in done.stderr


@pytest.mark.parametrize("backend", ["triton", "tlx", "nope"])
def test_a_backend_that_cannot_serve_the_run_is_named_before_the_data_are_made(
    train, tmp_path, monkeypatch, backend
):
    monkeypatch.setattr("gem.train.app.make_loaders", lambda *args, **kwargs: pytest.fail("data"))
    with pytest.raises(ValueError, match=f"attention.backend={backend} (cannot serve|is not one)"):
        train(f"attention.backend={backend}")
    assert not (tmp_path / "run").exists()


def test_one_stamp_for_all_ranks(two_ranks):
    first, second = two_ranks(_stamp)
    assert first == second
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first)


def _stamp(rank):
    os.environ.pop("GEM_RUN_STAMP", None)
    try:
        return run_stamp()
    finally:
        os.environ.pop("GEM_RUN_STAMP", None)


def test_a_group_ends_with_its_run(train):
    train("trainer.max_steps=1", "logger.tensorboard=false")
    assert not torch.distributed.is_initialized()

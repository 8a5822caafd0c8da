"""Every file in conf/ composes into valid dataclasses; a wrong one is explained in a sentence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from gem.config import Config, Mode, TrainerConfig
from gem.train.app import to_config
from gem.train.cli import config_keys, explain, register

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
FILES = sorted(f"{path.parent.relative_to(CONF)}={path.stem}" for path in CONF.glob("*/**/*.yaml"))

register()


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(compose("train", overrides=["paths.output=run", *overrides]))


# What a file leaves to the user.
REQUIRED = {"data=parquet": ["data.dataset.path=rows"]}


def complaint(*overrides: str) -> str:
    with pytest.raises(Exception) as caught:
        composed(*overrides)
    text = explain(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_the_defaults_compose():
    config = composed()
    assert isinstance(config, Config)
    assert config.mode is Mode.train
    assert (config.model.name, config.data.name) == ("gem_small", "synthetic")
    assert config.name == "gem_small-synthetic"


@pytest.mark.parametrize("option", FILES)
def test_every_file_composes(option):
    assert isinstance(composed(option, *REQUIRED.get(option, [])), Config)


def test_every_group_of_the_layout_is_there():
    groups = {option.split("=")[0] for option in FILES}
    assert groups >= {
        "attention",
        "data",
        "debug",
        "experiment",
        "hydra",
        "logger",
        "model",
        "optim",
        "paths",
        "trainer",
    }


def test_experiments_and_debug_override_the_rest():
    assert not composed("experiment=no_sequences").model.use_sequences
    assert composed("debug=fast").trainer.max_steps == 4
    assert composed("debug=fast", "trainer.max_steps=7").trainer.max_steps == 7


def test_types_arrive_as_declared():
    config = composed("optim.lr=1e-3", "trainer.epochs=null", "trainer.max_steps=5")
    assert config.optim.lr == 1e-3
    assert config.trainer.epochs is None
    assert isinstance(config.model.pooling.queries, int)
    assert config.data.schema.tasks[1].given == "click"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optim.lrr=1"], "there is no key optim.lrr; did you mean optim.lr?"),
        (["trainer.lr=1"], "there is no key trainer.lr; did you mean optim.lr?"),
        (["lr=1"], "there is no key lr; did you mean optim.lr?"),
        (["modl=gem_small"], "there is no key modl; did you mean model"),
        (["+model.foo=1"], "there is no key model.foo"),
        (["model=gem_smal"], "model has no option gem_smal .*did you mean gem_small?"),
        (["experiment=nothing"], r"experiment has no option nothing \(there are .*no_sequences"),
        (["trainer.max_steps=abc"], "trainer.max_steps: Value 'abc'.*Integer"),
        (["mode=trian"], r"mode: Invalid value 'trian', expected one of \[train, eval, predict\]"),
        (["seed=null"], "seed cannot be null"),
        (["~optim"], "optim has no value"),
        (["model.name"], "cannot read 'model.name'"),
        (["optim.betas=[0.9]"], "optim.betas="),
        (["optim.lr=-1"], "optim.lr=-1.0; it must be at least 0"),
        (["trainer.device=tpu"], "trainer.device=tpu; it must be one of auto, cpu, cuda"),
        (["trainer.overfit_batches=0"], "trainer.overfit_batches=0; it must be at least 1"),
        (["trainer.patience=2", "trainer.valid_every=null"], "trainer.patience=2 .*valid_every"),
        (["trainer.epochs=null"], "trainer.max_steps and trainer.epochs are both null"),
        (["trainer.monitor_task=buy"], r"trainer.monitor_task=buy is no task.*click"),
        (["data=parquet"], "data.dataset.path has no value"),
        (["mode=eval"], "mode=eval needs ckpt="),
        (["mode=eval", "ckpt=a", "resume=b"], "resume continues training"),
        (["ckpt=a"], "mode=train does not read ckpt"),
        (
            ["model.heads=2", "model.d_model=33"],
            "model.d_model=33 does not divide into model.heads=2",
        ),
        (["model.pooling.queries=9"], "queries=9"),
        (["data.split.valid_fraction=0.95"], "leave rows to train on"),
        (["data.split.test_from=5"], "data.split takes either"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_config_is_one_sentence(overrides, sentence):
    assert re.search(sentence.replace("?", r"\?"), complaint(*overrides))


def test_the_keys_for_suggestions_are_those_of_the_dataclasses():
    keys = config_keys()
    assert {"seed", "model.wukong.fmb", "trainer.max_steps", "paths.cache"} <= set(keys)
    assert len([k for k in keys if k.startswith("trainer.")]) == len(
        TrainerConfig.__dataclass_fields__
    )


def test_the_command_line_exits_2_with_the_sentence_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "optim.lrr=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr == "error: there is no key optim.lrr; did you mean optim.lr?\n"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_train_py_stays_short():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 80

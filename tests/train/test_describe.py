"""Sizes on the meta device agree with the model that is built."""

import pytest
from hydra import compose, initialize_config_dir

from gem.model.gem import Gem
from gem.train.app import to_config
from gem.train.cli import register
from gem.train.describe import CONF, describe


def config_of(*overrides: str):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(compose("train", overrides=["paths.output=.", *overrides]))


def test_parameters_are_those_of_the_built_model():
    config = config_of()
    model = Gem(config.data.schema, config.model)
    counted = describe(config, events=10)["parameters"]
    assert sum(counted.values()) == sum(p.numel() for p in model.parameters())
    tables = sum(config.data.schema.tables().values()) * config.model.embedding_dim
    assert counted["embedding tables"] == tables


@pytest.mark.parametrize("model", ["gem_small", "gem_base", "gem_large"])
def test_a_step_costs_about_three_forward_passes_and_grows_with_the_history(model):
    config = config_of(f"model={model}")
    short, long = (describe(config, events)["flops"] for events in (10, 1000))
    assert 3 * long["forward"] <= long["training step"] <= 3.5 * long["forward"]
    assert long["attention"] > 50 * short["attention"]
    assert long["sequence"] > 2 * short["sequence"]
    assert long["heads"] == short["heads"]

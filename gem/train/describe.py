"""How big a model is, without building it: parameters and FLOPs per example, on the meta device.

python -m gem.train.describe model=gem_large data=synthetic --events 500
"""

import argparse
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from gem.config import Config
from gem.model.gem import Gem
from gem.train.app import to_config
from gem.train.cli import register
from gem.train.flops import step_flops

CONF = Path(__file__).resolve().parents[2] / "conf"


def describe(config: Config, events: int) -> dict[str, dict[str, float]]:
    """Sizes of a config's model.

    Args:
        config: its model and data schema count.
        events: length of every sequence of the example.

    Returns:
        `parameters`: of the tables and of the dense part. `flops`: of the forward pass of one
        example by part, and of a whole training step.
    """
    with torch.device("meta"):
        model = Gem(config.data.schema, config.model, device=torch.device("meta"))
    parameters = {"embedding tables": 0, "dense": 0}
    for name, parameter in model.named_parameters():
        table = name.startswith(("embeddings.bags", "embeddings.events"))
        parameters["embedding tables" if table else "dense"] += parameter.numel()
    lengths = {sequence.name: torch.tensor([events]) for sequence in model.sequences}
    flops = model.flops(lengths, batch_size=1)
    flops["forward"] = sum(flops.values())
    flops["training step"] = step_flops(model, lengths, 1)
    return {"parameters": parameters, "flops": flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500, help="length of every sequence")
    parser.add_argument("overrides", nargs="*", help="as for train.py, such as model=gem_large")
    arguments = parser.parse_intermixed_args()
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_config(compose("train", overrides=["paths.output=.", *arguments.overrides]))
    sizes = describe(config, arguments.events)
    table = Table("", "count", title=f"{config.model.name}, {config.data.name}")
    for name, count in sizes["parameters"].items():
        table.add_row(f"parameters, {name}", f"{count:,}")
    for name, count in sizes["flops"].items():
        table.add_row(f"FLOPs per example, {name}", f"{count / 1e6:,.2f} M")
    Console().print(table)


if __name__ == "__main__":
    main()

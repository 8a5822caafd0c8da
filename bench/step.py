"""Where a training step's time goes: attention, embedding tables, dense blocks, optimizer, data.

    python -m bench.step data=synthetic        # any overrides of train.py

Shares come from PyTorch's profiler over real steps of the trainer, data from the time that the
loop waited for batches.
"""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.quality import versions
from gem.config import Config
from gem.data import Loader, make_loaders
from gem.model.gem import Gem
from gem.train.app import to_config
from gem.train.checkpoint import Checkpoints
from gem.train.cli import register
from gem.train.compiling import compile_dense
from gem.train.distributed import Ranks, open_ranks, pick_device
from gem.train.progress import Reporter
from gem.train.sharding import shard
from gem.train.trainer import Trainer

CONF = Path(__file__).resolve().parent.parent / "conf"

# The outermost profiled operation with one of these in its name takes all that runs inside it.
PARTS = {
    "attention": ("gem::attention", "_AttentionBackward"),
    "embedding tables": ("fbgemm", "embedding", "SplitLookup", "CppNode"),
    "optimizer": ("Optimizer.step", "_foreach", "_fused_adamw"),
}


def part_of(name: str) -> str | None:
    for part, marks in PARTS.items():
        if any(mark in name for mark in marks):
            return part
    return None


def shares(events) -> dict[str, float]:
    """Milliseconds per part from a profile's event tree; what no part claims is `dense blocks`."""
    total = dict.fromkeys([*PARTS, "dense blocks"], 0.0)

    def visit(event) -> None:
        part = part_of(event.name)
        if part is not None:
            total[part] += event.cpu_time_total / 1e3
            return
        total["dense blocks"] += event.self_cpu_time_total / 1e3
        for child in event.cpu_children:
            visit(child)

    for event in events:
        if event.cpu_parent is None and event.device_type == DeviceType.CPU:
            visit(event)
    return total


def open_loaders(config: Config, ranks: Ranks) -> dict[str, Loader]:
    place = {"rank": ranks.rank, "world_size": ranks.world_size, "device": ranks.device}
    return make_loaders(config.data, seed=config.seed, **place)


def precision_of(config: Config, device: torch.device) -> str:
    name = config.trainer.precision
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name


def make_trainer(config: Config, ranks: Ranks, loaders: dict[str, Loader], folder: Path) -> Trainer:
    """As `gem.train.app` makes it, with nothing to report to."""
    torch.manual_seed(config.seed)
    attention = config.attention
    model = Gem(
        config.data.schema,
        config.model,
        backend=attention.backend,
        deterministic=attention.deterministic,
    )
    if config.trainer.compile:
        compile_dense(model)
    model = shard(model, config.optim, ranks)
    quiet = Console(quiet=True)
    return Trainer(
        model,
        loaders,
        config.data.schema.tasks,
        config.trainer,
        config.optim,
        getattr(torch, precision_of(config, ranks.device)),
        ranks,
        Reporter(config.logger, folder, False, quiet),
        Checkpoints(folder / "checkpoints", ranks, 1),
        {},
    )


def measure(overrides: list[str], steps: int, warmup: int) -> dict:
    """Profiles `steps` training steps on the CPU after `warmup` others."""
    register()
    with TemporaryDirectory() as folder, initialize_config_dir(str(CONF), version_base="1.3"):
        extra = ["trainer.device=cpu", f"paths.output={folder}"]
        config = to_config(compose("train", overrides=[*extra, *overrides]))
        with open_ranks(pick_device("cpu")) as ranks:
            trainer = make_trainer(config, ranks, open_loaders(config, ranks), Path(folder))
            batches = iter(trainer.loaders["train"])
            for _ in range(warmup):
                trainer.step(next(batches))
            waited = rows = events = 0
            began = time.perf_counter()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(steps):
                    asked = time.perf_counter()
                    batch = next(batches)
                    waited += time.perf_counter() - asked
                    rows += batch.batch_size
                    events += sum(s.layout.rows for s in batch.sequences.values())
                    trainer.step(batch)
                seconds = time.perf_counter() - began
            parts = shares(profiler.events())
    share = {name: ms / (seconds * 1e3) for name, ms in parts.items()}
    share["Python between operators"] = 1 - sum(share.values()) - waited / seconds
    return {
        "ms_per_step": seconds / steps * 1e3,
        "rows_per_s": rows / seconds,
        "events_per_s": events / seconds,
        "share": share | {"waiting for data": waited / seconds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    result = measure(arguments.overrides, arguments.steps, arguments.warmup)
    console = Console()
    rates = "{ms_per_step:.0f} ms per step, {rows_per_s:.0f} rows/s, {events_per_s:,.0f} events/s"
    console.print(rates.format(**result))
    table = Table("part", "share of the step")
    for part, share in sorted(result["share"].items(), key=lambda item: -item[1]):
        table.add_row(part, f"{share:.1%}")
    console.print(table)
    if arguments.out is not None:
        command = " ".join(["python -m bench.step", *sys.argv[1:]])
        report = {"machine": versions(), "command": command, "date": date.today().isoformat()}
        arguments.out.write_text(json.dumps(report | result, indent=2) + "\n")


if __name__ == "__main__":
    main()

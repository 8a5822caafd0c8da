"""Training steps by attention backend: examples per second, MFU, and what takes the time.

    python -m bench.train --out bench/results/h200_train.json
    python -m bench.train --models gem_base --density 0.5 --batch-size 256 --backends tlx triton
    python -m bench.train --brief --deadline 150 optim.clip_norm=null    # any overrides of train.py

Every backend starts from the same weights and sees the same batches. Loss and gradients of its
first step are held against float32; a backend that is off gets no speed. The others of a model and
a density are measured in turns: a few steps of each in every round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from bench import machine, rivals
from bench.first_step import LOSS_TOLERANCE
from bench.lost import DeviceLost
from bench.quality import versions
from bench.roofline import measure_ceilings
from bench.step import CONF
from bench.timing import side_stream
from bench.train_data import CHECK_ROWS, load, to_overrides
from bench.train_group import Clock, Group, Setting
from gem.train.app import to_config
from gem.train.cli import register
from gem.train.distributed import open_ranks, pick_device

ROOT = Path(__file__).resolve().parent
BACKENDS = ("tlx", "triton", *rivals.RIVALS, "torch")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.train", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["gem_small", "gem_base"], metavar="NAME", help="conf/model")
    known = [*BACKENDS, "auto", "reference"]
    add("--backends", nargs="+", default=list(BACKENDS), choices=known)
    add("--batch-size", type=int, default=512)
    add("--max-length", type=int, default=2048, help="of the browse history, at most 2048")
    add("--density", type=float, nargs="+", default=[0.1, 0.5], help="mean over longest history")
    add("--batches", type=int, default=8, help="that steps go through, again and again")
    add("--warmup", type=int, default=5, help="steps of a backend before the rounds")
    add("--steps", type=int, default=10, help="of a backend that are measured, in all rounds")
    add("--rounds", type=int, default=5, help="that share the steps; in each all take their turn")
    slower = "of a backend's steps; a slower one takes fewer, at least one"
    add("--entry-seconds", type=float, default=8.0, metavar="SECONDS", help=slower)
    add("--deadline", type=float, metavar="SECONDS", help="start nothing that would end later")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--out", type=Path, default=ROOT / "results" / "train.json", help="JSON to write")
    add("--brief", action="store_true", help="no table at the end")
    add("overrides", nargs="*", help="of train.py")
    return parser.parse_intermixed_args(argv)


def groups(setting: Setting) -> Iterator[Group]:
    """One for each density and model; models of a density share their batches."""
    args = setting.args
    for density in args.density:
        overrides = to_overrides(args, density, str(setting.folder))
        data = None  # the last ones' memory is free before new ones come
        for model in args.models:
            config = to_config(compose("train", overrides=[f"model={model}", *overrides]))
            data = data or load(config, setting.ranks, args.batches)
            yield Group(setting, config, data, {"model": model, "density": density})


def line(entry: dict[str, Any]) -> str:
    start = f"{entry['model']} density {entry['density']} {entry['backend']}: "
    if reason := entry.get("skipped"):
        return start + reason
    errors = (
        "loss error {loss:.1e}, gradients {gradient_ratio:.2f} of what is allowed "
        "({worst_gradient_error:.1e})"
    ).format(**entry["errors"])
    if reason := entry.get("broken"):
        return f"{start}BROKEN, {reason} ({errors})"
    memory = "" if entry["peak_gib"] is None else f", {entry['peak_gib']:.1f} GiB"
    return (
        f"{start}{entry['ms_per_step']:.1f} ms, {entry['examples_per_s']:,.0f} examples/s, "
        f"MFU {entry['mfu']:.1%}, attention {entry['attention_share']:.0%} of GPU time, "
        f"idle {entry['share']['idle']:.0%}{memory}; {errors} ({entry['took_s']:.0f} s)"
    )


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds per step by part."""
    measured = [entry for entry in found if "parts_ms" in entry]
    parts = dict.fromkeys(part for entry in measured for part in entry["parts_ms"])
    made = Table("model", "density", "backend", "ms", *parts, "idle")
    for entry in measured:
        cells = [entry["model"], str(entry["density"]), entry["backend"]]
        figures = [entry["ms_per_step"], *(entry["parts_ms"].get(part, 0.0) for part in parts)]
        made.add_row(*cells, *(f"{ms:.2f}" for ms in [*figures, entry["idle_ms"]]))
    return made


def describe(device: torch.device, command: str) -> dict[str, Any]:
    """The results file without entries."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with side_stream(device):
        ceilings = measure_ceilings(dtype, device)
    return {
        "machine": machine.describe(device) | versions(),
        "command": command,
        "date": date.today().isoformat(),
        "ceilings": ceilings,
        "check_rows": CHECK_ROWS,
        "loss_tolerance": LOSS_TOLERANCE,
        "entries": [],
    }


def add_group(group: Group, report: dict[str, Any], out: Path) -> bool:
    """Measures, prints and writes a group's entries; whether the GPU has survived."""
    try:
        for entry in group.measure():
            print(line(entry), flush=True)
    except DeviceLost as lost:
        print(f"the GPU is lost: {lost.reason}; leave out {lost.contender}")
        return False
    finally:
        report["entries"] += group.entries
        out.write_text(json.dumps(report, indent=2) + "\n")
    return True


def run(args: argparse.Namespace, command: str) -> int:
    """Measures; 0, or 3 where a backend took the GPU with it."""
    clock = Clock(time.monotonic(), args.deadline)
    register()
    rivals.register()
    with (
        TemporaryDirectory() as folder,
        initialize_config_dir(str(CONF), version_base="1.3"),
        open_ranks(pick_device(args.device)) as ranks,
    ):
        report = describe(ranks.device, command)
        rates = "ceilings: {matmul_tflops:.0f} TFLOP/s, {copy_tb_s:.2f} TB/s"
        print(rates.format(**report["ceilings"]), flush=True)
        ceiling = report["ceilings"]["matmul_tflops"]
        for group in groups(Setting(args, ranks, ceiling, Path(folder), clock)):
            if not add_group(group, report, args.out):
                return 3
            del group  # its batches, before the next ones come
        seconds = time.monotonic() - clock.began
        print(f"{args.out}: {len(report['entries'])} entries in {seconds:.0f} s")
    if not args.brief:
        Console().print(table(report["entries"]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return run(parse(argv), shlex.join(["python", "-m", "bench.train", *argv]))


if __name__ == "__main__":
    sys.exit(main())

"""Training steps by attention backend: examples per second, MFU, and what takes the time.

    python -m bench.train --out bench/results/h200_train.json
    python -m bench.train --models gem_base --density 0.5 --batch-size 256 --backends tlx triton
    python -m bench.train --brief --deadline 150 optim.clip_norm=null    # any overrides of train.py

Every backend starts from the same weights and sees the same batches. Loss and gradients of its
first step are held against float32; a backend that is off gets no speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench import machine, rivals
from bench.first_step import LOSS_TOLERANCE, first_step, is_right, make_judge
from bench.quality import versions
from bench.rivals import kept
from bench.roofline import measure_ceilings
from bench.step import CONF, make_trainer, precision_of, shares
from bench.timing import short_reason, side_stream, synchronize
from bench.trace import busy_ms, by_part, kernels, longest
from bench.train_data import CHECK_ROWS, Data, load, to_overrides, unseen
from gem.config import Config
from gem.data import Batch, Loader
from gem.train.app import to_config
from gem.train.cli import register
from gem.train.distributed import Ranks, open_ranks, pick_device
from gem.train.flops import step_flops
from gem.train.trainer import Trainer

ROOT = Path(__file__).resolve().parent
BACKENDS = ("tlx", "triton", *rivals.RIVALS, "torch")
PROFILED = slice(1, 4)  # of the measured steps


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.train", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["gem_small", "gem_base"], metavar="NAME", help="conf/model")
    known = [*BACKENDS, "auto", "reference"]
    add("--backends", nargs="+", default=list(BACKENDS), choices=known)
    add("--batch-size", type=int, default=512)
    add("--max-length", type=int, default=2048, help="of the browse history, at most 2048")
    add("--density", type=float, nargs="+", default=[0.1, 0.5], help="mean over longest history")
    add("--batches", type=int, default=8, help="that take turns")
    add("--warmup", type=int, default=5, help="steps")
    add("--steps", type=int, default=10, help="that are measured")
    add("--entry-seconds", type=float, default=8.0, help="fewer steps where they take longer")
    add("--deadline", type=float, metavar="SECONDS", help="start nothing that would end later")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--out", type=Path, default=ROOT / "results" / "train.json", help="JSON to write")
    add("--brief", action="store_true", help="no table at the end")
    add("overrides", nargs="*", help="of train.py")
    return parser.parse_intermixed_args(argv)


def time_steps(trainer: Trainer, batches: Sequence[Batch], device: torch.device) -> list[float]:
    """Milliseconds of each step, from one's end to the next one's."""
    synchronize(device)
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for batch in batches:
            trainer.step(batch)
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        trainer.step(batch)
        event.record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def profile_steps(
    trainer: Trainer, batches: Sequence[Batch], device: torch.device
) -> dict[str, Any]:
    """Milliseconds per step by part (of the GPU, or of a CPU), busy in all, longest kernels."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for batch in batches:
            trainer.step(batch)
        synchronize(device)
    if device.type == "cuda":
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found = list(kernels(json.loads(path.read_text())))
        parts, busy, top = by_part(found), busy_ms(found), longest(found, 12)
    else:
        parts, top = shares(profiler.events()), []
        busy = sum(parts.values())
    count = len(batches)
    for kernel in top:
        kernel["ms"], kernel["calls"] = kernel["ms"] / count, kernel["calls"] / count
    return {
        "parts_ms": {name: ms / count for name, ms in parts.items()},
        "busy_ms": busy / count,
        "longest_kernels": top,
    }


def measure(
    trainer: Trainer, data: Data, args: argparse.Namespace, ceiling: float, base: int
) -> dict[str, Any]:
    """Speed, memory and parts of a trainer's steps after its first.

    Args:
        ceiling: TFLOP/s of a matrix product. base: bytes that were allocated before the trainer.
    """
    device = trainer.ranks.device
    turns = cycle(data.batches)

    def some(count: int) -> list[Batch]:
        return [unseen(batch) for batch in islice(turns, count)]

    began, seconds = time.perf_counter(), 0.0
    for number, batch in enumerate(some(args.warmup)):
        seconds = time_steps(trainer, [batch], device)[0] / 1e3
        # The first one's time is that of compilers, and says nothing of the others'.
        if number and time.perf_counter() - began > args.entry_seconds / 2:
            break
    count = max(1, min(args.steps, int(args.entry_seconds / seconds)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    turns = cycle(data.batches)
    times = time_steps(trainer, some(count), device)
    peak = None
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - base) / 2**30
    flops = [flops_of(trainer, batch) for batch in islice(cycle(data.batches), count)]
    window = PROFILED if count >= PROFILED.stop else slice(0, 1)
    batches = list(islice(cycle(data.batches), count))[window]
    found = profile_steps(trainer, [unseen(batch) for batch in batches], device)
    trainer.guard.check()
    in_parts, step = sum(found["parts_ms"].values()), statistics.mean(times[window])
    ms = statistics.median(times)
    tflops = statistics.median(f / t for f, t in zip(flops, times, strict=True)) / 1e9
    return {
        "ms_per_step": ms,
        "examples_per_s": data.facts["batch_size"] / ms * 1e3,
        "tflops": tflops,
        "mfu": tflops / ceiling,
        "flops_per_step": statistics.median(flops),
        "peak_gib": peak,
        "attention_share": found["parts_ms"].get("attention", 0.0) / in_parts,
        "idle_ms": max(0.0, step - found["busy_ms"]),
        "share": {name: part / step for name, part in found["parts_ms"].items()}
        | {"idle": max(0.0, 1 - found["busy_ms"] / step)},
        **found,
        "steps_ms": times,
    }


def flops_of(trainer: Trainer, batch: Batch) -> float:
    """Forward and backward, by `gem.train.flops`: true lengths and visible pairs alone."""
    lengths = {name: s.layout.lengths for name, s in batch.sequences.items()}
    return step_flops(trainer.model.module, lengths, batch.batch_size)


def clean(device: torch.device) -> int:
    """Drops what an earlier trainer left; the bytes that stay allocated."""
    kept.clear()
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def with_backend(config: Config, backend: str, precision: str | None = None) -> Config:
    trainer = config.trainer if precision is None else replace(config.trainer, precision=precision)
    return replace(config, attention=replace(config.attention, backend=backend), trainer=trainer)


def start_trainer(
    config: Config,
    ranks: Ranks,
    loaders: dict[str, Loader],
    folder: Path,
    backend: str,
    precision: str | None = None,
) -> Trainer:
    return make_trainer(with_backend(config, backend, precision), ranks, loaders, folder)


def entries(
    args: argparse.Namespace, ranks: Ranks, ceiling: float, folder: str, began: float
) -> Iterator[dict[str, Any]]:
    """One result after the other; one that is missing has a reason in `skipped` or `broken`."""
    device, took = ranks.device, [0.0]
    for density in args.density:
        overrides = to_overrides(args, density, folder)
        data = None  # the last ones' memory is free before new ones come
        for model in args.models:
            config = to_config(compose("train", overrides=[f"model={model}", *overrides]))
            data = data or load(config, ranks, args.batches)
            judge = None
            for backend in args.backends:
                started = time.monotonic()
                entry = {"model": model, "density": density, "backend": backend, **data.facts}
                # Some entries compile for long, which says nothing about the next one.
                end = started - began + 1.5 * statistics.median(took)
                if args.deadline is not None and end > args.deadline:
                    yield entry | {"skipped": "no time left before the deadline"}
                    continue
                base = clean(device)
                start = partial(start_trainer, config, ranks, data.loaders, Path(folder))
                try:
                    if judge is None:
                        precision = precision_of(config, device)
                        judge = make_judge(start, data.check, precision)
                        base = clean(device)
                    trainer = start(backend)
                    step = first_step(trainer, data.check)
                    entry |= {"loss": step.loss, "errors": judge.compare(step)}
                    if is_right(entry["errors"]):
                        entry |= measure(trainer, data, args, ceiling, base)
                    else:
                        entry["broken"] = "the first step is further from float32 than allowed"
                except Exception as error:  # noqa: BLE001 - the others go on
                    entry["skipped"] = short_reason(error)
                    error.__traceback__ = error.__context__ = error.__cause__ = None
                trainer = None
                entry["took_s"] = time.monotonic() - started
                took.append(entry["took_s"])
                yield entry


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


def run(args: argparse.Namespace, command: str) -> int:
    """Measures; 0, or 3 where a backend took the GPU with it."""
    began = time.monotonic()
    register()
    rivals.register()
    found: list[dict[str, Any]] = []
    with (
        TemporaryDirectory() as folder,
        initialize_config_dir(str(CONF), version_base="1.3"),
        open_ranks(pick_device(args.device)) as ranks,
    ):
        device = ranks.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with side_stream(device):
            ceilings = measure_ceilings(dtype, device)
        clean(device)
        report = {
            "machine": machine.describe(device) | versions(),
            "command": command,
            "date": date.today().isoformat(),
            "ceilings": ceilings,
            "check_rows": CHECK_ROWS,
            "loss_tolerance": LOSS_TOLERANCE,
            "entries": found,
        }
        rates = "ceilings: {matmul_tflops:.0f} TFLOP/s, {copy_tb_s:.2f} TB/s"
        print(rates.format(**ceilings), flush=True)
        for entry in entries(args, ranks, ceilings["matmul_tflops"], folder, began):
            found.append(entry)
            args.out.write_text(json.dumps(report, indent=2) + "\n")
            print(line(entry), flush=True)
            try:
                synchronize(device)
            except RuntimeError as error:
                print(f"the GPU is lost: {short_reason(error)}; leave out {entry['backend']}")
                return 3
        print(f"{args.out}: {len(found)} entries in {time.monotonic() - began:.0f} s")
    if not args.brief:
        Console().print(table(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return run(parse(argv), shlex.join(["python", "-m", "bench.train", *argv]))


if __name__ == "__main__":
    sys.exit(main())

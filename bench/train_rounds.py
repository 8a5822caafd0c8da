"""Training steps of several backends in turns: their speed, memory and parts.

The host's speed changes by a third within seconds. Backends that were measured one after the other
met different hosts; here each takes a few steps in every round, and all meet the same.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.lost import check_device
from bench.rivals import kept
from bench.step import shares
from bench.timing import short_reason, synchronize, with_peak
from bench.trace import busy_ms, by_part, kernels, longest
from bench.train_data import unseen
from gem.data import Batch
from gem.train.flops import step_flops
from gem.train.trainer import Trainer

PROFILED = slice(1, 4)  # of the measured steps
MARGIN = 1.5  # what is expected may take so much longer


@dataclass
class Runner:
    """A backend among others: its trainer as long as it is alive, and what it has measured.

    Attributes:
        entry: results; `skipped` or `broken` is the reason why it is out.
        trainer: None before it is made, and once it is out or done.
        plan: measured steps of each round. step_s: seconds of a step, the last of the warm-up.
        held_gib: what stays allocated between its steps. peaks_gib: what its turns took beyond
            what was allocated when they began; empty on a CPU.
        batches: of the measured steps, in order. steps_ms: their milliseconds.
    """

    entry: dict[str, Any]
    trainer: Trainer | None = None
    plan: list[int] = field(default_factory=list)
    step_s: float = 0.0
    held_gib: float = 0.0
    peaks_gib: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)

    @property
    def out(self) -> bool:
        return "skipped" in self.entry or "broken" in self.entry

    @property
    def decided(self) -> bool:
        return self.out or "ms_per_step" in self.entry

    @property
    def peak_gib(self) -> float | None:
        """What this backend would need alone; None on a CPU.

        That is what stays allocated between its steps, and the most that a turn of its own took
        beyond what was allocated, by all that are alive, when it began.
        """
        return self.held_gib + max(self.peaks_gib) if self.peaks_gib else None

    @property
    def profiled(self) -> slice:
        """Which of the measured steps the profile repeats."""
        return PROFILED if len(self.steps_ms) >= PROFILED.stop else slice(0, 1)

    @property
    def profile_s(self) -> float:
        """Seconds that its profile may take."""
        count = PROFILED.stop - PROFILED.start if sum(self.plan) >= PROFILED.stop else 1
        return MARGIN * count * self.step_s

    @property
    def turns_s(self) -> float:
        """Seconds that all its turns and its profile may take; 0 for one that is out."""
        return 0.0 if self.out else MARGIN * sum(self.plan) * self.step_s + self.profile_s

    def attempt(self, action: Callable[[], None], device: torch.device) -> None:
        """Runs a part of its measurement; an error puts it out and leaves the others theirs.

        Raises:
            DeviceLost: if the GPU does not answer any more.
        """
        began = time.monotonic()
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the others go on
            self.entry["skipped"] = short_reason(error)
            # Their frames hold tensors.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        if self.out:
            self.release(device)
        self.entry["took_s"] = self.entry.get("took_s", 0.0) + time.monotonic() - began
        check_device(device, self.entry["backend"], "training step")

    def release(self, device: torch.device) -> None:
        self.trainer = None
        clean(device)

    def warm_up(self, batches: Iterable[Batch], seconds: float) -> None:
        """Steps on these batches, fewer where they take longer than `seconds`."""
        began, device = time.perf_counter(), self.trainer.ranks.device
        for number, batch in enumerate(batches):
            self.step_s = time_steps(self.trainer, [unseen(batch)], device)[0] / 1e3
            # The first one's time is that of compilers, and says nothing of the others'.
            if number and time.perf_counter() - began > seconds:
                break
        self.trainer.window.clear()

    def turn(self, batches: Sequence[Batch]) -> None:
        """Measures steps on these batches."""
        trainer = self.trainer
        steps = partial(time_steps, trainer, [unseen(b) for b in batches], trainer.ranks.device)
        times, peak, _ = with_peak(steps, trainer.ranks.device)
        self.steps_ms += times
        self.batches += batches
        if peak is not None:
            self.peaks_gib.append(peak)
        # As a report does: it holds the lengths, and these their schedules.
        trainer.window.clear()

    def finish(self, ceiling: float) -> None:
        """Adds its figures to its entry; the trainer is not needed any more."""
        self.entry |= self.figures(ceiling)
        self.trainer = None

    def figures(self, ceiling: float) -> dict[str, Any]:
        """Speed, memory and, from a profile of some of the steps, parts.

        Args:
            ceiling: TFLOP/s of a matrix product.
        """
        trainer, times, window = self.trainer, self.steps_ms, self.profiled
        flops = [flops_of(trainer, batch) for batch in self.batches]
        batches = [unseen(batch) for batch in self.batches[window]]
        found = profile_steps(trainer, batches, trainer.ranks.device)
        trainer.guard.check()
        in_parts, step = sum(found["parts_ms"].values()), statistics.mean(times[window])
        ms = statistics.median(times)
        tflops = statistics.median(f / t for f, t in zip(flops, times, strict=True)) / 1e9
        return {
            "ms_per_step": ms,
            "examples_per_s": self.entry["batch_size"] / ms * 1e3,
            "tflops": tflops,
            "mfu": tflops / ceiling,
            "flops_per_step": statistics.median(flops),
            "peak_gib": self.peak_gib,
            "attention_share": found["parts_ms"].get("attention", 0.0) / in_parts,
            "idle_ms": max(0.0, step - found["busy_ms"]),
            "share": {name: part / step for name, part in found["parts_ms"].items()}
            | {"idle": max(0.0, 1 - found["busy_ms"] / step)},
            **found,
            "steps_ms": times,
        }


def split(steps: int, rounds: int) -> list[int]:
    """Steps of each round; where there are fewer than rounds, the last rounds have none."""
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]


def take_turns(
    runners: Sequence[Runner],
    batches: Sequence[Batch],
    plan: Sequence[int],
    device: torch.device,
    goes_on: Callable[[float], bool],
) -> Iterator[Runner]:
    """Measures the steps of all, round by round; yields those that drop out.

    A round has batches of its own, the same for all, of which a runner takes as many as it has
    steps there. The order is reversed from round to round, so that a drift of the host's speed
    evens out.

    Args:
        plan: batches of each round.
        goes_on: whether there is time for a next round, told the seconds of the last one.

    Raises:
        DeviceLost: if the GPU does not answer after a runner's turn.
    """
    order, turns = list(runners), cycle(batches)
    for number, size in enumerate(plan):
        began, mine = time.monotonic(), list(islice(turns, size))
        for runner in order:
            if not runner.out and runner.plan[number]:
                runner.attempt(partial(runner.turn, mine[: runner.plan[number]]), device)
                if runner.out:
                    yield runner
        order.reverse()
        if not goes_on(time.monotonic() - began):
            return


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


def flops_of(trainer: Trainer, batch: Batch) -> float:
    """Forward and backward, by `gem.train.flops`: true lengths and visible pairs alone."""
    lengths = {name: s.layout.lengths for name, s in batch.sequences.items()}
    return step_flops(trainer.model.module, lengths, batch.batch_size)


def clean(device: torch.device) -> None:
    """Drops what trainers that are gone have left.

    Those that are alive lose nothing while none is within a step: what `kept` holds is between a
    forward and its backward.
    """
    kept.clear()
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # where the device is lost
            torch.cuda.empty_cache()


def allocated_gib(device: torch.device) -> float:
    """What live tensors hold; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    synchronize(device)
    return torch.cuda.memory_allocated(device) / 2**30

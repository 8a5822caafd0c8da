"""All attention backends on one model and one set of batches: checked, warmed up, then in turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.first_step import Judge, first_step, is_right, make_judge
from bench.lost import DeviceLost
from bench.step import make_trainer, precision_of
from bench.train_data import Data
from bench.train_rounds import MARGIN, Runner, allocated_gib, clean, split, take_turns
from gem.config import Config
from gem.train.distributed import Ranks
from gem.train.trainer import Trainer

NO_TIME = "no time left before the deadline"


@dataclass
class Clock:
    """What is left of a run's time.

    Attributes:
        began: `time.monotonic()`. deadline: seconds since, None where there is no end.
        costs: seconds that backends took or are expected to take.
    """

    began: float
    deadline: float | None = None
    costs: list[float] = field(default_factory=lambda: [0.0])

    def allows(self, seconds: float) -> bool:
        """Whether what takes so long ends in time."""
        return self.deadline is None or time.monotonic() - self.began + seconds <= self.deadline

    @property
    def expected(self) -> float:
        """Seconds of one more backend; some compile for long, which says nothing about the next."""
        return MARGIN * statistics.median(self.costs)


@dataclass(frozen=True)
class Setting:
    """What the groups of a run share.

    Attributes:
        args: of `bench.train`. ceiling: TFLOP/s of a matrix product.
        folder: where trainers may write.
    """

    args: argparse.Namespace
    ranks: Ranks
    ceiling: float
    folder: Path
    clock: Clock


class Group:
    """The backends on one model and one set of batches.

    Args:
        place: the entries' model and density.
    """

    def __init__(self, setting: Setting, config: Config, data: Data, place: dict[str, Any]) -> None:
        self.setting, self.config, self.data = setting, config, data
        self.args, self.clock, self.device = setting.args, setting.clock, setting.ranks.device
        self.judge: Judge | None = None
        self.runners = [
            Runner(place | {"backend": name} | data.facts) for name in self.args.backends
        ]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Results that are decided, in the order of the backends."""
        return [runner.entry for runner in self.runners if runner.decided]

    def measure(self) -> Iterator[dict[str, Any]]:
        """Each entry once it is decided; one without figures has a reason, `skipped` or `broken`.

        Raises:
            DeviceLost: if a backend took the GPU with it, after the entries that this leaves out.
        """
        try:
            clean(self.device)
            yield from self._make_ready()
            yield from self._take_turns()
            yield from self._finish()
        except DeviceLost as lost:
            for runner in self.runners:
                if not runner.decided:
                    runner.entry["skipped"] = f"the GPU was lost to {lost.contender}"
                    yield runner.entry
            raise

    def _make_ready(self) -> Iterator[dict[str, Any]]:
        """Trainers with a right first step and a warm-up; entries of those without."""
        ahead = 0.0  # seconds of the turns of those that are ready
        for runner in self.runners:
            if not self.clock.allows(ahead + self.clock.expected):
                runner.entry["skipped"] = NO_TIME
                yield runner.entry
                continue
            runner.attempt(partial(self._prepare, runner), self.device)
            self.clock.costs.append(runner.entry["took_s"] + runner.turns_s)
            if not runner.out and not self.clock.allows(ahead + runner.turns_s):
                runner.entry["skipped"] = NO_TIME
                runner.release(self.device)
            ahead += runner.turns_s
            if runner.out:
                yield runner.entry

    def _prepare(self, runner: Runner) -> None:
        check, backend = self.data.check, runner.entry["backend"]
        if self.judge is None:
            self.judge = make_judge(self._start, check, precision_of(self.config, self.device))
            clean(self.device)
        before = allocated_gib(self.device)
        runner.trainer = self._start(backend)
        step = first_step(runner.trainer, check)
        errors = self.judge.compare(step)
        runner.entry |= {"loss": step.loss, "errors": errors}
        if not is_right(errors):
            runner.entry["broken"] = "the first step is further from float32 than allowed"
            return
        seconds = self.args.entry_seconds
        runner.warm_up(islice(cycle(self.data.batches), self.args.warmup), seconds / 2)
        runner.held_gib = allocated_gib(self.device) - before
        count = max(1, min(self.args.steps, int(seconds / runner.step_s)))
        runner.plan = split(count, self.args.rounds)

    def _start(self, backend: str, precision: str | None = None) -> Trainer:
        config = self.config
        config = replace(config, attention=replace(config.attention, backend=backend))
        if precision is not None:
            config = replace(config, trainer=replace(config.trainer, precision=precision))
        setting = self.setting
        return make_trainer(config, setting.ranks, self.data.loaders, setting.folder)

    def _take_turns(self) -> Iterator[dict[str, Any]]:
        """Rounds, as long as there is time; entries of those that drop out."""

        def goes_on(last: float) -> bool:
            return self.clock.allows(last + sum(r.profile_s for r in self.runners if not r.out))

        plan = split(self.args.steps, self.args.rounds)
        turns = take_turns(self.runners, self.data.batches, plan, self.device, goes_on)
        return (runner.entry for runner in turns)

    def _finish(self) -> Iterator[dict[str, Any]]:
        """Profiles and figures, one backend after the other, whose trainers go."""
        for runner in self.runners:
            if not runner.out:
                runner.attempt(partial(runner.finish, self.setting.ceiling), self.device)
                yield runner.entry

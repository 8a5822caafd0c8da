"""The training loop."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel

from gem.config import OptimConfig, TrainerConfig
from gem.data.batch import Batch
from gem.data.loader import Loader
from gem.data.schema import Task
from gem.train.checkpoint import (
    Checkpoints,
    load_tensors,
    random_state,
    read_meta,
    read_own,
    set_random_state,
)
from gem.train.distributed import Ranks
from gem.train.evaluate import autocast, evaluate, filled
from gem.train.guard import Guard
from gem.train.loss import TaskLoss
from gem.train.optim import Optimizers
from gem.train.progress import Reporter
from gem.train.sharding import on_table_gradient
from gem.train.signals import StopSignal
from gem.train.window import Window


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: steps done.
        seconds: spent training, validating and saving, over all resumptions.
        paused: those of them that were not training.
        examples: rows that the first rank trained on.
        best: lowest NE of the monitored task in a validation; None before the first.
        best_step: where it was.
        stale: validations since.
        validated: step of the latest validation.
        skipped: steps left out for a loss or gradient that was not finite.
    """

    step: int = 0
    seconds: float = 0.0
    paused: float = 0.0
    examples: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    validated: int = -1
    skipped: int = 0


class Trainer:
    """Trains a sharded model from a loader, reports, validates, saves.

    Args:
        model: `forward(batch) -> logits [B, tasks]`, tables sharded by `gem.train.sharding.shard`.
        loaders: `train` and `valid`.
        tasks: the schema's.
        config: of the loop. optim: of the optimizers.
        precision: bfloat16 (autocast) or float32.
        ranks: this process among all.
        reporter: where numbers go.
        checkpoints: where states go.
        meta: saved with each checkpoint.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        loaders: dict[str, Loader],
        tasks: list[Task],
        config: TrainerConfig,
        optim: OptimConfig,
        precision: torch.dtype,
        ranks: Ranks,
        reporter: Reporter,
        checkpoints: Checkpoints,
        meta: dict[str, Any],
    ) -> None:
        self.model, self.loaders, self.tasks, self.config = model, loaders, tasks, config
        self.precision, self.ranks = precision, ranks
        self.reporter, self.checkpoints, self.meta = reporter, checkpoints, meta
        names = [task.name for task in tasks]
        self.monitor = config.monitor_task or names[0]
        self.total_steps = total_steps(config, loaders["train"].steps)
        self.optimizers = Optimizers(model, optim, self.total_steps)
        self.loss = TaskLoss(tasks, ranks.world_size, ranks.device)
        self.guard = Guard(config.on_nonfinite, names, ranks.device)
        on_table_gradient(model, self.guard.on_table_gradient)
        self.window = Window(names, ranks, model.module)
        self.progress = Progress()
        self.interrupted = False
        self.stop = StopSignal(ranks)

    def fit(self) -> None:
        """Trains from where the state is to the end, an early stop or a signal.

        SIGINT and SIGTERM end it after the step at hand, with a checkpoint, and set
        `interrupted`; a second SIGINT ends it at once.

        Raises:
            NonFiniteError: a loss or gradient was inf or NaN and `on_nonfinite` is `error`.
        """
        self.model.train()
        self.reporter.start(self.progress.step, self.total_steps)
        self._mark = time.perf_counter()
        with self.stop:
            try:
                self.window.restart()
                while self.progress.step < self.total_steps and not self._done():
                    self._epoch()
                self.guard.check()
                began = time.perf_counter()
                if not self.interrupted:
                    self._validate()
                self._save()
                self.progress.paused += time.perf_counter() - began
            finally:
                self._tick()
                self.reporter.close()

    def step(self, batch: Batch, real: bool = True) -> None:
        """One step on this rank's batch; a batch that is not `real` counts for nothing."""
        number = self.progress.step
        batch = batch.to(self.ranks.device, non_blocking=True)
        weights = batch.weights if real else torch.zeros_like(batch.weights)
        rate = self.optimizers.set_step(number)
        with autocast(self.ranks.device, self.precision):
            logits = self.model(batch)
        sums = self.loss.sums(logits.float(), batch.labels, weights)
        bad = (~sums.detach().isfinite()).any().float()[None]
        totals = self.ranks.sum(torch.cat([weights.sum(0), bad]))
        self.guard.on_loss(totals[-1])
        loss = self.loss(sums, totals[:-1])
        loss.backward()
        norm, norms = self.optimizers.clip()
        self.guard.check()
        skip = self.guard.on_gradients(number + 1, logits, norm, norms, batch)
        self.optimizers.step(skip)
        self.window.add(batch, logits, weights, loss, norm)
        self.learning_rate = rate
        self.progress.step = number + 1
        self.progress.examples += batch.batch_size if real else 0

    def state(self) -> dict[str, Any]:
        """Model and optimizer tensors, by reference."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.combined.state_dict(),
        }

    def load(self, checkpoint: Path) -> None:
        """Continues from a checkpoint of the same number of ranks.

        Raises:
            ValueError: it is of another model, or of another number of ranks.
        """
        meta = read_meta(checkpoint)
        if meta["world_size"] != self.ranks.world_size:
            raise ValueError(
                f"{checkpoint} was written by {meta['world_size']} processes and can only be "
                f"resumed by as many, not {self.ranks.world_size}"
            )
        load_tensors(checkpoint, self.state(), self.ranks)
        own = read_own(checkpoint, self.ranks.rank)
        self.loaders["train"].load_state_dict(own["loader"])
        self.window.load_state_dict(own["window"])
        self.progress = Progress(**meta["progress"])
        self.guard.skipped = self.progress.skipped
        set_random_state(own["random"], self.ranks.device)

    def _epoch(self) -> None:
        loader = self.loaders["train"]
        asked = time.perf_counter()
        for batch, real in filled(loader, self.ranks):
            self.window.wait(time.perf_counter() - asked)
            self.step(batch, real)
            self._after_step()
            if self.progress.step >= self.total_steps or self._done():
                return
            asked = time.perf_counter()

    def _after_step(self) -> None:
        step, c = self.progress.step, self.config
        self.reporter.advance(step)
        self.interrupted = self.stop.agreed()
        if step % c.log_every == 0 or step == self.total_steps:
            self._report()
        began = time.perf_counter()
        if c.valid_every is not None and step % c.valid_every == 0:
            self._validate()
        if c.save_every is not None and step % c.save_every == 0:
            self._save()
        spent = time.perf_counter() - began
        self.window.pause(spent)
        self.progress.paused += spent

    def _done(self) -> bool:
        patience = self.config.patience
        stopped = patience is not None and self.progress.stale >= patience
        return self.interrupted or stopped

    def _report(self) -> None:
        row = self.window.report()
        self._tick()
        if row is not None:
            place = {"split": "train", "step": self.progress.step, "epoch": self._epochs()}
            extra = {"lr": self.learning_rate, "skipped_steps": self.guard.skipped}
            self.reporter.row(place | row | extra | {"seconds": self.progress.seconds})

    def _validate(self) -> None:
        """Metrics of the validation split; a new best of the monitored NE is saved."""
        progress = self.progress
        if progress.validated == progress.step or not self.loaders["valid"].steps:
            return
        progress.validated = progress.step
        self.guard.check()
        result = evaluate(
            self.model,
            self.loaders["valid"],
            self.tasks,
            self.ranks,
            self.precision,
            self.config.valid_batches,
        )
        best = False
        if result is not None:
            value = result[self.monitor]["ne"]
            best = value == value and (progress.best is None or value < progress.best)
            if best:
                progress.best, progress.best_step = value, progress.step
        progress.stale, progress.best, progress.best_step, best = self.ranks.broadcast(
            (0 if best else progress.stale + 1, progress.best, progress.best_step, best)
        )
        self._tick()
        if result is not None:
            row = {"split": "valid", "step": progress.step, "epoch": self._epochs()}
            weights = {task.name: task.loss_weight for task in self.tasks}
            row["loss"] = sum(
                weights[t] * m["loss"] for t, m in result.items() if m["loss"] == m["loss"]
            )
            for name in ("ne", "auc", "gauc", "calibration"):
                row[name] = {task: metrics[name] for task, metrics in result.items()}
            self.reporter.row(row | {"best": best, "seconds": progress.seconds})
        if best:
            self._save(best=True)

    def _save(self, best: bool = False) -> None:
        self.guard.check()
        self._tick()
        self.progress.skipped = self.guard.skipped
        own = {
            "loader": self.loaders["train"].state_dict(),
            "window": self.window.state_dict(),
            "random": random_state(self.ranks.device),
        }
        meta = {
            "step": self.progress.step,
            "progress": asdict(self.progress),
            "world_size": self.ranks.world_size,
        }
        self.checkpoints.save(self.state(), own, meta | self.meta, best)

    def _epochs(self) -> float:
        """Epochs done, with the fraction of the one at hand."""
        return self.progress.step / self.loaders["train"].steps

    def _tick(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._mark
        self._mark = now


def total_steps(config: TrainerConfig, steps_per_epoch: int) -> int:
    """Where a run ends: `max_steps` or `epochs`, whichever comes first."""
    limits = [config.max_steps]
    if config.epochs is not None:
        limits.append(config.epochs * steps_per_epoch)
    return min(limit for limit in limits if limit is not None)

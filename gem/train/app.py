"""From a composed config to a finished run: the only place that knows Hydra's objects."""

import random
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from gem import env
from gem.attention import backends
from gem.config import Config, Mode
from gem.data.loader import Loader, make_loaders
from gem.model.gem import Gem
from gem.train.checkpoint import (
    Checkpoints,
    differences,
    find_checkpoint,
    load_tensors,
    read_meta,
    run_directory,
)
from gem.train.compiling import compile_dense
from gem.train.distributed import Ranks, open_ranks, pick_device
from gem.train.evaluate import evaluate, predict
from gem.train.progress import Reporter, make_console
from gem.train.repeated import Repeated
from gem.train.results import draw_curves, show_metrics, write_result
from gem.train.sharding import shard
from gem.train.trainer import Trainer

# What may differ between a run and its resumption without making it another run.
_FREE = {
    "trainer": (
        "device",
        "threads",
        "log_every",
        "valid_every",
        "valid_batches",
        "save_every",
        "keep_last",
        "patience",
        "on_nonfinite",
    ),
    "data": ("workers",),
}
# What may differ, and moves the learning rate's schedule.
_LENGTH = ("max_steps", "epochs")
_COMPARED = ("seed", "model", "attention", "data", "optim", "trainer")


def run(cfg: DictConfig) -> float | None:
    """Trains, evaluates or predicts, as `cfg.mode` says.

    Returns:
        For training, the validation NE of the monitored task (for sweepers; lower is better), None
        if it is undefined.

    Raises:
        SystemExit: a signal stopped the training; its state is saved.
        ValueError: the config makes no sense, or does not fit the data or the checkpoint.
    """
    config = to_config(cfg)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    with open_ranks(pick_device(config.trainer.device)) as ranks:
        return _Run(config, ranks).go()


def to_config(cfg: DictConfig) -> Config:
    """Checks a composed config and turns it into dataclasses.

    Raises:
        ValueError: a value is missing, or values do not go together.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        key = error.full_key or error.key
        raise ValueError(f"{key} has no value; give one with {key}=...") from error
    for key in _added(config, ""):
        raise ValueError(f"there is no key {key}, and + does not add one")
    return config


def _added(value: Any, path: str) -> Iterator[str]:
    """Keys that a user forced into the config with `+`; the schema does not know them."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _added(item, f"{path}[{i}]")
    elif is_dataclass(value):
        known = {item.name for item in fields(value)}
        for name, item in vars(value).items():
            key = f"{path}.{name}" if path else name
            if name in known:
                yield from _added(item, key)
            else:
                yield key


class _Run:
    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.console = make_console(quiet=not ranks.first)
        self.tasks = config.data.schema.tasks
        self.saved = _plain(asdict(config))
        self.resumed = find_checkpoint(config.resume) if config.resume else None
        self.output = Path(config.paths.output)
        if self.resumed is not None:
            self.output = run_directory(self.resumed)

    def go(self) -> float | None:
        self.console.print(env.short_report(), markup=False)
        self._check_backend()
        if self.config.mode is Mode.train:
            return self.train()
        checkpoint = find_checkpoint(self.config.ckpt, prefer="best")
        self._compare(checkpoint, evaluating=True)
        loaders, model = self._loaders(), self._model()
        load_tensors(checkpoint, {"model": model.state_dict()}, self.ranks)
        loader = loaders[self.config.split.value]
        self._say(f"{checkpoint}: {loader.rows:,} rows of split {self.config.split.value}")
        if self.config.mode is Mode.predict:
            folder = self.output / "predictions"
            rows = predict(model, loader, self.tasks, self.ranks, self._precision, folder)
            self._say(f"wrote the scores of {rows:,} rows to {folder}")
        else:
            meta = read_meta(checkpoint)
            self._test(model, loader, meta["step"], meta["progress"])
        return None

    def _check_backend(self) -> None:
        """Raises ValueError where the backend cannot serve this run, before the data are made."""
        model, backend = self.config.model, self.config.attention.backend
        if backend == "auto" or not model.use_sequences or not self.config.data.schema.sequences:
            return
        if backend not in backends.names():
            raise ValueError(f"attention.backend={backend} is not one of {backends.names()}")
        call = backends.Call(
            form="jagged",
            direction="forward",
            device=self.ranks.device,
            dtype=self._precision,
            heads=model.heads,
            kv_heads=model.heads,
            head_dim=model.d_model // model.heads,
            deterministic=self.config.attention.deterministic,
        )
        if (reason := backends.unsupported(backend, call)) is not None:
            raise ValueError(f"attention.backend={backend} cannot serve this run: {reason}")

    def train(self) -> float | None:
        if self.resumed is not None:
            self._compare(self.resumed, evaluating=False)
        if self.ranks.first:
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / "config.yaml").write_text(
                OmegaConf.to_yaml(OmegaConf.create(self.saved))
            )
        self._say(f"run directory {self.output}")
        loaders, model = self._loaders(), self._model()
        trainer = self._trainer(model, loaders)
        if self.resumed is not None:
            trainer.load(self.resumed)
            self._say(f"resumed at step {trainer.progress.step} from {self.resumed}")
        self._describe(model, loaders, trainer.total_steps)
        trainer.fit()
        progress = trainer.progress
        if trainer.interrupted:
            self._say(
                f"stopped after step {progress.step}; go on with the same command and "
                f"resume={self.output}"
            )
            # Not 0: what was to come after the training must not.
            raise SystemExit(128 + trainer.stop.number)
        best = trainer.checkpoints.path("best")
        if best is not None and progress.best_step != progress.step:
            load_tensors(best, {"model": model.state_dict()}, self.ranks)
            self._say(f"test with the best checkpoint, step {progress.best_step}")
        self._test(model, loaders["test"], progress.step, asdict(progress))
        if self.ranks.first:
            draw_curves(self.output / "metrics.jsonl", self.output / "curves.png")
        return progress.best

    def _loaders(self) -> dict[str, Loader]:
        loaders = make_loaders(
            self.config.data,
            seed=self.config.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            device=self.ranks.device,
        )
        if self.config.trainer.overfit_batches is not None:
            loaders["train"] = Repeated(loaders["train"], self.config.trainer.overfit_batches)
        return loaders

    def _model(self) -> DistributedModelParallel:
        """The model with the seed's initial weights, which the number of ranks does not change."""
        random.seed(self.config.seed)
        np.random.seed(self.config.seed % 2**32)
        torch.manual_seed(self.config.seed)
        c = self.config
        model = Gem(
            c.data.schema,
            c.model,
            backend=c.attention.backend,
            deterministic=c.attention.deterministic,
        )
        if c.trainer.compile:
            compile_dense(model)
        model = shard(model, c.optim, self.ranks)
        # Ranks drop different units of different rows.
        torch.manual_seed(self.config.seed + 1 + self.ranks.rank)
        return model

    def _trainer(self, model: DistributedModelParallel, loaders: dict[str, Loader]) -> Trainer:
        c = self.config
        reporter = Reporter(c.logger, self.output, self.ranks.first, self.console)
        checkpoints = Checkpoints(self.output / "checkpoints", self.ranks, c.trainer.keep_last)
        return Trainer(
            model,
            loaders,
            self.tasks,
            c.trainer,
            c.optim,
            self._precision,
            self.ranks,
            reporter,
            checkpoints,
            {"config": self.saved},
        )

    @property
    def _precision(self) -> torch.dtype:
        name = self.config.trainer.precision
        if name == "auto":
            name = "bfloat16" if self.ranks.device.type == "cuda" else "float32"
        return getattr(torch, name)

    def _test(
        self,
        model: DistributedModelParallel,
        loader: Loader,
        steps: int,
        progress: dict[str, Any],
    ) -> None:
        test = evaluate(model, loader, self.tasks, self.ranks, self._precision)
        if test is None:
            return
        split = loader.split
        show_metrics(self.console, f"{split}, {loader.rows:,} rows", test)
        seconds, training = progress["seconds"], progress["seconds"] - progress["paused"]
        rate = progress["examples"] * self.ranks.world_size / training if training > 0 else 0.0
        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / "result.json"
        write_result(path, steps, seconds, rate, test)
        self._say(f"{steps} steps in {seconds:.0f} s, {rate:.0f} examples/s; {path}")

    def _describe(
        self, model: DistributedModelParallel, loaders: dict[str, Loader], steps: int
    ) -> None:
        table_rows = sum(self.config.data.schema.tables().values())
        parameters = in_backward_optimizer_filter(model.named_parameters())
        dense = sum(parameter.numel() for _, parameter in parameters)
        rows = ", ".join(f"{loader.rows:,} {split}" for split, loader in loaders.items())
        self._say(
            f"{self.config.model.name}: {dense:,} dense parameters, {table_rows:,} table rows; "
            f"{rows} rows; {steps} steps on {self.ranks.world_size} x {self.ranks.device.type}"
        )

    def _compare(self, checkpoint: Path, evaluating: bool) -> None:
        """Raises ValueError where a checkpoint's config rules this run out."""
        saved, now = read_meta(checkpoint)["config"], self.saved
        if evaluating:
            found = differences(saved["model"], now["model"], "model")
            found += differences(saved["data"]["schema"], now["data"]["schema"], "data.schema")
        else:
            found = differences(_decisive(saved), _decisive(now))
            for key in _LENGTH:
                line = differences(saved["trainer"][key], now["trainer"][key], f"trainer.{key}")
                if line:
                    self._say(f"{line[0]}: from here the learning rate falls towards the new end")
        if found:
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            what = "is of another model" if evaluating else "is of another run"
            raise ValueError(f"{checkpoint} {what}: {'; '.join(found[:3])}{more}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that make two runs the same run."""
    kept = {section: config[section] for section in _COMPARED}
    for section, free in _FREE.items():
        kept[section] = {k: v for k, v in config[section].items() if k not in free}
    kept["trainer"] = {k: v for k, v in kept["trainer"].items() if k not in _LENGTH}
    return kept


def _plain(value: Any) -> Any:
    """Enums and tuples as YAML and JSON have them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

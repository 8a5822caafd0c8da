"""The dataclasses that conf/ is checked against.

Values live in YAML; types, ranges and pairs that exclude each other live here. Hydra checks names
and types while it composes, `__post_init__` the rest when `gem.train.app` turns the composed
config into these objects. Every error is one sentence that names the key.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from gem.data.schema import Schema


class Mode(Enum):
    """What a run does: train (then test), evaluate a checkpoint, or write its predictions."""

    train = "train"
    eval = "eval"
    predict = "predict"


class Split(Enum):
    """The rows that `mode=eval` and `mode=predict` read."""

    train = "train"
    valid = "valid"
    test = "test"


class PoolingKind(Enum):
    """How a jagged sequence becomes a few tokens: PMA (Set Transformer) or HSP (Kunlun)."""

    pma = "pma"
    hsp = "hsp"


class OnBadRow(Enum):
    """A row that breaks the schema stops the run, or is skipped and counted."""

    error = "error"
    skip = "skip"


@dataclass
class PoolingConfig:
    """Summary of one sequence by broadcast attention.

    `queries` learned seeds attend to the events; HSP compresses them to `tokens` with a
    SumKronLinear of `rank` terms, PMA needs queries == tokens.
    """

    kind: PoolingKind = PoolingKind.pma
    queries: int = 4
    tokens: int = 4
    rank: int = 4
    recent: int = 2

    def __post_init__(self) -> None:
        if self.kind is PoolingKind.pma and self.queries != self.tokens:
            raise ValueError(
                f"model.pooling.kind=pma gives one token per query, but queries={self.queries} "
                f"and tokens={self.tokens}"
            )
        if self.kind is PoolingKind.hsp and self.queries < self.tokens:
            raise ValueError(
                f"model.pooling.kind=hsp compresses queries={self.queries} to "
                f"tokens={self.tokens}; queries must not be fewer"
            )
        _at_least("model.pooling", self, queries=1, tokens=1, rank=1, recent=0)


@dataclass
class WukongConfig:
    """Interaction block: `fmb` factorisation-machine tokens and `lcb` compressed tokens."""

    fmb: int = 8
    lcb: int = 8
    rank: int = 8
    mlp: list[int] = field(default_factory=lambda: [128])

    def __post_init__(self) -> None:
        _at_least("model.wukong", self, fmb=1, lcb=1, rank=1)


@dataclass
class ModelConfig:
    """GEM: `layers` times cross, interaction and sequence block.

    `use_sequences=false` is the same model without its histories, for ablation.
    """

    name: str = MISSING
    d_model: int = MISSING
    embedding_dim: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    summary_tokens: int = 8
    cls_tokens: int = 2
    ffn_tokens: int = 16
    window: int | None = 64
    causal: bool = True
    rotary: bool = True
    comp_skip: bool = False
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    wukong: WukongConfig = field(default_factory=WukongConfig)
    head_mlp: list[int] = field(default_factory=lambda: [128, 64])
    dropout: float = 0.0
    use_sequences: bool = True

    def __post_init__(self) -> None:
        _at_least("model", self, d_model=8, embedding_dim=4, layers=1, heads=1, summary_tokens=1)
        _at_least("model", self, cls_tokens=0, ffn_tokens=1)
        if self.d_model % self.heads:
            raise ValueError(
                f"model.d_model={self.d_model} does not divide into model.heads={self.heads}"
            )
        if self.rotary and (self.d_model // self.heads) % 4:
            raise ValueError(
                f"model.rotary=true splits a head between position and time and needs "
                f"d_model / heads to be a multiple of 4, not {self.d_model // self.heads}"
            )
        if self.window is not None and self.window < 0:
            raise ValueError(f"model.window={self.window}; give a number of events >= 0, or null")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} is not in [0, 1)")


@dataclass
class AttentionConfig:
    """Which backend runs attention; `auto` takes the fastest that supports the call."""

    backend: str = "auto"
    deterministic: bool = False


@dataclass
class SplitConfig:
    """Split by impression time: train before valid before test.

    Either fractions of the rows, or the times (seconds) at which validation and test begin.
    """

    valid_fraction: float | None = None
    test_fraction: float | None = None
    valid_from: int | None = None
    test_from: int | None = None

    def validate(self) -> None:
        """Raises ValueError unless exactly one pair is given and makes sense."""
        fractions = [self.valid_fraction, self.test_fraction]
        times = [self.valid_from, self.test_from]
        given = [all(v is not None for v in pair) for pair in (fractions, times)]
        absent = [all(v is None for v in pair) for pair in (fractions, times)]
        if not (given[0] and absent[1]) and not (given[1] and absent[0]):
            raise ValueError(
                "data.split takes either valid_fraction and test_fraction, or valid_from and "
                "test_from: both of one pair, none of the other"
            )
        if given[0]:
            if min(fractions) < 0 or sum(fractions) >= 1:
                raise ValueError(
                    f"data.split.valid_fraction={self.valid_fraction} and test_fraction="
                    f"{self.test_fraction} must be >= 0 and leave rows to train on"
                )
        elif self.valid_from > self.test_from:
            raise ValueError(
                f"data.split.valid_from={self.valid_from} is after test_from={self.test_from}"
            )


@dataclass
class DataConfig:
    """Where rows come from and how they are batched.

    `dataset` is instantiated by its `_target_`; its `prepare()` returns the parquet files.
    """

    name: str = MISSING
    dataset: Any = MISSING
    schema: Schema = MISSING
    split: SplitConfig = field(default_factory=SplitConfig)
    batch_size: int = MISSING
    eval_batch_size: int = MISSING
    workers: int = 1
    shuffle_buffer: int = 16384
    on_bad_row: OnBadRow = OnBadRow.error

    def __post_init__(self) -> None:
        _at_least("data", self, batch_size=1, eval_batch_size=1, workers=0, shuffle_buffer=1)
        self.split.validate()
        self.schema.validate()


@dataclass
class OptimConfig:
    """Fused row-wise Adagrad for tables, AdamW for the rest, linear warm-up, cosine decay."""

    lr: float = MISSING
    embedding_lr: float = MISSING
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    embedding_eps: float = 1e-8
    warmup_steps: int = 100
    final_lr_fraction: float = 0.05
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _at_least("optim", self, lr=0, embedding_lr=0, weight_decay=0, warmup_steps=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)}; give two numbers in [0, 1)")
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(f"optim.final_lr_fraction={self.final_lr_fraction} is not in [0, 1]")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"optim.clip_norm={self.clip_norm}; give a norm > 0, or null")


@dataclass
class TrainerConfig:
    """The loop: how long, on what, how often it reports, validates and saves.

    `max_steps` or `epochs` ends the run, whichever comes first; intervals count steps, null is
    never. `device` and `precision` are `auto`, or `cpu`/`cuda` and `float32`/`bfloat16`.
    `overfit_batches` trains on the first so many batches only, again and again, for debugging.
    """

    device: str = "auto"
    precision: str = "auto"
    max_steps: int | None = None
    epochs: int | None = 1
    threads: int | None = None
    log_every: int = 50
    valid_every: int | None = None
    valid_batches: int | None = None
    save_every: int | None = None
    keep_last: int = 2
    patience: int | None = None
    monitor_task: str | None = None
    on_nonfinite: str = "error"
    compile: bool = False
    overfit_batches: int | None = None

    def __post_init__(self) -> None:
        _one_of("trainer.device", self.device, ("auto", "cpu", "cuda"))
        _one_of("trainer.precision", self.precision, ("auto", "float32", "bfloat16"))
        _one_of("trainer.on_nonfinite", self.on_nonfinite, ("error", "skip"))
        if self.max_steps is None and self.epochs is None:
            raise ValueError("trainer.max_steps and trainer.epochs are both null; give one")
        _at_least("trainer", self, log_every=1, keep_last=1)
        for key in (
            "max_steps",
            "epochs",
            "threads",
            "valid_every",
            "valid_batches",
            "save_every",
            "patience",
            "overfit_batches",
        ):
            if getattr(self, key) is not None:
                _at_least("trainer", self, **{key: 1})
        if self.patience is not None and self.valid_every is None:
            raise ValueError(
                f"trainer.patience={self.patience} stops early on validation, but "
                "trainer.valid_every is null"
            )


@dataclass
class LoggerConfig:
    """Where the numbers of a run go beside the terminal and `metrics.jsonl`."""

    tensorboard: bool = True
    progress: bool = True


@dataclass
class PathsConfig:
    """`output` is this run's directory; `cache` holds data sets made once."""

    output: str = MISSING
    cache: str = MISSING


@dataclass
class Config:
    """A whole run; `split` is for the modes eval and predict, which read a checkpoint `ckpt`."""

    mode: Mode = Mode.train
    name: str = MISSING
    seed: int = 0
    ckpt: str | None = None
    resume: str | None = None
    split: Split = Split.test
    model: ModelConfig = MISSING
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = MISSING
    optim: OptimConfig = MISSING
    trainer: TrainerConfig = MISSING
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    paths: PathsConfig = MISSING

    def __post_init__(self) -> None:
        if self.mode is not Mode.train and self.ckpt is None:
            raise ValueError(f"mode={self.mode.value} needs ckpt=<a checkpoint directory>")
        if self.mode is not Mode.train and self.resume is not None:
            raise ValueError(f"resume continues training; with mode={self.mode.value} give ckpt")
        if self.mode is Mode.train and self.ckpt is not None:
            raise ValueError("mode=train does not read ckpt; resume=<checkpoint> continues a run")
        task = self.trainer.monitor_task
        names = [t.name for t in self.data.schema.tasks]
        if task is not None and task not in names:
            raise ValueError(f"trainer.monitor_task={task} is no task; tasks are {names}")


def _at_least(section: str, config: Any, **bounds: float) -> None:
    for key, bound in bounds.items():
        value = getattr(config, key)
        if value < bound:
            raise ValueError(f"{section}.{key}={value}; it must be at least {bound}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value}; it must be one of {', '.join(allowed)}")

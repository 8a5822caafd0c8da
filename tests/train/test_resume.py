"""N steps are k steps, a resumption and N - k steps, bit for bit."""

import signal
from pathlib import Path

import pytest
import torch

from gem.config import LoggerConfig, OptimConfig, TrainerConfig
from gem.train.checkpoint import Checkpoints
from gem.train.distributed import Ranks, open_ranks
from gem.train.progress import Reporter, read_rows
from gem.train.sharding import shard
from gem.train.trainer import Trainer
from tests.train.helpers import MemoryLoader, TinyModel, make_batch, make_schema

# Differ from run to run.
_TIMES = {"examples_per_s", "tokens_per_s", "tflops", "data_wait", "memory_gib", "seconds"}


def make_trainer(directory: Path, ranks: Ranks, dropout: float = 0.3, **config) -> Trainer:
    torch.manual_seed(0)
    model = shard(TinyModel(dropout=dropout), OPTIM, ranks)
    torch.manual_seed(1 + ranks.rank)
    settings = {"epochs": 3, "log_every": 3, "valid_every": 5} | config
    settings = TrainerConfig(device="cpu", **settings)
    first = 1000 * ranks.rank
    return Trainer(
        model,
        {
            "train": MemoryLoader([make_batch(16, first + i) for i in range(6)]),
            "valid": MemoryLoader([make_batch(32, first + 100 + i) for i in range(2)], "valid"),
        },
        make_schema().tasks,
        settings,
        OPTIM,
        torch.float32,
        ranks,
        Reporter(LoggerConfig(tensorboard=False), directory, ranks.first),
        Checkpoints(directory / "checkpoints", ranks, keep_last=2),
        {},
    )


OPTIM = OptimConfig(lr=0.02, embedding_lr=0.2, warmup_steps=4)


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor of the model and both optimizers."""
    found = {}

    def walk(path, value):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}/{key}", item)
        elif hasattr(value, "local_shards"):
            for i, piece in enumerate(value.local_shards()):
                found[f"{path}/{i}"] = piece.tensor.detach().clone()
        else:
            found[path] = value.detach().clone()

    walk("", trainer.state())
    return found


def rows_without_times(path: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in _TIMES} for row in read_rows(path)]


def interrupt_after(trainer: Trainer, steps: int) -> None:
    agreed = trainer.stop.agreed
    trainer.stop.agreed = lambda: agreed() or trainer.progress.step >= steps


@pytest.mark.parametrize("stop", [1, 4, 6, 8, 15], ids=lambda k: f"after {k}")
def test_resume_is_bitwise(tmp_path, stop):
    """Within an epoch and a window, at the end of an epoch (6), at a validation (15)."""
    with open_ranks(torch.device("cpu")) as ranks:
        whole = make_trainer(tmp_path / "whole", ranks)
        whole.fit()
        assert whole.progress.step == 18

        first = make_trainer(tmp_path / "parts", ranks)
        interrupt_after(first, stop)
        first.fit()
        assert first.interrupted and first.progress.step == stop

        second = make_trainer(tmp_path / "parts", ranks)
        second.load(first.checkpoints.path("last"))
        second.fit()

    a, b = snapshot(whole), snapshot(second)
    assert a.keys() == b.keys()
    assert any("momentum" in name for name in a) and any("exp_avg_sq" in name for name in a)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
    expected = rows_without_times(tmp_path / "whole" / "metrics.jsonl")
    assert rows_without_times(tmp_path / "parts" / "metrics.jsonl") == expected
    assert len(expected) == 6 + 4
    for name in ("best", "best_step", "stale", "examples"):
        assert getattr(whole.progress, name) == getattr(second.progress, name)


def _two_ranks_resume(rank, directory):
    with open_ranks(torch.device("cpu")) as ranks:
        whole = make_trainer(directory / "whole", ranks)
        whole.fit()
        first = make_trainer(directory / "parts", ranks)
        if rank == 1:
            # The signal reaches one rank only; both stop after the same step.
            advance = first.reporter.advance
            first.reporter.advance = lambda step: (
                step == 7 and signal.raise_signal(signal.SIGTERM),
                advance(step),
            )
        first.fit()
        second = make_trainer(directory / "parts", ranks)
        second.load(first.checkpoints.path("last"))
        second.fit()
        a, b = snapshot(whole), snapshot(second)
        same = [name for name in a if torch.equal(a[name], b[name])]
        return first.interrupted, first.progress.step, len(a), len(same)


def test_two_ranks_resume_bitwise_after_a_signal_to_one(two_ranks, tmp_path):
    results = two_ranks(_two_ranks_resume, tmp_path)
    for interrupted, step, tensors, same in results:
        assert interrupted and step == 8
        assert same == tensors
    expected = rows_without_times(tmp_path / "whole" / "metrics.jsonl")
    assert rows_without_times(tmp_path / "parts" / "metrics.jsonl") == expected


def test_rows_after_the_checkpoint_are_written_once(tmp_path, ranks):
    """A run that was killed after its last save leaves rows that its resumption writes again."""
    first = make_trainer(tmp_path, ranks, save_every=4, valid_every=None)
    interrupt_after(first, 10)
    first.checkpoints_saved = first._save
    first._save = lambda best=False: first.progress.step == 4 and first.checkpoints_saved(best)
    first.fit()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [3, 6, 9]
    second = make_trainer(tmp_path, ranks, valid_every=None)
    second.load(first.checkpoints.path("last"))
    assert second.progress.step == 4
    second.fit()
    steps = [r["step"] for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "train"]
    assert steps == [3, 6, 9, 12, 15, 18]


def test_a_checkpoint_of_another_number_of_ranks_is_refused(tmp_path, ranks):
    trainer = make_trainer(tmp_path, ranks)
    interrupt_after(trainer, 1)
    trainer.fit()
    checkpoint = trainer.checkpoints.path("last")
    meta = checkpoint / "meta.json"
    meta.write_text(meta.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(ValueError, match="written by 4 processes.*resumed by as many, not 1"):
        make_trainer(tmp_path, ranks).load(checkpoint)

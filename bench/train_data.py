"""The batches that training steps are measured on."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from bench.step import open_loaders
from bench.timing import synchronize
from gem.config import Config
from gem.data import Batch, Loader
from gem.train.distributed import Ranks

CHECK_ROWS = 64


@dataclass(frozen=True)
class Data:
    """Batches on the device, and what they are.

    Attributes:
        batches: of training. check: a small one of other rows.
        loaders: where they came from.
        facts: batch size, mean and longest lengths, milliseconds of a copy to the device.
    """

    batches: list[Batch]
    check: Batch
    loaders: dict[str, Loader]
    facts: dict[str, Any]


def to_overrides(args: argparse.Namespace, density: float, folder: str) -> list[str]:
    rows = max(40 * CHECK_ROWS, int(args.batches * args.batch_size / 0.9) + CHECK_ROWS)
    return [
        f"paths.output={folder}",
        f"trainer.device={args.device}",
        "data.workers=0",
        f"data.batch_size={args.batch_size}",
        f"data.eval_batch_size={CHECK_ROWS}",
        f"data.dataset.num_rows={rows}",
        f"data.dataset.density={density}",
        f"data.dataset.max_length={args.max_length}",
        "data.split.valid_fraction=0.05",
        "data.split.test_fraction=0.05",
        *args.overrides,
    ]


def load(config: Config, ranks: Ranks, count: int) -> Data:
    """The first `count` batches of an epoch and a check batch, on the device."""
    loaders, copies = open_loaders(config, ranks), []
    batches = []
    for batch in islice(loaders["train"], count):
        synchronize(ranks.device)
        began = time.perf_counter()
        batches.append(batch.to(ranks.device, non_blocking=True))
        synchronize(ranks.device)
        copies.append(time.perf_counter() - began)
    check = next(iter(loaders["valid"])).to(ranks.device)
    lengths = {
        name: torch.cat([batch.sequences[name].layout.lengths for batch in batches])
        for name in batches[0].sequences
    }
    return Data(
        batches,
        check,
        loaders,
        {
            "batch_size": config.data.batch_size,
            "mean_length": {name: float(n.double().mean()) for name, n in lengths.items()},
            "longest": {name: int(n.max()) for name, n in lengths.items()},
            "copy_to_device_ms": statistics.median(copies) * 1e3,
        },
    )


def unseen(batch: Batch) -> Batch:
    """The same batch with lengths for which no schedule has been made yet."""
    sequences = {
        name: replace(s, layout=replace(s.layout, lengths=s.layout.lengths.clone()))
        for name, s in batch.sequences.items()
    }
    return replace(batch, sequences=sequences)

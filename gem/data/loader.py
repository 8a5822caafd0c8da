"""Batches of a split, epoch after epoch: order, shards, workers, position."""

import logging
import multiprocessing
import multiprocessing.context
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gem.data.batch import Batch
from gem.data.collate import Collator
from gem.data.errors import BadRowError
from gem.data.plan import plan_epoch, rank_range, steps_per_epoch
from gem.data.reader import SPLITS, FileIndex
from gem.data.schema import Schema
from gem.data.stream import Item, Stream

if TYPE_CHECKING:
    from gem.config import DataConfig, SplitConfig

log = logging.getLogger(__name__)

_LOGGED_ROWS = 5


class Loader:
    """Batches of one split of parquet files.

    Iterating goes from the current position to the end of the epoch; the next iteration is the next
    epoch. The order follows from (seed, epoch) alone: not from workers, and ranks share it, each
    taking a contiguous range of rows, so that every rank takes the same number of steps. When bad
    rows are skipped a batch has fewer rows, never other ones. A batch may be empty.

    Memory holds at most `shuffle_buffer` rows per worker, and the batches that workers prefetch.

    Args:
        files: parquet files whose columns match `schema`.
        schema: what the columns mean.
        split: `train`, `valid`, `test` or `all`.
        split_config: where validation and test begin.
        batch_size: rows per batch and rank.
        seed: of the order, together with the epoch.
        shuffle: shuffle row groups, and rows within `shuffle_buffer` of them.
        shuffle_buffer: rows that are read together.
        workers: processes that read and pack; 0 does it in this one.
        rank, world_size: this process's share.
        on_bad_row: `error` or `skip`.
        drop_last: leave out the rows that do not fill a batch on every rank.
        pin_memory: hand out pinned memory, for asynchronous copies to a GPU.
        index: what `FileIndex` found in these files, to save reading it again.

    Attributes:
        steps: batches per epoch, the same on every rank.
        rows: rows of the split over all ranks.
        epoch, step: position of the next batch.
        skipped: rows that were skipped in the batches handed out, by reason.

    Raises:
        ValueError: an argument is out of range, files do not match the schema, or `drop_last`
            leaves no batch.
        BadRowError: (from iterating) a row breaks the schema, and `on_bad_row` is `error`.
    """

    def __init__(
        self,
        files: list[str],
        schema: Schema,
        split: str,
        *,
        split_config: "SplitConfig",
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        shuffle_buffer: int = 16384,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        on_bad_row: str = "error",
        drop_last: bool = False,
        pin_memory: bool = False,
        index: FileIndex | None = None,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split!r}; it must be one of {', '.join(SPLITS)}")
        if on_bad_row not in ("error", "skip"):
            raise ValueError(f"on_bad_row={on_bad_row!r}; it must be error or skip")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("shuffle_buffer", shuffle_buffer, 1),
            ("workers", workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}; it must be at least {least}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not in 0 .. world_size - 1 = {world_size - 1}")
        schema.validate()
        skip = on_bad_row == "skip"
        self._index = index or FileIndex(files, schema, split_config, shuffle_buffer, skip)
        self._counts = self._index.counts[split]
        self._collator = Collator(schema, self._index.files, skip)
        self.schema = schema
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.workers = workers
        self.rank = rank
        self.world_size = world_size
        self.pin_memory = pin_memory
        self.rows = int(self._counts.sum())
        self.steps = steps_per_epoch(self.rows, world_size, batch_size, drop_last)
        if drop_last and self.steps == 0:
            raise ValueError(
                f"split '{split}' has {self.rows} rows for {world_size} ranks: not one batch of "
                f"{batch_size} rows each"
            )
        self.epoch = 0
        self.step = 0
        self.skipped: dict[str, int] = {}

    @property
    def files(self) -> list[str]:
        """The files; `Batch.rows` counts into them."""
        return self._index.files

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._batches())
        try:
            for batch, skipped in batches:
                self.step += 1
                self._count(skipped)
                yield batch
        finally:
            # Ends the workers now, and not when the garbage collector comes by.
            del batches
        self.epoch += 1
        self.step = 0

    def reset(self) -> None:
        """Goes back to the start of the epoch."""
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "skipped": dict(self.skipped),
            "rows": self.rows,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "shuffle_buffer": self.shuffle_buffer,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position; what lies before it is not read.

        Raises:
            ValueError: it lies within an epoch whose order was another one.
        """
        for name in ("rows", "batch_size", "world_size", "shuffle_buffer"):
            if state["step"] and state[name] != getattr(self, name):
                raise ValueError(
                    f"the position was saved in mid-epoch with {name}={state[name]}; it means "
                    f"nothing with {name}={getattr(self, name)}"
                )
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.seed = state["seed"]
        self.skipped = dict(state["skipped"])

    def _batches(self) -> Iterator[Item]:
        stream = self._stream()
        if self.workers == 0 or self.step >= self.steps:
            for item in stream:
                yield _unwrap(item)
            return
        loader = DataLoader(
            stream,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_same,
            pin_memory=self.pin_memory,
            prefetch_factor=max(2, 8 // self.workers),
            worker_init_fn=_single_thread,
            multiprocessing_context=_context(),
            # Of its own, or the seeds of workers would be drawn from the state that dropout uses.
            generator=torch.Generator(),
        )
        for item in loader:
            yield _unwrap(item)

    def _stream(self) -> Stream:
        groups = np.cumsum([segment.start == 0 for segment in self._index.segments])
        plan = plan_epoch(
            self._counts, groups, self.shuffle_buffer, self.seed, self.epoch, self.shuffle
        )
        return Stream(
            self._index,
            self.split,
            plan,
            rank_range(self.rows, self.rank, self.world_size),
            self.batch_size,
            range(self.step, self.steps),
            self._collator,
            self.pin_memory and self.workers == 0,
        )

    def _count(self, skipped: list[tuple[str, str]]) -> None:
        for reason, message in skipped:
            if sum(self.skipped.values()) < _LOGGED_ROWS:
                log.warning("skipped %s", message)
            self.skipped[reason] = self.skipped.get(reason, 0) + 1


def _unwrap(item: Item | BadRowError) -> Item:
    if isinstance(item, BadRowError):
        raise item
    return item


def _same(item: Item) -> Item:
    return item


def _context() -> multiprocessing.context.BaseContext:
    """Workers are forked by a server that has imported this module and runs no threads.

    Forking the training process itself could copy a lock that one of its threads holds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _single_thread(worker: int) -> None:
    torch.set_num_threads(1)


def make_loaders(
    data: "DataConfig", *, seed: int, rank: int, world_size: int, device: torch.device
) -> dict[str, Loader]:
    """Prepares the data set and opens its splits.

    Args:
        data: the data section of the config; `data.dataset` is instantiated by its `_target_` if it
            is not an object with `prepare()` yet.
        seed: of the order of training rows.
        rank, world_size: this process's share.
        device: where batches will go; for a GPU they are handed out in pinned memory.

    Returns:
        `train` (shuffled, full batches only), `valid` and `test` (in order, complete).
    """
    if data.workers > 0:
        # The server imports for seconds; meanwhile data and model are made ready.
        _context()
        forkserver.ensure_running()
    dataset = data.dataset if hasattr(data.dataset, "prepare") else _instantiate(data.dataset)
    skip = data.on_bad_row.value == "skip"
    index = FileIndex(dataset.prepare(), data.schema, data.split, data.shuffle_buffer, skip)
    return {
        split: Loader(
            index.files,
            data.schema,
            split,
            split_config=data.split,
            batch_size=data.batch_size if split == "train" else data.eval_batch_size,
            seed=seed,
            shuffle=split == "train",
            shuffle_buffer=data.shuffle_buffer,
            workers=data.workers,
            rank=rank,
            world_size=world_size,
            on_bad_row=data.on_bad_row.value,
            drop_last=split == "train",
            pin_memory=torch.device(device).type == "cuda",
            index=index,
        )
        for split in ("train", "valid", "test")
    }


def _instantiate(config: Any) -> Any:
    # Hydra is needed by those who configure a data set by name, not by those who read files.
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        # The data set's own sentence, without Hydra's frame around it.
        raise error.__cause__ or error from None

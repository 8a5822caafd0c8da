"""What a worker process does: reads chunks, makes every workers-th batch of its rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from gem.data.batch import Batch
from gem.data.collate import Collator
from gem.data.columns import Columns, concat, take
from gem.data.errors import BadRowError
from gem.data.plan import EpochPlan
from gem.data.reader import FileIndex, SegmentReader

Item = tuple[Batch, list[tuple[str, str]]]
"""A batch, and (reason, message) of each row that was left out of it."""


@dataclass(eq=False)
class Stream(IterableDataset):
    """A rank's batches from one step to another; a worker makes every workers-th of them."""

    index: FileIndex
    split: str
    plan: EpochPlan
    span: tuple[int, int]
    batch_size: int
    steps: range
    collator: Collator
    pin_memory: bool

    def __iter__(self) -> Iterator[Item | BadRowError]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        reader = SegmentReader(self.index)
        self._loaded: tuple[int, Columns, np.ndarray] | None = None
        try:
            for step in self.steps[number::workers]:
                batch = self._batch(reader, step, number, workers)
                yield (batch.pin_memory() if self.pin_memory else batch), self.collator.skipped
        except BadRowError as error:
            # Raised by the reader of the stream: a worker's own exception arrives as a traceback.
            yield error
        finally:
            reader.close()

    def _batch(self, reader: SegmentReader, step: int, number: int, workers: int) -> Batch:
        start = min(self.span[0] + step * self.batch_size, self.span[1])
        stop = min(start + self.batch_size, self.span[1])
        parts = []
        while start < stop:
            chunk = self.plan.chunk_at(start)
            table, local = self._load(reader, chunk, number, workers)
            first, last = self.plan.starts[chunk : chunk + 2]
            end = min(stop, int(last))
            parts.append((table, local[start - first : end - first]))
            start = end
        if len(parts) == 1:
            return self.collator(*parts[0])
        if not parts:
            table = self._empty(reader)
        else:
            table = concat(take(table, rows) for table, rows in parts)
        return self.collator(table, np.arange(sum(len(rows) for _, rows in parts)))

    def _load(
        self, reader: SegmentReader, chunk: int, number: int, workers: int
    ) -> tuple[Columns, np.ndarray]:
        """A chunk's rows that this worker needs, and where in them each position's row is."""
        if self._loaded is None or self._loaded[0] != chunk:
            self._loaded = None
            segments = [self.index.segments[i] for i in self.plan.chunks[chunk]]
            order = self.plan.order(chunk)
            position = np.arange(len(order)) + self.plan.starts[chunk] - self.span[0]
            step = position // self.batch_size
            mine = (position >= 0) & (step >= self.steps.start) & (step < self.steps.stop)
            mine &= (step - self.steps.start) % workers == number
            needed = np.zeros(len(order), dtype=bool)
            needed[order[mine]] = True
            parts, first = [], 0
            for segment in segments:
                part = reader.read(segment, self.split)
                rows = len(next(iter(part.values())).values)
                keep = needed[first : first + rows]
                parts.append(part if keep.all() else take(part, np.flatnonzero(keep)))
                first += rows
            self._loaded = chunk, concat(parts), (np.cumsum(needed) - 1)[order]
        return self._loaded[1:]

    def _empty(self, reader: SegmentReader) -> Columns:
        """The columns without a row, for a rank whose rows have ended."""
        segment = self.index.segments[0]
        return take(reader.read(segment, "all"), np.zeros(0, dtype=np.int64))

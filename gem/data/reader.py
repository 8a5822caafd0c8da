"""Parquet files as segments of rows that are read one by one, with bounded memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.columns import Column, Columns, check_columns, columns_of, concat
from gem.data.errors import BadRowError
from gem.data.schema import Schema

if TYPE_CHECKING:
    from gem.config import SplitConfig

SPLITS = ("train", "valid", "test", "all")
ROWS = "__rows__"
"""The column of every table that is read: file index and row within the file."""

_EARLIEST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Segment:
    """Rows `start .. stop - 1` of a row group; `first` is the row group's first row in its file."""

    file: int
    group: int
    start: int
    stop: int
    first: int
    group_rows: int


class FileIndex:
    """What is known of the files before they are read: columns, row groups, the split by time.

    Reads the footers and, once, the column of impression times; keeps neither. Fractions are cut at
    exact quantiles of time: rows of the same second are on the same side.

    Args:
        files: parquet files.
        schema: what the columns mean; every file must have them.
        split_config: fractions or times at which validation and test begin.
        segment_rows: a row group with more rows is read in segments of at most so many.
        skip_bad_rows: a row without a time is left to be skipped (in `train`), not an error.

    Attributes:
        segments: all segments, in order of files and rows.
        counts: per split, [segments] int64: rows of each segment that belong to it.
        valid_from, test_from: the seconds at which validation and test begin.

    Raises:
        ValueError: no file, a column that is missing or of a wrong type.
        BadRowError: a row without a time.
    """

    def __init__(
        self,
        files: list[str],
        schema: Schema,
        split_config: "SplitConfig",
        segment_rows: int,
        skip_bad_rows: bool = False,
    ) -> None:
        if not files:
            raise ValueError("there is no parquet file to read")
        split_config.validate()
        self.files = [os.path.abspath(file) for file in files]
        self.schema = schema
        self.segments: list[Segment] = []
        times = []
        for file_index, name in enumerate(self.files):
            with pq.ParquetFile(name) as file:
                check_columns(name, file.schema_arrow, schema)
                self._add_segments(file_index, file.metadata, segment_rows)
                times.append(self._times(name, file, skip_bad_rows))
        time = np.concatenate(times)
        self.valid_from, self.test_from = _cuts(time, split_config)
        self.counts = {split: self._count(time, split) for split in SPLITS}

    def _add_segments(self, file_index: int, metadata: pq.FileMetaData, limit: int) -> None:
        first = 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            parts = -(-rows // limit)
            edges = [rows * part // parts for part in range(parts + 1)] if rows else []
            for start, stop in pairwise(edges):
                self.segments.append(Segment(file_index, group, start, stop, first, rows))
            first += rows

    def _times(self, name: str, file: pq.ParquetFile, skip_bad_rows: bool) -> np.ndarray:
        column = self.schema.time
        read = file.read(columns=[column], use_threads=False).column(column)
        times = [Column.from_arrow(chunk) for chunk in read.chunks]
        if not times:
            return np.zeros(0, dtype=np.int64)
        times = Column.concat(times)
        values = times.values.astype(np.int64)
        if times.nulls is not None:
            if not skip_bad_rows:
                row = int(np.flatnonzero(times.nulls)[0])
                raise BadRowError(f"{name}, row {row}: column '{column}' is null", "null")
            values[times.nulls] = _EARLIEST
        return values

    def _count(self, time: np.ndarray, split: str) -> np.ndarray:
        inside = np.concatenate([[0], np.cumsum(self.belongs(time, split))])
        sizes = [segment.stop - segment.start for segment in self.segments]
        return np.diff(inside[np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)])

    def belongs(self, time: np.ndarray, split: str) -> np.ndarray:
        """[rows] bool: which rows with these times (int64) are in the split."""
        if split == "all":
            return np.ones(len(time), dtype=bool)
        if split == "train":
            return time < self.valid_from
        if split == "valid":
            return (time >= self.valid_from) & (time < self.test_from)
        return time >= self.test_from


def _cuts(time: np.ndarray, config: "SplitConfig") -> tuple[int, int]:
    if config.valid_from is not None:
        return config.valid_from, config.test_from
    if not len(time):
        return 0, 0
    ordered = np.sort(time)
    rows = len(ordered)
    cuts = []
    for fraction in (config.valid_fraction + config.test_fraction, config.test_fraction):
        position = rows - round(rows * fraction)
        cuts.append(int(ordered[position]) if position < rows else int(ordered[-1]) + 1)
    return cuts[0], cuts[1]


class SegmentReader:
    """Reads segments of an index, keeping a file open between calls.

    A segment that follows the last one in its row group is read without starting over.
    """

    def __init__(self, index: FileIndex) -> None:
        self.index = index
        self._columns = list(dict.fromkeys(column for column, _, _ in columns_of(index.schema)))
        self._file: tuple[int, pq.ParquetFile] | None = None
        self._stream: tuple[Segment, Iterator[pa.RecordBatch]] | None = None

    def read(self, segment: Segment, split: str) -> Columns:
        """The split's rows of a segment, and where they come from under the name `ROWS`."""
        size = segment.stop - segment.start
        if size == segment.group_rows:
            table = self._open(segment.file).read_row_group(
                segment.group, columns=self._columns, use_threads=False
            )
        else:
            table = self._next(segment)
        columns: Columns = {}
        for name in self._columns:
            chunks = [Column.from_arrow(chunk) for chunk in table.column(name).chunks]
            columns[name] = Column.concat(chunks)
        rows = np.stack(
            [
                np.full(size, segment.file, dtype=np.int64),
                np.arange(size) + segment.first + segment.start,
            ],
            axis=1,
        )
        columns[ROWS] = Column(rows, None, None)
        time = columns[self.index.schema.time]
        seconds = time.values.astype(np.int64)
        if time.nulls is not None:
            seconds[time.nulls] = _EARLIEST
        inside = self.index.belongs(seconds, split)
        if inside.all():
            return columns
        chosen = np.flatnonzero(inside)
        return {name: column.take(chosen) for name, column in columns.items()}

    def read_all(self, segments: list[Segment], split: str) -> Columns:
        """The split's rows of several segments, one after another."""
        return concat(self.read(segment, split) for segment in segments)

    def close(self) -> None:
        self._stream = None
        if self._file is not None:
            self._file[1].close()
            self._file = None

    def _open(self, file: int) -> pq.ParquetFile:
        if self._file is None or self._file[0] != file:
            self.close()
            # Buffered pages instead of whole column chunks: a row group may be larger than memory.
            self._file = file, pq.ParquetFile(self.index.files[file], buffer_size=1 << 20)
        return self._file[1]

    def _next(self, segment: Segment) -> pa.Table:
        previous = None if self._stream is None else self._stream[0]
        follows = (
            previous is not None
            and (previous.file, previous.group) == (segment.file, segment.group)
            and previous.stop == segment.start
        )
        if not follows:
            batches = self._open(segment.file).iter_batches(
                row_groups=[segment.group],
                columns=self._columns,
                use_threads=False,
                batch_size=1024,
            )
            stream = _Rows(batches)
            stream.read(segment.start, keep=False)
        else:
            stream = self._stream[1]
        self._stream = segment, stream
        return pa.Table.from_batches(stream.read(segment.stop - segment.start))


class _Rows:
    """Record batches, handed out by numbers of rows."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def read(self, rows: int, keep: bool = True) -> list[pa.RecordBatch]:
        found = []
        while rows > 0:
            batch = self._rest if self._rest is not None else next(self._batches)
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            batch = batch.slice(0, rows)
            rows -= batch.num_rows
            if keep:
                found.append(batch)
        return found

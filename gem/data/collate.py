"""From columns to a Batch: checks rows, hashes ids, packs events; nothing is padded."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from gem.attention import JaggedLayout
from gem.data.batch import Batch, JaggedSequence
from gem.data.columns import Column, Columns, jagged_index
from gem.data.errors import BadIdError, BadRowError
from gem.data.hashing import hash_ids, table_seed
from gem.data.jagged import keyed_jagged_tensor
from gem.data.reader import ROWS
from gem.data.schema import (
    DenseFeature,
    DenseTransform,
    IdFeature,
    IdKind,
    Schema,
    SequenceFeature,
)


class Collator:
    """Makes batches of rows that were read.

    Args:
        schema: what the columns mean.
        files: names of the files, for messages.
        skip_bad_rows: leave out rows that break the schema instead of raising.
    """

    def __init__(self, schema: Schema, files: list[str], skip_bad_rows: bool = False) -> None:
        self.schema = schema
        self.files = files
        self.skip_bad_rows = skip_bad_rows
        self.skipped: list[tuple[str, str]] = []
        """(reason, message) of the rows that the last call left out."""
        self._tasks = schema.tasks_in_order()
        self._seeds = {
            name: table_seed(schema.table_of(name, feature))
            for name, feature in schema.id_features()
        }

    def __call__(self, table: Columns, rows: np.ndarray) -> Batch:
        """A batch of the rows at these positions of `table`, in their order.

        Raises:
            BadRowError: a row breaks the schema, and rows are not skipped.
        """
        self.skipped = []
        self._table = table
        rows = self._drop(rows, self._check_rows(rows))
        while True:
            bad = _BadRows(len(rows))
            events = {
                sequence.name: self._events(sequence, rows, bad)
                for sequence in self.schema.sequences
            }
            sparse = self._sparse(rows, bad)
            if not bad.found:
                break
            rows = self._drop(rows, bad)
        labels, weights = self._labels(rows, _BadRows(len(rows)))
        time = self._column(self.schema.time, rows)
        return Batch(
            dense=_matrix([self._dense(f, rows) for f in self.schema.dense], len(rows)),
            sparse=sparse,
            sequences=events,
            labels=labels,
            weights=weights,
            probabilities=self._probabilities(rows),
            users=torch.from_numpy(self._column(self.schema.user, rows).astype(np.int64)),
            times=torch.from_numpy(time.astype(np.int64)),
            rows=torch.from_numpy(self._column(ROWS, rows)),
        )

    def _column(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self._table[name].values[rows]

    def _drop(self, rows: np.ndarray, bad: "_BadRows") -> np.ndarray:
        """The rows that are not bad; raises for the first one if bad rows are errors."""
        if not bad.found:
            return rows
        where = self._column(ROWS, rows)
        for i in sorted(bad.found):
            reason, message = bad.found[i]
            message = f"{self.files[where[i, 0]]}, row {where[i, 1]}: {message()}"
            if not self.skip_bad_rows:
                raise (BadIdError if reason == "id" else BadRowError)(message, reason)
            self.skipped.append((reason, message))
        return np.delete(rows, list(bad.found))

    def _check_rows(self, rows: np.ndarray) -> "_BadRows":
        """What can be told without looking at events."""
        bad = _BadRows(len(rows))
        labels = {task.column or task.name for task in self.schema.tasks}
        unknown = {task.probability for task in self.schema.tasks}
        for name, column in self._table.items():
            if column.nulls is not None and name not in labels | unknown:
                what = "is null" if column.offsets is None else "is null or holds a null"
                bad.add(column.nulls[rows], "null", lambda i, n=name, w=what: f"column '{n}' {w}")
        for feature in self.schema.dense:
            name = feature.column or feature.name
            values = self._column(name, rows)
            bad.add(
                ~np.isfinite(values),
                "dense",
                lambda i, n=name, v=values: f"column '{n}' holds {v[i]}; it must be finite",
            )
        for sequence in self.schema.sequences:
            self._check_lengths(sequence, rows, bad)
        self._labels(rows, bad)
        return bad

    def _check_lengths(self, sequence: SequenceFeature, rows: np.ndarray, bad: "_BadRows") -> None:
        time, *others = _event_columns(sequence)
        lengths = _lengths(self._table[time], rows)
        for name in others:
            other = _lengths(self._table[name], rows)
            bad.add(
                other != lengths,
                "lengths",
                lambda i, n=name, o=other: (
                    f"sequence '{sequence.name}' has {lengths[i]} events in column '{time}', "
                    f"but {o[i]} in column '{n}'"
                ),
            )

    def _labels(self, rows: np.ndarray, bad: "_BadRows") -> tuple[Tensor, Tensor]:
        labels = torch.zeros(len(rows), len(self._tasks))
        weights = torch.zeros(len(rows), len(self._tasks))
        order = [task.name for task in self.schema.tasks]
        for task in self._tasks:
            name = task.column or task.name
            values = self._column(name, rows)
            counts = np.ones(len(rows), dtype=bool)
            if task.given is not None:
                given = order.index(task.given)
                counts = ((labels[:, given] == 1) & (weights[:, given] == 1)).numpy()
            nulls = self._table[name].nulls
            if nulls is not None:
                bad.add(
                    nulls[rows] & counts,
                    "null",
                    lambda i, n=name, t=task: (
                        f"column '{n}' is null"
                        + ("" if t.given is None else f", but task '{t.given}' is 1")
                    ),
                )
            bad.add(
                (values != 0) & (values != 1) & counts,
                "label",
                lambda i, n=name, v=values: f"label '{n}' is {v[i]}; it must be 0 or 1",
            )
            column = order.index(task.name)
            labels[:, column] = torch.from_numpy(np.where(counts, values, 0).astype(np.float32))
            weights[:, column] = torch.from_numpy(counts)
        return labels, weights

    def _probabilities(self, rows: np.ndarray) -> Tensor | None:
        names = [task.probability for task in self.schema.tasks]
        if not any(names):
            return None
        result = torch.full((len(rows), len(names)), float("nan"))
        for i, name in enumerate(names):
            if name is not None:
                column = self._table[name].take(rows)
                values = column.values.astype(np.float32)
                result[:, i] = torch.from_numpy(np.where(column.null_rows(), np.nan, values))
        return result

    def _dense(self, feature: DenseFeature, rows: np.ndarray) -> np.ndarray:
        return _transform(self._column(feature.column or feature.name, rows), feature.transform)

    def _sparse(self, rows: np.ndarray, bad: "_BadRows") -> KeyedJaggedTensor:
        keys, values, lengths = [], [], []
        for feature in self.schema.sparse:
            name = feature.column or feature.name
            column = self._table[name]
            length = _lengths(column, rows)
            if column.offsets is None:
                ids = column.values[rows]
            else:
                ids = column.values[jagged_index(column.offsets[rows], length)]
            keys.append(feature.name)
            values.append(self._table_rows(feature.name, feature, name, ids, length, bad))
            lengths.append(length)
        if not keys:
            return keyed_jagged_tensor([], torch.zeros(0).long(), torch.zeros(0).long())
        return keyed_jagged_tensor(
            keys,
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(np.concatenate(lengths)),
            [len(ids) for ids in values],
        )

    def _table_rows(
        self,
        full_name: str,
        feature: IdFeature,
        column: str,
        ids: np.ndarray,
        lengths: np.ndarray,
        bad: "_BadRows",
    ) -> np.ndarray:
        if feature.id is IdKind.hashed:
            return hash_ids(ids, feature.rows, self._seeds[full_name])
        outside = (ids < 0) | (ids >= feature.rows)
        bad.add_elements(
            outside,
            lengths,
            "id",
            lambda j: (
                f"feature '{full_name}' (column '{column}') has id {ids[j]}, outside its table of "
                f"{feature.rows} rows"
            ),
        )
        return ids.astype(np.int64)

    def _events(
        self, sequence: SequenceFeature, rows: np.ndarray, bad: "_BadRows"
    ) -> JaggedSequence:
        time_name, *_ = _event_columns(sequence)
        full = _lengths(self._table[time_name], rows)
        lengths = full if sequence.max_length is None else np.minimum(full, sequence.max_length)
        index: tuple[np.ndarray, np.ndarray] | None = None

        def newest(name: str) -> np.ndarray:
            nonlocal index
            column = self._table[name]
            starts = column.offsets[rows + 1] - lengths
            # Columns whose rows are all sound have the same offsets, and share one index.
            if index is None or not np.array_equal(index[0], starts):
                index = starts, jagged_index(starts, lengths)
            return column.values[index[1]]

        times = newest(time_name).astype(np.int64)
        ages = np.repeat(self._column(self.schema.time, rows).astype(np.int64), lengths) - times
        bad.add_elements(
            ages <= 0,
            lengths,
            "history",
            lambda j: (
                f"column '{time_name}' has an event at {times[j]}, not before the impression at "
                f"{times[j] + ages[j]}"
            ),
        )
        falls = np.zeros(len(times), dtype=bool)
        falls[1:] = times[1:] < times[:-1]
        starts = np.cumsum(lengths)[:-1]
        falls[starts[starts < len(times)]] = False
        bad.add_elements(
            falls,
            lengths,
            "order",
            lambda j: (
                f"column '{time_name}' has {times[j]} after {times[j - 1]}; events must be sorted "
                "by time, oldest first"
            ),
        )
        ids = []
        for field in sequence.fields:
            name = field.column or f"{sequence.name}_{field.name}"
            full_name = f"{sequence.name}.{field.name}"
            ids.append(self._table_rows(full_name, field, name, newest(name), lengths, bad))
        dense = []
        for value in sequence.dense:
            name = value.column or f"{sequence.name}_{value.name}"
            values = newest(name)
            bad.add_elements(
                ~np.isfinite(values),
                lengths,
                "dense",
                lambda j, n=name, v=values: f"column '{n}' holds {v[j]}; it must be finite",
            )
            dense.append(_transform(values, value.transform))
        host = torch.from_numpy(lengths)
        return JaggedSequence(
            ids=keyed_jagged_tensor(
                [field.name for field in sequence.fields],
                torch.from_numpy(np.concatenate(ids)),
                host.repeat(len(ids)),
                [len(times)] * len(ids),
            ),
            age=torch.from_numpy(ages.astype(np.float32)),
            dense=_matrix(dense, len(times)),
            layout=JaggedLayout.from_lengths(host, torch.device("cpu")),
        )


class _BadRows:
    """The first thing that is wrong with each bad row of a batch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.found: dict[int, tuple[str, Callable[[], str]]] = {}

    def add(self, mask: np.ndarray, reason: str, message: Callable[[int], str]) -> None:
        """Notes rows by a mask [rows]."""
        if mask.any():
            for i in np.flatnonzero(mask).tolist():
                self.found.setdefault(i, (reason, lambda i=i: message(i)))

    def add_elements(
        self, mask: np.ndarray, lengths: np.ndarray, reason: str, message: Callable[[int], str]
    ) -> None:
        """Notes rows by a mask [elements] over their jagged elements."""
        if mask.any():
            elements = np.flatnonzero(mask)
            rows = np.searchsorted(np.cumsum(lengths), elements, side="right")
            for i, j in zip(rows.tolist(), elements.tolist(), strict=True):
                self.found.setdefault(i, (reason, lambda j=j: message(j)))


def _lengths(column: Column, rows: np.ndarray) -> np.ndarray:
    if column.offsets is None:
        return np.ones(len(rows), dtype=np.int64)
    return column.offsets[rows + 1] - column.offsets[rows]


def _event_columns(sequence: SequenceFeature) -> list[str]:
    """The columns of a sequence, its time first."""
    return [sequence.time or f"{sequence.name}_time"] + [
        part.column or f"{sequence.name}_{part.name}"
        for part in [*sequence.fields, *sequence.dense]
    ]


def _transform(values: np.ndarray, transform: DenseTransform) -> np.ndarray:
    values = values.astype(np.float32)
    if transform is DenseTransform.log1p:
        return np.copysign(np.log1p(np.abs(values)), values)
    return values


def _matrix(columns: list[np.ndarray], rows: int) -> Tensor:
    """[rows, columns] float32."""
    if not columns:
        return torch.zeros(rows, 0)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32, copy=False))

"""Which parquet columns a schema reads, of which types, and how they look in memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Self

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gem.data.hashing import hash_strings
from gem.data.schema import IdKind, Schema


class Use(Enum):
    """What a column may hold: its element types, and whether per row one, a list, or either."""

    user = ("an integer or a string", {"integer", "string"}, {False})
    time = ("an integer (seconds)", {"integer"}, {False})
    label = ("a number or a boolean", {"integer", "float", "boolean"}, {False})
    value = ("a number", {"integer", "float", "boolean"}, {False})
    ids = ("an integer or a string, or a list of them", {"integer", "string"}, {False, True})
    direct_ids = ("an integer or a list of integers", {"integer"}, {False, True})
    event_ids = ("a list of integers or strings", {"integer", "string"}, {True})
    direct_event_ids = ("a list of integers", {"integer"}, {True})
    event_times = ("a list of integers (seconds)", {"integer"}, {True})
    event_values = ("a list of numbers", {"integer", "float"}, {True})


def columns_of(schema: Schema) -> list[tuple[str, Use, str]]:
    """(column, use, the schema's name for it) of everything that a schema reads."""
    found = [(schema.user, Use.user, "user"), (schema.time, Use.time, "time")]
    for task in schema.tasks:
        found.append((task.column or task.name, Use.label, f"task '{task.name}'"))
        if task.probability is not None:
            found.append((task.probability, Use.value, f"probability of task '{task.name}'"))
    for feature in schema.dense:
        found.append((feature.column or feature.name, Use.value, f"dense feature '{feature.name}'"))
    for feature in schema.sparse:
        use = Use.direct_ids if feature.id is IdKind.direct else Use.ids
        found.append((feature.column or feature.name, use, f"sparse feature '{feature.name}'"))
    for sequence in schema.sequences:
        of = f"of sequence '{sequence.name}'"
        found.append((sequence.time or f"{sequence.name}_time", Use.event_times, f"time {of}"))
        for field in sequence.fields:
            use = Use.direct_event_ids if field.id is IdKind.direct else Use.event_ids
            column = field.column or f"{sequence.name}_{field.name}"
            found.append((column, use, f"field '{field.name}' {of}"))
        for value in sequence.dense:
            column = value.column or f"{sequence.name}_{value.name}"
            found.append((column, Use.event_values, f"dense '{value.name}' {of}"))
    return found


def check_columns(file: str, file_schema: pa.Schema, schema: Schema) -> None:
    """Raises ValueError naming file and column if one is missing or of a type that cannot be."""
    for column, use, name in columns_of(schema):
        index = file_schema.get_all_field_indices(column)
        if len(index) != 1:
            there = "is not there" if not index else "is there twice"
            raise ValueError(
                f"{file}: column '{column}' ({name}) {there}; the file has "
                f"{', '.join(file_schema.names)}"
            )
        kind = file_schema.field(index[0]).type
        wanted, families, listed = use.value
        is_list = _is_list(kind)
        family = _family(kind.value_type if is_list else kind)
        if family not in families or is_list not in listed:
            raise ValueError(
                f"{file}: column '{column}' ({name}) has type {kind}; it must be {wanted}"
            )


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _family(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    return "other"


@dataclass(frozen=True)
class Column:
    """One column of some rows.

    Attributes:
        values: [rows] or, for lists, [elements]: int32, int64 or float32; strings are hashed to
            int64; what stands in for a null is 0.
        offsets: [rows + 1] int64 into `values`, or None when every row has one value.
        nulls: [rows] bool, rows that are null or whose list holds a null; None when there are none.
    """

    values: np.ndarray
    offsets: np.ndarray | None
    nulls: np.ndarray | None

    @classmethod
    def from_arrow(cls, array: pa.Array) -> Self:
        """Takes over one column as pyarrow reads it."""
        if not _is_list(array.type):
            nulls = np.asarray(array.is_null()) if array.null_count else None
            return cls(_values(array), None, nulls)
        if pa.types.is_fixed_size_list(array.type):
            array = array.cast(pa.large_list(array.type.value_type))
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        elements = array.flatten()
        nulls = np.asarray(array.is_null()) if array.null_count else None
        if elements.null_count:
            inner = np.flatnonzero(np.asarray(elements.is_null()))
            nulls = np.zeros(len(array), dtype=bool) if nulls is None else nulls.copy()
            nulls[np.searchsorted(offsets, inner, side="right") - 1] = True
        return cls(_values(elements), offsets, nulls)

    @classmethod
    def concat(cls, columns: list[Self]) -> Self:
        """Rows of one column after another; single values become lists of one if any is a list."""
        if len(columns) == 1:
            return columns[0]
        nulls = None
        if any(column.nulls is not None for column in columns):
            nulls = np.concatenate([column.null_rows() for column in columns])
        offsets = None
        if any(column.offsets is not None for column in columns):
            lengths = np.concatenate([column.lengths() for column in columns])
            offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(np.concatenate([column.values for column in columns]), offsets, nulls)

    @property
    def num_rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def null_rows(self) -> np.ndarray:
        return np.zeros(self.num_rows, dtype=bool) if self.nulls is None else self.nulls

    def lengths(self) -> np.ndarray:
        """[rows] int64."""
        if self.offsets is None:
            return np.ones(len(self.values), dtype=np.int64)
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Self:
        """The rows at these positions, in their order."""
        nulls = None if self.nulls is None else self.nulls[rows]
        if self.offsets is None:
            return type(self)(self.values[rows], None, nulls)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return type(self)(self.values[jagged_index(starts, lengths)], offsets, nulls)


Columns = dict[str, Column]


def concat(tables: Iterable[Columns]) -> Columns:
    """Rows of one table after another; every table has the same columns."""
    tables = list(tables)
    return {name: Column.concat([table[name] for table in tables]) for name in tables[0]}


def take(table: Columns, rows: np.ndarray) -> Columns:
    """The rows at these positions of every column."""
    return {name: column.take(rows) for name, column in table.items()}


def jagged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Positions `starts[i] .. starts[i] + lengths[i] - 1` for each i in turn, int64."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    ends = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.from_numpy(lengths))
    # The operator reads as many input offsets as output offsets, but never the last one.
    inputs = torch.from_numpy(np.append(starts, 0))
    return torch.ops.fbgemm.expand_into_jagged_permute(
        torch.arange(len(starts)), inputs, ends, int(ends[-1])
    ).numpy()


def _values(array: pa.Array) -> np.ndarray:
    kind = array.type
    family = _family(kind)
    if family == "string":
        return hash_strings(array)
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if array.null_count:
        array = pc.fill_null(array, False if family == "boolean" else pa.scalar(0, kind))
    values = array.to_numpy(zero_copy_only=False)
    if family == "boolean":
        return values.astype(np.int32)
    if family == "float":
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    narrow = kind.bit_width < 32 or pa.types.is_int32(kind)
    return values.astype(np.int32 if narrow else np.int64)

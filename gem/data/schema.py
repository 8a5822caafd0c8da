"""What the columns of a table of impressions mean: features, sequences, tasks.

A schema is plain data: the reader checks a parquet file against it, the model sizes itself by it.
Its dataclasses are also the Hydra schema of `conf/data/*.yaml` under `data.schema`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

MAX_ROWS = 1 << 32
"""The hash tells at most so many rows of a table apart."""


class IdKind(Enum):
    """How an id becomes a row of its table.

    `hashed`: any int64 or string, spread over the rows by a fixed hash.
    `direct`: the id is the row; one outside `0 .. rows - 1` is an error.
    """

    hashed = "hashed"
    direct = "direct"


class Pooling(Enum):
    """How the embeddings of an id list become one vector; an empty list gives zeros."""

    sum = "sum"
    mean = "mean"


class DenseTransform(Enum):
    """What is done to a dense value before the model sees it.

    `log1p` is `sign(x) * log(1 + |x|)`, for counts and prices.
    """

    none = "none"
    log1p = "log1p"


@dataclass
class DenseFeature:
    """One float column; `column` defaults to the name."""

    name: str
    column: str | None = None
    transform: DenseTransform = DenseTransform.none


@dataclass
class IdFeature:
    """An id column and the embedding table it indexes.

    As a sparse feature the column holds one id or a list of ids per row; as a field of a sequence
    it holds a list with one id per event. Features that name the same `table` share its rows, so
    that a candidate's category and the category of a past event meet in one embedding.

    Args:
        name: the feature's name; unique among sparse features, or within its sequence.
        rows: rows of the table, the same for all that share it.
        table: the table's name; None gives the feature a table of its own.
        id: `hashed` or `direct`.
        pooling: `sum` or `mean`; sparse features only.
        column: the parquet column; None means the name (for a field: `<sequence>_<name>`).
    """

    name: str
    rows: int
    table: str | None = None
    id: IdKind = IdKind.hashed
    pooling: Pooling = Pooling.mean
    column: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rows, int) and self.rows < 1:
            raise ValueError(f"feature '{self.name}' has a table of {self.rows} rows; 1 or more")


@dataclass
class SequenceFeature:
    """A user's events of one kind, oldest first, every row with a length of its own.

    Args:
        name: the sequence's name.
        fields: ids of each event, such as item, category, event type.
        time: the column of event times; None means `<name>_time`. Same unit as `Schema.time`.
        dense: optional float values of each event.
        max_length: keep only the newest events; None keeps all.
    """

    name: str
    fields: list[IdFeature]
    time: str | None = None
    dense: list[DenseFeature] = field(default_factory=list)
    max_length: int | None = None


@dataclass
class Task:
    """A binary label.

    Args:
        name: such as `click` or `conversion`.
        column: the label's column, 0/1; None means the name.
        given: another task: only rows where that one is 1 count (conversion given click).
            The label may be null elsewhere.
        loss_weight: weight of the task's loss.
        prior: roughly the rate of positives, where predictions start.
        probability: a column with the true probability, where data is synthetic; it lets a run
            print the oracle's metrics beside the model's.
    """

    name: str
    column: str | None = None
    given: str | None = None
    loss_weight: float = 1.0
    prior: float = 0.5
    probability: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prior, float) and not 0 < self.prior < 1:
            raise ValueError(f"task '{self.name}' has prior {self.prior}; it must be in (0, 1)")


@dataclass
class Schema:
    """The columns of a table with one row per impression.

    Args:
        tasks: at least one.
        user: the column of the user's id (any int64 or string); groups rows for GAUC.
        time: the column of the impression's time, int64 seconds. History must be before it.
    """

    user: str
    time: str
    tasks: list[Task]
    dense: list[DenseFeature] = field(default_factory=list)
    sparse: list[IdFeature] = field(default_factory=list)
    sequences: list[SequenceFeature] = field(default_factory=list)

    def id_features(self) -> Iterator[tuple[str, IdFeature]]:
        """All id features with their full names: `name`, or `<sequence>.<field>`."""
        for feature in self.sparse:
            yield feature.name, feature
        for sequence in self.sequences:
            for id_field in sequence.fields:
                yield f"{sequence.name}.{id_field.name}", id_field

    def table_of(self, full_name: str, feature: IdFeature) -> str:
        """The name of the table that a feature indexes."""
        return feature.table or full_name

    def tables(self) -> dict[str, int]:
        """Rows of each embedding table, in order of first use."""
        rows: dict[str, int] = {}
        for full_name, feature in self.id_features():
            table = self.table_of(full_name, feature)
            if rows.setdefault(table, feature.rows) != feature.rows:
                raise ValueError(
                    f"table '{table}' has {rows[table]} rows, but feature '{full_name}' asks for "
                    f"{feature.rows}; features that share a table agree on its rows"
                )
        return rows

    def tasks_in_order(self) -> list[Task]:
        """The tasks, each after the one that it is given; raises ValueError for a circle."""
        ordered: dict[str, Task] = {}
        while len(ordered) < len(self.tasks):
            ready = {
                task.name: task
                for task in self.tasks
                if task.name not in ordered and (task.given is None or task.given in ordered)
            }
            if not ready:
                circle = [task.name for task in self.tasks if task.name not in ordered]
                raise ValueError(f"tasks {circle} are given each other in a circle")
            ordered |= ready
        return list(ordered.values())

    def validate(self) -> None:
        """Checks that names are unique and references resolve; raises ValueError."""
        _unique("task", [task.name for task in self.tasks])
        _unique("dense feature", [feature.name for feature in self.dense])
        _unique("sparse feature", [feature.name for feature in self.sparse])
        _unique("sequence", [sequence.name for sequence in self.sequences])
        if not self.tasks:
            raise ValueError("the schema has no task; give at least one label column")
        names = {task.name for task in self.tasks}
        for task in self.tasks:
            if task.given is not None and task.given not in names - {task.name}:
                raise ValueError(
                    f"task '{task.name}' is given '{task.given}', which is no other task; "
                    f"tasks are {sorted(names)}"
                )
        self.tasks_in_order()
        for sequence in self.sequences:
            if not sequence.fields:
                raise ValueError(f"sequence '{sequence.name}' has no id field")
            _unique(f"field of sequence '{sequence.name}'", [f.name for f in sequence.fields])
            _unique(f"dense of sequence '{sequence.name}'", [f.name for f in sequence.dense])
            if sequence.max_length is not None and sequence.max_length < 1:
                raise ValueError(
                    f"sequence '{sequence.name}' has max_length {sequence.max_length}; 1 or more"
                )
        for table, rows in self.tables().items():
            if rows > MAX_ROWS:
                raise ValueError(f"table '{table}' has {rows} rows; at most {MAX_ROWS} can be told")


def _unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} '{twice[0]}' is named twice in the schema")

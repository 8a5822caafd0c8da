"""Small tables for the tests of gem.data."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem.config import SplitConfig
from gem.data import Loader, Schema
from gem.data.schema import (
    DenseFeature,
    DenseTransform,
    IdFeature,
    IdKind,
    Pooling,
    SequenceFeature,
    Task,
)

SPLIT = SplitConfig(valid_fraction=0.1, test_fraction=0.1)


def small_schema(max_length: int | None = None) -> Schema:
    """Two tasks, two dense and four sparse features, a sequence with a dense field, a bare one."""
    return Schema(
        user="user",
        time="time",
        tasks=[
            Task("click", probability="click_probability"),
            Task("conversion", given="click"),
        ],
        dense=[
            DenseFeature("price", transform=DenseTransform.log1p),
            DenseFeature("score", column="raw_score"),
        ],
        sparse=[
            IdFeature("item", rows=1000, table="item"),
            IdFeature("color", rows=3, id=IdKind.direct),
            IdFeature("tags", rows=5, id=IdKind.direct, pooling=Pooling.sum),
            IdFeature("word", rows=50),
        ],
        sequences=[
            SequenceFeature(
                "browse",
                fields=[
                    IdFeature("item", rows=1000, table="item"),
                    IdFeature("event", rows=3, id=IdKind.direct),
                ],
                dense=[DenseFeature("dwell")],
                max_length=max_length,
            ),
            SequenceFeature("orders", fields=[IdFeature("item", rows=1000, table="item")]),
        ],
    )


def small_table(rows: int, first: int = 0) -> dict[str, list[Any]]:
    """Columns for `small_schema`; row i has time 1000 + i, i % 4 browse and i % 3 orders events."""
    index = range(first, first + rows)

    def events(count: int, of: Any) -> list[list[Any]]:
        return [[of(i, j) for j in range(i % count)] for i in index]

    return {
        "user": [i % 7 for i in index],
        "time": [1000 + i for i in index],
        "click": [i % 2 for i in index],
        "conversion": [None if i % 2 == 0 else int(i % 4 == 1) for i in index],
        "click_probability": [0.25 for _ in index],
        "price": [float(i) for i in index],
        "raw_score": [-0.5 * i for i in index],
        "item": [100 + i for i in index],
        "color": [i % 3 for i in index],
        "tags": [list(range(i % 5)) for i in index],
        "word": [f"word {i % 11}" for i in index],
        "browse_time": events(4, lambda i, j: 900 + i + j),
        "browse_item": events(4, lambda i, j: 10 * i + j),
        "browse_event": events(4, lambda i, j: j % 3),
        "browse_dwell": events(4, lambda i, j: i + 0.25 * j),
        "orders_time": events(3, lambda i, j: 500 + j),
        "orders_item": events(3, lambda i, j: 100 + i + j),
    }


TYPES: dict[str, pa.DataType] = {
    "user": pa.int32(),
    "time": pa.int64(),
    "click": pa.int32(),
    "conversion": pa.int32(),
    "click_probability": pa.float32(),
    "price": pa.float64(),
    "raw_score": pa.float32(),
    "item": pa.int32(),
    "color": pa.int8(),
    "tags": pa.list_(pa.int32()),
    "word": pa.string(),
    "browse_time": pa.list_(pa.int64()),
    "browse_item": pa.list_(pa.int32()),
    "browse_event": pa.list_(pa.int32()),
    "browse_dwell": pa.list_(pa.float32()),
    "orders_time": pa.list_(pa.int32()),
    "orders_item": pa.list_(pa.int64()),
}


def write(
    path: Path,
    table: dict[str, list[Any]],
    types: dict[str, pa.DataType] | None = None,
    group_rows: int = 16,
) -> str:
    """Writes a parquet file; `types` override `TYPES`."""
    types = {**TYPES, **(types or {})}
    columns = {
        name: pa.array(values, types.get(name), from_pandas=False) for name, values in table.items()
    }
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)
    return str(path)


def open_loader(files: list[str] | str, split: str = "all", **options: Any) -> Loader:
    """A loader of `small_schema` in batches of 8."""
    files = [files] if isinstance(files, str) else files
    schema = options.pop("schema", None) or small_schema()
    return Loader(files, schema, split, **{"split_config": SPLIT, "batch_size": 8, **options})


def row_numbers(batches: list[Any]) -> list[int]:
    """The rows within their files that batches hold, in order."""
    return [row for batch in batches for row in batch.rows[:, 1].tolist()]

"""The default data set: a world that is made up, with the true probabilities beside the labels."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.datasets.cache import parameters_of, prepared
from gem.data.datasets.truth import (
    CLICK_RATE,
    CONVERSION_RATE,
    History,
    Terms,
    bias_for,
    histories,
    sigmoid,
    terms,
)
from gem.data.datasets.world import DAY, START, Events, World, make_world

VERSION = 4

_ORDERS = 256
_GROUP_ROWS = 2048
_FILE_ROWS = 10 * _GROUP_ROWS


@dataclass
class Synthetic:
    """Impressions with a long browse history and a short order history.

    Args:
        cache: root of the cache; the files are written there once.
        num_rows: impressions, over `days`, sorted by time.
        num_users, num_items: size of the world.
        density: mean over maximum of the browse history's length, 0.01 .. 0.9. Lengths are
            log-normal, from 0 (new users) to `max_length`.
        max_length: events of the browse history that a row keeps at most.
        days: span of the impressions.
        history_days: span of the events before the first impression.
        seed: of everything that is drawn.
    """

    cache: str
    num_rows: int = 64_000
    num_users: int = 2500
    num_items: int = 2000
    density: float = 0.1
    max_length: int = 2048
    days: int = 30
    history_days: int = 180
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_rows", 1),
            ("num_users", 1),
            ("num_items", 100),
            ("max_length", 1),
            ("days", 1),
            ("history_days", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"data.dataset.{name}={value}; it must be an integer of at least {least}"
                )
        if not isinstance(self.density, int | float) or not 0.01 <= self.density <= 0.9:
            raise ValueError(f"data.dataset.density={self.density}; it must be in 0.01 .. 0.9")

    def prepare(self) -> list[str]:
        """The parquet files, in order of time."""
        return prepared(self.cache, "synthetic", parameters_of(self, VERSION), self._write)

    def _write(self, directory: Path) -> None:
        rng = np.random.default_rng(self.seed)
        world, all_terms = make_terms(self, rng)
        click_logit, conversion_logit = all_terms.click(), all_terms.conversion()
        click = sigmoid(click_logit + bias_for(click_logit, CLICK_RATE))
        conversion = sigmoid(
            conversion_logit + bias_for(conversion_logit, CONVERSION_RATE, weight=click)
        )
        clicked = rng.random(self.num_rows) < click
        converted = rng.random(self.num_rows) < conversion
        writer = None
        for rows, browse, orders in _histories(self, world):
            table = pa.table(
                {
                    **_row_columns(world, rows),
                    **_event_columns(world, "browse", world.browse, browse),
                    **_event_columns(world, "orders", world.orders, orders),
                    "click": pa.array(clicked[rows].astype(np.int32)),
                    "conversion": pa.array(converted[rows].astype(np.int32), mask=~clicked[rows]),
                    "click_probability": pa.array(click[rows].astype(np.float32)),
                    "conversion_probability": pa.array(conversion[rows].astype(np.float32)),
                }
            )
            if rows.start % _FILE_ROWS == 0:
                if writer is not None:
                    writer.close()
                name = f"part-{rows.start // _FILE_ROWS:04d}.parquet"
                writer = pq.ParquetWriter(
                    directory / name, table.schema, compression="zstd", compression_level=1
                )
            writer.write_table(table)
        writer.close()


def make_terms(dataset: Synthetic, rng: np.random.Generator | None = None) -> tuple[World, Terms]:
    """A data set's world, and what makes the users of its rows click."""
    world = make_world(
        np.random.default_rng(dataset.seed) if rng is None else rng,
        num_rows=dataset.num_rows,
        num_users=dataset.num_users,
        num_items=dataset.num_items,
        mean_length=dataset.density * dataset.max_length,
        max_length=dataset.max_length,
        days=dataset.days,
        history_days=dataset.history_days,
    )
    parts = [terms(world, rows, *seen) for rows, *seen in _histories(dataset, world)]
    return world, Terms(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(Terms)
        }
    )


def _histories(dataset: Synthetic, world: World) -> Iterator[tuple[slice, History, History]]:
    """Row group by row group: which rows, and their events in both sequences."""
    shown = world.impressions
    for start in range(0, dataset.num_rows, _GROUP_ROWS):
        rows = slice(start, min(start + _GROUP_ROWS, dataset.num_rows))
        user, time = shown.user[rows], shown.time[rows]
        yield (
            rows,
            histories(
                *world.browse.before(user, time), world.browse.time, time, dataset.max_length
            ),
            histories(*world.orders.before(user, time), world.orders.time, time, _ORDERS),
        )


def _row_columns(world: World, rows: slice) -> dict[str, pa.Array]:
    items, users, shown = world.items, world.users, world.impressions
    item, user, time = shown.item[rows], shown.user[rows], shown.time[rows]
    num_tags = items.num_tags[item]
    tags = items.tags[item][np.arange(items.tags.shape[1]) < num_tags[:, None]]
    integers = {
        "user": user,
        "age_bucket": users.age_bucket[user],
        "spend_level": users.spend_level[user],
        "hour": (time % DAY) // 3600,
        "device": shown.device[rows],
        "placement": shown.placement[rows],
        "item": item,
        "category": items.category[item],
        "brand": items.brand[item],
    }
    age = (time - START) / DAY - items.first_seen[item]
    return {
        "time": pa.array(time.astype(np.int64)),
        **{name: pa.array(values.astype(np.int32)) for name, values in integers.items()},
        "tags": _lists(num_tags, tags),
        "price": pa.array(items.price[item].astype(np.float32)),
        "item_age_days": pa.array(age.astype(np.float32)),
    }


def _event_columns(
    world: World, name: str, events: Events, history: History
) -> dict[str, pa.Array]:
    item = events.item[history.index]
    columns = {
        "time": events.time[history.index],
        "item": item,
        "category": world.items.category[item],
        "brand": world.items.brand[item],
    }
    if name == "browse":
        columns["event"] = events.kind[history.index]
    found = {
        f"{name}_{field}": _lists(history.lengths, values) for field, values in columns.items()
    }
    if name == "orders":
        price = world.items.price[item].astype(np.float32)
        found["orders_price"] = _lists(history.lengths, price)
    return found


def _lists(lengths: np.ndarray, values: np.ndarray) -> pa.ListArray:
    """A list column; integers become int32, which holds seconds until 2038."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if values.dtype != np.float32:
        values = values.astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

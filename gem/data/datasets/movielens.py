"""MovieLens-100K (Harper and Konstan, 2015): will this user rate this film 4 or more?

The files are those that the wheel of recbole carries; nothing is downloaded. A row is a rating;
what it knows of its user and film comes from ratings with a strictly earlier second, because many
ratings of a user share one and their order within it is not known.
"""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from gem.data.datasets.cache import parameters_of, prepared

VERSION = 1

GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
).split()

_FILES = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
_FIRST_YEAR = 1921
_AGE_EDGES = np.array([18, 25, 35, 45, 50, 56])
_GROUP_ROWS = 4096
_LIKED = 4.0


@dataclass
class MovieLens:
    """100,000 ratings of 1682 films by 943 users in 1997 and 1998.

    Args:
        cache: root of the cache; the parquet files are written there once.
        source: a folder with `ml-100k.inter`, `.item` and `.user`; None takes those of recbole.
        smoothing: ratings of average value that are added to every mean of a user or a film.
    """

    cache: str
    source: str | None = None
    smoothing: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.smoothing, int | float) or not 0 < self.smoothing < float("inf"):
            raise ValueError(f"data.dataset.smoothing={self.smoothing}; it must be a number > 0")

    def prepare(self) -> list[str]:
        """The parquet file, in order of time. Raises FileNotFoundError without the source."""
        folder = self._folder()
        parameters = parameters_of(self, VERSION)
        parameters["source"] = [
            hashlib.blake2b((folder / name).read_bytes(), digest_size=8).hexdigest()
            for name in _FILES
        ]
        return prepared(self.cache, "movielens", parameters, lambda path: self._write(folder, path))

    def _folder(self) -> Path:
        if self.source is not None:
            folder = Path(self.source).expanduser()
            hint = f"data.dataset.source={self.source} is not such a folder"
        else:
            # Only looked up: importing recbole would import all that it depends on.
            spec = find_spec("recbole")
            places = spec.submodule_search_locations if spec is not None else None
            folder = Path(places[0] if places else "") / "dataset_example" / "ml-100k"
            hint = (
                "they come with recbole: pip install --no-deps recbole==1.2.1, or "
                'make train ARGS="data=movielens", which installs it'
            )
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"MovieLens-100K needs {', '.join(missing)}; {hint}")
        return folder

    def _write(self, folder: Path, directory: Path) -> None:
        table = build_table(*(_read(folder / name) for name in _FILES), self.smoothing)
        pq.write_table(
            table,
            directory / "ratings.parquet",
            compression="zstd",
            row_group_size=_GROUP_ROWS,
        )


def build_table(
    ratings: dict[str, np.ndarray],
    films: dict[str, np.ndarray],
    users: dict[str, np.ndarray],
    smoothing: float,
) -> pa.Table:
    """One row per rating, sorted by time.

    Args:
        ratings: `user_id`, `item_id`, `rating`, `timestamp`.
        films: `item_id`, `release_year`, `class` (genres, separated by spaces).
        users: `user_id`, `age`, `gender`, `occupation`.
        smoothing: ratings of the running global mean that are added to every other mean.
    """
    user = ratings["user_id"].astype(np.int64)
    item = ratings["item_id"].astype(np.int64)
    time = ratings["timestamp"].astype(np.float64).astype(np.int64)
    order = np.lexsort((item, user, time))
    user, item, time = user[order], item[order], time[order]
    rating = ratings["rating"].astype(np.float64)[order]

    everyone = np.zeros(len(user), dtype=np.int64)
    count, total = earlier(everyone, time, rating)
    prior = np.where(count > 0, total / np.maximum(count, 1), 3.5)
    user_count, user_total = earlier(user, time, rating)
    item_count, item_total = earlier(item, time, rating)
    user_mean = (user_total + smoothing * prior) / (user_count + smoothing)
    item_mean = (item_total + smoothing * prior) / (item_count + smoothing)

    film, user_row = _lookup(films["item_id"], item), _lookup(users["user_id"], user)
    genres = [_genres(text) for text in films["class"]]
    combination = {names: i for i, names in enumerate(sorted(set(genres)))}
    film_combination = np.array([combination[names] for names in genres])
    film_genre = np.array([names[0] for names in genres])
    listed = [genres[row] for row in film]
    age = np.digitize(users["age"].astype(np.int64), _AGE_EDGES)

    by_user = np.lexsort((item, time, user))
    start, stop = _history(user, time, by_user)
    lengths = stop - start
    event = by_user[
        np.arange(lengths.sum()) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)
    ]
    return pa.table(
        {
            "user": pa.array(user.astype(np.int32)),
            "time": pa.array(time),
            "label": pa.array((rating >= _LIKED).astype(np.int32)),
            "item": pa.array(item.astype(np.int32)),
            "genres": pa.array(listed, pa.list_(pa.int32())),
            "genre_set": pa.array(film_combination[film].astype(np.int32)),
            "year": pa.array(_years(films["release_year"])[film]),
            "gender": pa.array(users["gender"][user_row]),
            "age": pa.array(age[user_row].astype(np.int32)),
            "occupation": pa.array(users["occupation"][user_row]),
            "user_mean": pa.array(user_mean.astype(np.float32)),
            "item_mean": pa.array(item_mean.astype(np.float32)),
            "user_count": pa.array(user_count.astype(np.float32)),
            "item_count": pa.array(item_count.astype(np.float32)),
            "history_time": _lists(lengths, time[event]),
            "history_item": _lists(lengths, item[event].astype(np.int32)),
            "history_rating": _lists(lengths, rating[event].astype(np.int32)),
            "history_genre": _lists(lengths, film_genre[film[event]].astype(np.int32)),
            "history_genre_set": _lists(lengths, film_combination[film[event]].astype(np.int32)),
            "history_surprise": _lists(lengths, (rating - item_mean)[event].astype(np.float32)),
        }
    )


def earlier(key: np.ndarray, time: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count and sum of `value` over the rows of the same key with a strictly earlier time."""
    order = np.lexsort((time, key))
    key, time = key[order], time[order]
    rows = np.arange(len(key))
    new_key = np.concatenate([[True], key[1:] != key[:-1]])[: len(key)]
    new_time = new_key | np.concatenate([[True], time[1:] != time[:-1]])[: len(key)]
    first = np.maximum.accumulate(np.where(new_key, rows, 0))
    tied = np.maximum.accumulate(np.where(new_time, rows, 0))
    before = np.concatenate([[0.0], np.cumsum(value[order])])
    count, total = np.empty(len(key), dtype=np.int64), np.empty(len(key))
    count[order] = tied - first
    total[order] = before[tied] - before[first]
    return count, total


def _history(
    user: np.ndarray, time: np.ndarray, by_user: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each row the range of `by_user` that holds its user's strictly earlier rows."""
    key = user[by_user] * (np.int64(1) << 40) + time[by_user]
    start = np.searchsorted(key, user * (np.int64(1) << 40), side="left")
    return start, np.searchsorted(key, user * (np.int64(1) << 40) + time, side="left")


def _read(file: Path) -> dict[str, np.ndarray]:
    """Columns of a recbole file, whose header names each as `name:type`."""
    table = csv.read_csv(
        file,
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(strings_can_be_null=False),
    )
    return {
        name.split(":")[0]: table.column(name).to_numpy(zero_copy_only=False)
        for name in table.column_names
    }


def _lookup(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    ids = ids.astype(np.int64)
    order = np.argsort(ids)
    return order[np.searchsorted(ids[order], wanted)]


def _genres(text: str) -> tuple[int, ...]:
    return tuple(sorted(GENRES.index(name) for name in str(text).split()))


def _years(years: np.ndarray) -> np.ndarray:
    """Years since `_FIRST_YEAR`; 0 where the year is not known."""
    known = [int(text) if text.isdigit() else 0 for text in map(str, years)]
    return np.maximum(np.array(known) - _FIRST_YEAR, 0).astype(np.int32)


def _lists(lengths: np.ndarray, values: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

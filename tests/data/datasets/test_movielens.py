from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from gem.config import SplitConfig
from gem.data import Loader, Schema
from gem.data.datasets import MovieLens
from gem.data.datasets.movielens import GENRES, build_table, earlier

CONF = Path(__file__).parents[3] / "conf" / "data" / "movielens.yaml"
real = pytest.mark.skipif(find_spec("recbole") is None, reason="recbole is not installed")


def some_ratings(rows=600, seed=0):
    """Few users, films and seconds, so that many rows share each."""
    rng = np.random.default_rng(seed)
    ratings = {
        "user_id": rng.integers(1, 12, rows),
        "item_id": rng.integers(1, 40, rows),
        "rating": rng.integers(1, 6, rows).astype(np.float64),
        "timestamp": rng.integers(0, 50, rows).astype(np.float64) + 880_000_000,
    }
    # A user rates a film once.
    _, once = np.unique(ratings["user_id"] * 1000 + ratings["item_id"], return_index=True)
    films = {
        "item_id": np.arange(1, 40)[::-1],
        "release_year": np.array([str(1920 + i) for i in range(38)] + ["unkonwn"], dtype=object),
        "class": np.array(
            [" ".join(GENRES[i % 7 : i % 7 + 1 + i % 3]) for i in range(39)], dtype=object
        ),
    }
    users = {
        "user_id": np.arange(1, 12),
        "age": np.arange(1, 12) * 6,
        "gender": np.array(["M", "F"] * 5 + ["M"], dtype=object),
        "occupation": np.array(["artist", "none"] * 5 + ["other"], dtype=object),
    }
    return {name: values[once] for name, values in ratings.items()}, films, users


def as_rows(ratings, films, users, smoothing=5.0):
    rows = build_table(ratings, films, users, smoothing).to_pylist()
    return {(row["user"], row["item"]): row for row in rows}


def test_against_plain_loops():
    ratings, films, users = some_ratings()
    rows = as_rows(ratings, films, users)
    everything = list(
        zip(
            *(ratings[k].tolist() for k in ("user_id", "item_id", "rating", "timestamp")),
            strict=True,
        )
    )
    assert len(rows) == len(everything)
    genres = {
        int(i): text.split() for i, text in zip(films["item_id"], films["class"], strict=True)
    }

    def mean(values, prior, smoothing=5.0):
        return (sum(values) + smoothing * prior) / (len(values) + smoothing)

    def statistics(item, user, time):
        before = [other for other in everything if other[3] < time]
        prior = np.mean([r for *_, r, _ in before]) if before else 3.5
        return (
            mean([r for u, _, r, _ in before if u == user], prior),
            mean([r for _, i, r, _ in before if i == item], prior),
        )

    for user, item, rating, time in everything:
        row = rows[user, item]
        assert row["time"] == time and row["label"] == int(rating >= 4)
        assert sorted(GENRES[g] for g in row["genres"]) == sorted(genres[item])
        mine = [other for other in everything if other[0] == user and other[3] < time]
        assert row["user_count"] == len(mine)
        assert row["item_count"] == sum(i == item and t < time for _, i, _, t in everything)
        user_mean, item_mean = statistics(item, user, time)
        assert row["user_mean"] == pytest.approx(user_mean, rel=1e-5)
        assert row["item_mean"] == pytest.approx(item_mean, rel=1e-5)
        names = ("history_time", "history_item", "history_rating")
        history = list(zip(*(row[name] for name in names), strict=True))
        assert history == sorted((t, i, r) for _, i, r, t in mine)
        assert [GENRES[g] for g in row["history_genre"]] == [
            min(genres[i], key=GENRES.index) for i in row["history_item"]
        ]
        for t, i, r, surprise in zip(
            row["history_time"],
            row["history_item"],
            row["history_rating"],
            row["history_surprise"],
            strict=True,
        ):
            assert surprise == pytest.approx(r - statistics(i, user, t)[1], abs=1e-4)


def test_years_and_genre_sets():
    rows = as_rows(*some_ratings())
    ratings, films, _ = some_ratings()
    year = dict(zip(films["item_id"].tolist(), films["release_year"], strict=True))
    genres = dict(zip(films["item_id"].tolist(), films["class"], strict=True))
    sets = {}
    for (_, item), row in rows.items():
        known = year[item].isdigit() and int(year[item]) > 1921
        assert row["year"] == (int(year[item]) - 1921 if known else 0)
        assert sets.setdefault(genres[item], row["genre_set"]) == row["genre_set"]
    assert len(set(sets.values())) == len(sets)


@pytest.mark.parametrize("which", ["later", "same second"])
def test_nothing_leaks_from_later_or_simultaneous_ratings(which):
    """Ratings from the row's second on may change at will; the row knows nothing of it."""
    ratings, films, users = some_ratings()
    before = as_rows(ratings, films, users)
    rng = np.random.default_rng(1)
    times = np.unique(ratings["timestamp"])
    for cut in times[[5, 20, 35, 45]]:
        changed = {name: values.copy() for name, values in ratings.items()}
        touched = changed["timestamp"] > cut if which == "later" else changed["timestamp"] == cut
        changed["rating"][touched] = rng.integers(1, 6, touched.sum())
        after = as_rows(changed, films, users)
        gone = {name: values[~touched] for name, values in ratings.items()}
        without = as_rows(gone, films, users)
        checked = 0
        for key, row in before.items():
            if row["time"] > cut:
                continue
            checked += 1
            # Its own label is the only thing that may differ.
            assert {**after[key], "label": 0} == {**row, "label": 0}
            if key in without:
                assert without[key]["history_item"] == row["history_item"]
                assert without[key]["user_mean"] == row["user_mean"]
                assert without[key]["item_mean"] == row["item_mean"]
        assert checked > 30


def test_order_of_the_source_does_not_matter():
    ratings, films, users = some_ratings()
    expected = build_table(ratings, films, users, 5.0)
    order = np.random.default_rng(2).permutation(len(ratings["rating"]))
    shuffled = {name: values[order] for name, values in ratings.items()}
    assert build_table(shuffled, films, users, 5.0).equals(expected)


def write_source(folder, ratings, films, users):
    """The three files as recbole ships them."""
    types = {"rating": "float", "timestamp": "float", "class": "token_seq"}
    for name, table in (("inter", ratings), ("item", films), ("user", users)):
        lines = ["\t".join(f"{key}:{types.get(key, 'token')}" for key in table)]
        for row in zip(*table.values(), strict=True):
            lines.append("\t".join(str(value) for value in row))
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n")


def test_a_source_folder(tmp_path):
    source, cache = tmp_path / "source", str(tmp_path / "cache")
    source.mkdir()
    tables = some_ratings()
    # A title with a quote must not swallow the lines after it.
    tables[1]["movie_title"] = np.array(['A "Film'] + ["b"] * 38, dtype=object)
    write_source(source, *tables)
    dataset = MovieLens(cache=cache, source=str(source))
    [file] = dataset.prepare()
    assert pq.read_table(file).equals(build_table(*tables, 5.0))
    assert MovieLens(cache=cache, source=str(source)).prepare() == [file]
    assert MovieLens(cache=cache, source=str(source), smoothing=1.0).prepare() != [file]
    tables[0]["rating"][0] = 6 - tables[0]["rating"][0]
    write_source(source, *tables)
    assert dataset.prepare() != [file], "the cache is keyed by what the source holds"


def test_earlier_of_nothing():
    empty = np.zeros(0, dtype=np.int64)
    count, total = earlier(empty, empty, np.zeros(0))
    assert len(count) == 0 and len(total) == 0


@real
def test_the_real_ratings(tmp_path):
    dataset = MovieLens(cache=str(tmp_path))
    [file] = dataset.prepare()
    table = pq.read_table(file)
    assert table.num_rows == 100_000
    assert table["label"].to_numpy().mean() == pytest.approx(0.55375)
    assert len(np.unique(table["user"])) == 943 and len(np.unique(table["item"])) == 1682
    time = table["time"].to_numpy()
    assert (np.diff(time) >= 0).all()
    history = table["history_time"].combine_chunks()
    count = np.diff(history.offsets)
    age = np.repeat(time, count) - history.flatten().to_numpy()
    assert age.min() > 0 and 90 < count.mean() < 110 and count.max() == 736
    assert MovieLens(cache=str(tmp_path)).prepare() == [file]

    config = OmegaConf.load(CONF)
    schema = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Schema), config.schema))
    split = SplitConfig(**config.split)
    loaders = {
        name: Loader([file], schema, name, split_config=split, batch_size=5000)
        for name in ("train", "valid", "test")
    }
    rows = {name: loader.rows for name, loader in loaders.items()}
    assert rows["test"] >= 10_000 and rows["valid"] >= 9_900 and sum(rows.values()) == 100_000
    batch = next(iter(loaders["test"]))
    assert batch.sequences["history"].ids.keys() == ["item", "rating", "genre", "genre_set"]
    # Hashed words of few values do not meet by accident.
    words = {name: set() for name in ("gender", "occupation")}
    for batch in loaders["train"]:
        for name in words:
            words[name] |= set(batch.sparse[name].values().tolist())
    assert {name: len(found) for name, found in words.items()} == {"gender": 2, "occupation": 21}


def test_a_source_that_is_missing(tmp_path, monkeypatch):
    dataset = MovieLens(cache=str(tmp_path / "cache"), source=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="needs ml-100k.inter, .*data.dataset.source="):
        dataset.prepare()
    monkeypatch.setattr("gem.data.datasets.movielens.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError) as error:
        MovieLens(cache=str(tmp_path / "cache")).prepare()
    assert "pip install --no-deps recbole==1.2.1" in str(error.value)
    assert 'make train ARGS="data=movielens"' in str(error.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("smoothing", [0, -1, "much", float("inf")])
def test_smoothing_is_checked(smoothing):
    with pytest.raises(ValueError, match="data.dataset.smoothing=.*; it must be a number > 0"):
        MovieLens(cache="unused", smoothing=smoothing)

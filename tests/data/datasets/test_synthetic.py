from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from sklearn.linear_model import LogisticRegression

from gem.config import SplitConfig
from gem.data import Loader, Schema
from gem.data.datasets import Synthetic
from gem.data.datasets.synthetic import make_terms
from gem.data.datasets.truth import CLICK_RATE, CONVERSION_RATE, bias_for, sigmoid

CONF = Path(__file__).parents[3] / "conf" / "data"
SMALL = {"num_rows": 6000, "num_users": 400, "num_items": 500, "max_length": 256}


def table_of(cache, **changes):
    files = Synthetic(cache=str(cache), **{**SMALL, **changes}).prepare()
    return pq.ParquetDataset(files).read()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return table_of(tmp_path_factory.mktemp("cache"))


def lengths(table, column):
    return np.concatenate([np.diff(chunk.offsets) for chunk in table[column].chunks])


def schema_of(name) -> Schema:
    config = OmegaConf.load(CONF / f"{name}.yaml")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Schema), config.schema))


@pytest.mark.parametrize("name", ["synthetic", "parquet"])
def test_its_config_reads_it(tmp_path, name):
    files = Synthetic(cache=str(tmp_path), **SMALL).prepare()
    loader = Loader(
        files, schema_of(name), "all", split_config=SplitConfig(0.1, 0.1), batch_size=500
    )
    batches = list(loader)
    assert sum(batch.batch_size for batch in batches) == SMALL["num_rows"]
    assert batches[0].sequences["browse"].ids.keys() == ["item", "category", "brand", "event"]
    assert batches[0].sequences["orders"].dense.shape[1] == 1
    has_truth = batches[0].probabilities is not None
    assert has_truth == (name == "synthetic")


def test_rows_are_sorted_by_time_in_small_row_groups(tmp_path):
    files = Synthetic(cache=str(tmp_path), **{**SMALL, "num_rows": 21_000}).prepare()
    assert len(files) == 2
    times = np.concatenate([pq.read_table(file)["time"].to_numpy() for file in files])
    assert len(times) == 21_000 and (np.diff(times) >= 0).all()
    metadata = pq.ParquetFile(files[0]).metadata
    assert {metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)} == {2048}
    assert metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5])
def test_density_is_mean_over_maximum(tmp_path, density):
    found = lengths(table_of(tmp_path, density=density, num_users=1500), "browse_time")
    assert found.max() == SMALL["max_length"]
    assert found.mean() / SMALL["max_length"] == pytest.approx(density, rel=0.1)
    assert found.min() == 0


@pytest.mark.parametrize("max_length", [16, 1024])
def test_max_length_bounds_the_browse_history(tmp_path, max_length):
    found = lengths(table_of(tmp_path, max_length=max_length, num_users=1500), "browse_item")
    assert found.max() <= max_length
    assert found.mean() == pytest.approx(0.1 * max_length, rel=0.12)


def test_lengths_are_log_normal_and_orders_are_often_empty(small):
    browse, orders = lengths(small, "browse_time"), lengths(small, "orders_time")
    logs = np.log(browse[(browse > 0) & (browse < SMALL["max_length"])])
    assert 0.7 < logs.std() < 1.3
    assert abs(np.mean((logs - logs.mean()) ** 3)) < 0.6 * logs.std() ** 3
    assert 0.1 < (orders == 0).mean() < 0.3 and orders.max() <= 256
    assert 10 < orders.mean() < 35


def test_history_lies_before_the_impression_in_order(small):
    for name in ("browse", "orders"):
        times = small[f"{name}_time"].combine_chunks()
        count = np.diff(times.offsets)
        age = np.repeat(small["time"].to_numpy(), count) - times.flatten().to_numpy()
        assert age.min() > 0
        row = np.repeat(np.arange(len(count)), count)
        assert (np.diff(age)[np.diff(row) == 0] <= 0).all()
        # From minutes to months.
        assert np.quantile(age, 0.02) < 3 * 86_400 and np.quantile(age, 0.9) > 60 * 86_400
        assert age.min() < 600


def test_items_mean_the_same_as_candidate_and_in_history(small):
    pairs = {}
    for name in ("", "browse_", "orders_"):
        columns = [small[f"{name}{part}"] for part in ("item", "category", "brand")]
        flat = [c.combine_chunks() for c in columns]
        flat = [c.flatten() if name else c for c in flat]
        for item, category, brand in zip(*(c.to_pylist() for c in flat), strict=True):
            assert pairs.setdefault(item, (category, brand)) == (category, brand)
    assert {category for category, _ in pairs.values()} == set(range(24))


def test_labels_follow_the_probabilities(small):
    click, conversion = small["click"].to_numpy(), small["conversion"]
    p = small["click_probability"].to_numpy()
    q = small["conversion_probability"].to_numpy()
    clicked = click == 1
    assert p.mean() == pytest.approx(CLICK_RATE, rel=0.02)
    assert np.average(q, weights=p) == pytest.approx(CONVERSION_RATE, rel=0.02)
    assert (conversion.is_null().to_numpy() == ~clicked).all()
    converted = conversion.drop_null().to_numpy()
    for label, probability in ((click, p), (converted, q[clicked])):
        noise = np.sqrt((probability * (1 - probability)).sum())
        assert abs(label.sum() - probability.sum()) < 4 * noise
    # Calibrated also where the probability is high.
    high = p > 0.3
    noise = np.sqrt((p[high] * (1 - p[high])).sum())
    assert high.sum() > 50 and abs(click[high].sum() - p[high].sum()) < 4 * noise


def entropy(p, q):
    return -(p * np.log(q) + (1 - p) * np.log1p(-q)).mean()


def test_the_truth_is_in_which_events_and_when(tmp_path):
    """Most of what can be known of a click is in the history, and not in how many events it has."""
    world, terms = make_terms(Synthetic(cache=str(tmp_path), num_rows=30_000, num_users=800))
    logit = terms.click()
    p = sigmoid(logit + bias_for(logit, CLICK_RATE))
    clicked = np.random.default_rng(0).random(len(p)) < p
    half = np.arange(len(p)) % 2 == 0

    def gain(*columns):
        """1 - NE of a logistic regression on these, over 1 - NE of the truth."""
        x = np.stack(columns, axis=1)
        model = LogisticRegression(max_iter=500).fit(x[half], clicked[half])
        base = entropy(p[~half], np.full((~half).sum(), p[~half].mean()))
        found = entropy(p[~half], model.predict_proba(x[~half])[:, 1])
        return (base - found) / (base - entropy(p[~half], p[~half]))

    events = [np.exp(-terms.interest), np.exp(-terms.loyalty), np.minimum(terms.satiation, 2)]
    counts = [np.log1p(count) for count in matching_counts(world)]
    assert gain(terms.static, *events) > 0.93
    assert gain(terms.static) < 0.3
    assert gain(*events) > 0.7
    assert gain(terms.static, *counts) < 0.6
    base = entropy(p, np.full(len(p), p.mean()))
    assert 0.5 < entropy(p, p) / base < 0.7


def matching_counts(world):
    """Events of the candidate's category and brand before each row, without regard to when."""
    items, shown = world.items, world.impressions
    browse = world.browse
    start, stop = browse.before(shown.user, shown.time)
    row = np.repeat(np.arange(len(start)), stop - start)
    index = np.arange(len(row)) + np.repeat(
        start - np.cumsum(stop - start) + stop - start, stop - start
    )
    for attribute in (items.category, items.brand):
        same = attribute[browse.item[index]] == attribute[shown.item[row]]
        yield np.bincount(row[same], minlength=len(start))


def test_made_again_bit_for_bit(tmp_path, small):
    again = table_of(tmp_path)
    assert again.equals(small)
    assert not table_of(tmp_path, seed=1).equals(small)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", 0, "data.dataset.num_rows=0; it must be an integer of at least 1"),
        ("num_users", 2.5, "data.dataset.num_users=2.5; it must be an integer of at least 1"),
        ("num_items", 10, "data.dataset.num_items=10; it must be an integer of at least 100"),
        ("max_length", True, "data.dataset.max_length=True; it must be an integer"),
        ("density", 1.5, "data.dataset.density=1.5; it must be in 0.01 .. 0.9"),
        ("density", "dense", "data.dataset.density=dense; it must be in 0.01 .. 0.9"),
        ("seed", -1, "data.dataset.seed=-1; it must be an integer of at least 0"),
    ],
)
def test_arguments_are_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(cache="unused", **{field: value})


@pytest.mark.parametrize("changes", [{"num_rows": 1}, {"num_users": 1, "num_rows": 50}])
def test_tiny_worlds(tmp_path, changes):
    assert table_of(tmp_path, **changes).num_rows == changes["num_rows"]

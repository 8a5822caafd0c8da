"""Rows of the benchmark: lengths, FLOPs and bytes."""

import numpy as np
import pytest

from bench.shapes import Row, choose, load, visible_pairs
from gem.attention.reference import visible

ROWS = load()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_lengths_follow_the_distribution_of_the_row(row):
    lengths = row.lengths()
    assert lengths.shape == (row.batch,) and np.array_equal(lengths, row.lengths())
    if row.equal:
        assert (lengths == row.max_keys).all()
        return
    if row.density >= 0.5:
        low, high = round((2 * row.density - 1) * row.max_keys), row.max_keys
    else:
        low, high = 1, round(2 * row.density * row.max_keys)
    assert low <= lengths.min() and lengths.max() <= high
    mean, spread = (low + high) / 2, (high - low) / np.sqrt(12 * row.batch)
    assert abs(lengths.mean() - mean) < 4 * spread
    assert abs(mean - row.density * row.max_keys) <= 1
    # Uniform: as many in each quarter of the range, within chance.
    share = np.histogram(lengths, bins=4, range=(low, high))[0] / row.batch
    assert np.abs(share - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / row.batch) + 4 / (high - low)


def test_the_sets_are_those_that_results_are_judged_on():
    count = {name: sum(row.set == name for row in ROWS) for name in {row.set for row in ROWS}}
    assert count == {"broadcast": 22, "self": 6, "window": 2, "gqa": 2, "dense": 3}


@pytest.mark.parametrize("left", [None, 0, 3, 50])
@pytest.mark.parametrize("right", [None, 0, 2, 50])
def test_visible_pairs_agree_with_the_mask(left, right):
    queries, keys = [0, 3, 9, 20, 7, 30], [5, 3, 0, 11, 24, 30]
    counted = visible_pairs(np.array(queries), np.array(keys), left, right)
    masks = (visible(q, k, left, right, "cpu") for q, k in zip(queries, keys, strict=True))
    assert counted == sum(int(mask.sum()) for mask in masks)


def test_flops_and_bytes_of_a_row_by_hand():
    row = Row("x", "x", 2, 4, 8, 3, 2, queries=5, equal=True)
    pairs = 2 * 5 * 3
    assert row.pairs() == pairs
    assert row.flops("forward") == 4 * 4 * 8 * pairs
    assert row.flops("backward") == 10 * 4 * 8 * pairs
    q, k, out, lse = 5 * 4 * 8 * 2, 6 * 2 * 8 * 2, 10 * 4 * 8 * 2, 10 * 4 * 4
    assert row.bytes("forward") == q + 2 * k + out + lse
    assert row.bytes("backward") == (q + 2 * k + 2 * out + lse) + (q + 2 * k)
    causal = Row("x", "x", 2, 1, 8, 3, 1, equal=True, causal=True)
    assert causal.pairs() == 2 * 6


def test_rows_are_chosen_by_set_and_pattern():
    names = [row.name for row in choose(ROWS, ["self"], ["*k2048*"])]
    assert names == ["self_k2048_s0.5", "self_k2048_s0.1"]
    with pytest.raises(ValueError, match="--rows 'nope' matches no row"):
        choose(ROWS, [], ["nope"])
    with pytest.raises(ValueError, match=r"--sets must be among .* but got \['nope'\]"):
        choose(ROWS, ["nope"], [])


def test_a_row_with_an_unknown_key_is_named(tmp_path):
    file = tmp_path / "shapes.yaml"
    file.write_text("self:\n  - {name: a, batch: 1, heads: 1, dim: 8, max_keys: 2, dense: 1}\n")
    with pytest.raises(ValueError, match=r"row a has unknown keys \['dense'\]"):
        load(file)

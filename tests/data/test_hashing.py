import numpy as np
import pyarrow as pa
import pytest

from gem.data.hashing import hash_ids, hash_strings, table_seed


def test_hash_is_fixed():
    """The rows of known ids, so that a checkpoint's tables keep their meaning."""
    ids = np.array([0, 1, 2, -1, 2**62])
    assert hash_ids(ids, 1000, table_seed("item")).tolist() == [176, 554, 671, 452, 678]
    words = hash_strings(pa.array(["", "a", "b\u00e4r", "a"]))
    assert words.tolist() == [
        -5426141060434712860,
        3405396810240292928,
        -47160803361180679,
        3405396810240292928,
    ]


def test_splitmix_of_a_published_sequence():
    """SplitMix64 seeded with 0 starts with these numbers (their upper 32 bits are seen here)."""
    step = 0x9E3779B97F4A7C15
    states = np.array([step, 2 * step, 3 * step], dtype=object) % 2**64
    ids = np.array([int(s) for s in states], dtype=np.uint64)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hash_ids(ids, 2**32, 0).tolist() == [number >> 32 for number in published]


@pytest.mark.parametrize("rows", [1, 3, 1000, 2**31, 2**32])
def test_rows_are_in_range_and_used_evenly(rows):
    found = hash_ids(np.arange(30_000), rows, table_seed("x"))
    assert found.min() >= 0 and found.max() < rows
    halves = np.bincount((found >= rows / 2).astype(int), minlength=2)
    if rows >= 1000:
        assert abs(halves[0] - 15_000) < 5 * np.sqrt(30_000) / 2


def test_width_does_not_matter_but_table_does():
    ids = np.arange(-5, 120, dtype=np.int8)
    wide = hash_ids(ids.astype(np.int64), 10**6, 7)
    assert np.array_equal(hash_ids(ids, 10**6, 7), wide)
    assert (hash_ids(ids, 10**6, 8) != wide).mean() > 0.99
    assert table_seed("item") != table_seed("category")


def test_input_is_left_alone():
    ids = np.arange(10)
    hash_ids(ids, 5, 3)
    assert ids.tolist() == list(range(10))


def test_strings_plain_or_dictionary_encoded_and_null():
    plain = pa.array(["x", None, "y", "x"])
    expected = hash_strings(plain)
    assert expected[1] == 0 and expected[0] == expected[3] != expected[2]
    assert np.array_equal(hash_strings(plain.dictionary_encode()), expected)
    assert np.array_equal(hash_strings(plain.cast(pa.large_string())), expected)
    assert np.array_equal(hash_strings(plain.slice(2)), expected[2:])
    assert len(hash_strings(pa.array([], pa.string()))) == 0


def test_rows_out_of_range():
    with pytest.raises(ValueError, match="rows=0"):
        hash_ids(np.arange(3), 0, 1)

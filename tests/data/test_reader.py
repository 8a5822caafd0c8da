import numpy as np
import pytest

from gem.config import SplitConfig
from gem.data import BadRowError
from gem.data.reader import ROWS, FileIndex, SegmentReader
from tests.data.helpers import small_schema, small_table, write


def index_of(path, times, split=None, limit=1000, group_rows=16, skip=False, files=1):
    table = small_table(len(times)) | {"time": times}
    names = []
    for part in np.array_split(np.arange(len(times)), files):
        piece = {name: [values[i] for i in part] for name, values in table.items()}
        names.append(write(path / f"{len(names)}.parquet", piece, group_rows=group_rows))
    return FileIndex(names, small_schema(), split or SplitConfig(0.1, 0.1), limit, skip)


def read(index, split):
    """(file, row, time) of what is read."""
    reader, found = SegmentReader(index), []
    for segment in index.segments:
        table = reader.read(segment, split)
        times = table["time"].values.tolist()
        found += [
            (*where, time) for where, time in zip(table[ROWS].values.tolist(), times, strict=True)
        ]
    return found


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("limit", [1000, 16, 5, 1])
def test_splits_are_cut_at_exact_quantiles(tmp_path, files, limit):
    times = np.random.default_rng(0).permutation(200).tolist()
    index = index_of(tmp_path, times, limit=limit, files=files)
    assert (index.valid_from, index.test_from) == (160, 180)
    rows = {split: read(index, split) for split in ("train", "valid", "test", "all")}
    assert sorted(time for *_, time in rows["train"]) == list(range(160))
    assert sorted(time for *_, time in rows["valid"]) == list(range(160, 180))
    assert sorted(time for *_, time in rows["test"]) == list(range(180, 200))
    assert [time for *_, time in rows["all"]] == times
    for split, found in rows.items():
        assert index.counts[split].sum() == len(found)
        sizes = np.array_split(np.arange(200), files)
        assert all(times[sizes[file][row]] == time for file, row, time in found)
    assert all(segment.stop - segment.start <= limit for segment in index.segments)


def test_rows_of_the_same_second_are_on_the_same_side(tmp_path):
    index = index_of(tmp_path, [1] * 70 + [2] * 15 + [3] * 15)
    # The quantile of the validation split falls into the second 2, that of the test split into 3.
    assert [len(read(index, split)) for split in ("train", "valid", "test")] == [70, 15, 15]
    assert (index.valid_from, index.test_from) == (2, 3)


def test_splits_at_given_times(tmp_path):
    index = index_of(tmp_path, list(range(100)), SplitConfig(valid_from=70, test_from=95))
    assert [len(read(index, split)) for split in ("train", "valid", "test")] == [70, 25, 5]
    index = index_of(tmp_path, list(range(100)), SplitConfig(valid_from=200, test_from=300))
    assert [len(read(index, split)) for split in ("train", "valid", "test")] == [100, 0, 0]


@pytest.mark.parametrize("fractions, sizes", [((0.0, 0.0), (50, 0, 0)), ((0.0, 0.2), (40, 0, 10))])
def test_empty_splits(tmp_path, fractions, sizes):
    index = index_of(tmp_path, list(range(50)), SplitConfig(*fractions))
    assert tuple(len(read(index, split)) for split in ("train", "valid", "test")) == sizes


def test_large_row_groups_are_read_in_bounded_pieces(tmp_path, monkeypatch):
    index = index_of(tmp_path, list(range(5000)), limit=700, group_rows=5000)
    sizes = [segment.stop - segment.start for segment in index.segments]
    assert len(sizes) == 8 and sum(sizes) == 5000 and max(sizes) <= 700
    reader = SegmentReader(index)
    opened = []
    original = reader._open
    monkeypatch.setattr(reader, "_open", lambda file: opened.append(file) or original(file))
    rows = [reader.read(segment, "all")[ROWS].values[:, 1] for segment in index.segments]
    assert np.concatenate(rows).tolist() == list(range(5000))
    assert len(opened) == 1, "segments that follow one another are read in one go"
    # From the middle, and backwards: starts over, and is right.
    assert reader.read(index.segments[5], "all")[ROWS].values[:, 1].tolist() == rows[5].tolist()
    assert reader.read(index.segments[2], "all")[ROWS].values[:, 1].tolist() == rows[2].tolist()
    assert reader.read(index.segments[3], "all")[ROWS].values[:, 1].tolist() == rows[3].tolist()


def test_large_row_groups_hold_the_same_values(tmp_path):
    table = small_table(64)
    file = write(tmp_path / "a.parquet", table, group_rows=64)
    whole = FileIndex([file], small_schema(), SplitConfig(0.1, 0.1), 64)
    parts = FileIndex([file], small_schema(), SplitConfig(0.1, 0.1), 9)
    [expected] = [SegmentReader(whole).read(segment, "train") for segment in whole.segments]
    found = SegmentReader(parts).read_all(parts.segments, "train")
    for name, column in expected.items():
        assert np.array_equal(column.values, found[name].values), name
        assert np.array_equal(column.lengths(), found[name].lengths()), name
        assert np.array_equal(column.null_rows(), found[name].null_rows()), name


def test_rows_without_a_time(tmp_path):
    times = list(range(100))
    times[42] = None
    with pytest.raises(BadRowError, match=r"0.parquet, row 42: column 'time' is null"):
        index_of(tmp_path, times)
    index = index_of(tmp_path, times, skip=True)
    assert len(read(index, "train")) + len(read(index, "valid")) + len(read(index, "test")) == 100
    assert (0, 42, 0) in read(index, "train")


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(ValueError, match="there is no parquet file to read"):
        FileIndex([], small_schema(), SplitConfig(0.1, 0.1), 10)
    file = write(tmp_path / "empty.parquet", small_table(0))
    index = FileIndex([file], small_schema(), SplitConfig(0.1, 0.1), 10)
    assert index.segments == [] and index.counts["all"].sum() == 0

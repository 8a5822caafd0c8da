import pickle

import numpy as np
import pytest
import torch

from gem.config import DataConfig, OnBadRow, SplitConfig
from gem.data import BadIdError, BadRowError, make_loaders
from gem.data.datasets import ParquetFiles
from gem.data.reader import SegmentReader
from tests.data.helpers import open_loader, row_numbers, small_schema, small_table, write

ROWS = 200


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return [
        write(folder / f"{part}.parquet", small_table(ROWS // 4, first=part * ROWS // 4))
        for part in range(4)
    ]


def same(one, other):
    tensors = lambda b: (  # noqa: E731
        [b.dense, b.sparse.values(), b.sparse.lengths(), b.labels, b.weights, b.rows, b.users]
        + [b.times, b.probabilities[:, 0]]
        + [t for s in b.sequences.values() for t in (s.ids.values(), s.ids.lengths(), s.age)]
        + [t for s in b.sequences.values() for t in (s.dense, s.layout.offsets, s.layout.lengths)]
    )
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def global_rows(batches):
    return [int(f) * ROWS // 4 + int(r) for batch in batches for f, r in batch.rows]


SHUFFLED = {"shuffle": True, "shuffle_buffer": 40, "drop_last": True, "seed": 3}


def test_in_order_and_complete(files):
    for split, rows in {
        "train": range(160),
        "valid": range(160, 180),
        "test": range(180, 200),
        "all": range(200),
    }.items():
        loader = open_loader(files, split)
        batches = list(loader)
        assert global_rows(batches) == list(rows)
        assert loader.rows == len(rows) and loader.steps == len(batches) == -(-len(rows) // 8)
        assert (loader.epoch, loader.step) == (1, 0)


def test_shuffled_epochs_differ_and_repeat(files):
    loader = open_loader(files, "train", **SHUFFLED)
    first, second = global_rows(loader), global_rows(loader)
    assert sorted(first) == sorted(second) == list(range(160))
    assert first != second and first != sorted(first)
    again = open_loader(files, "train", **SHUFFLED)
    assert global_rows(again) == first and global_rows(again) == second
    assert global_rows(open_loader(files, "train", **{**SHUFFLED, "seed": 4})) != first
    # A batch mixes row groups of 16 rows.
    assert len({row // 16 for row in first[:8]}) > 1


@pytest.mark.parametrize("split", ["train", "all"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_rows_of_one_order(files, split, drop_last, world_size):
    options = {**SHUFFLED, "drop_last": drop_last}
    whole = global_rows(open_loader(files, split, **{**options, "drop_last": False}))
    ranks = [
        open_loader(files, split, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in ranks]
    assert {len(found) for found in batches} == {ranks[0].steps}
    rows = [global_rows(found) for found in batches]
    if drop_last:
        assert all(batch.batch_size == 8 for found in batches for batch in found)
        assert all(set(found) < set(whole) for found in rows)
        flat = sum(rows, [])
        assert len(set(flat)) == len(flat)
    else:
        assert sum(rows, []) == whole


def test_a_rank_may_run_out_of_rows(files, tmp_path):
    file = write(tmp_path / "f.parquet", small_table(17))
    ranks = [open_loader(file, rank=rank, world_size=2) for rank in range(2)]
    batches = [list(loader) for loader in ranks]
    assert [[b.batch_size for b in found] for found in batches] == [[8, 0], [8, 1]]
    assert batches[0][1].to(torch.device("cpu")).sparse["item"].offsets().tolist() == [0]
    assert [row_numbers(found) for found in batches] == [list(range(8)), list(range(8, 17))]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(files, workers):
    """Ten batches; stop after six; the rest, and the next epoch, are bitwise the same."""
    options = {**SHUFFLED, "batch_size": 16, "workers": workers}
    whole = open_loader(files, "train", **options)
    expected = list(whole) + list(whole)
    assert whole.steps == 10
    loader = open_loader(files, "train", **options)
    batches = iter(loader)
    for i in range(6):
        assert same(next(batches), expected[i])
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    batches.close()
    assert (state["epoch"], state["step"]) == (0, 6)
    resumed = open_loader(files, "train", **{**options, "seed": 99})
    resumed.load_state_dict(state)
    rest = list(resumed) + list(resumed)
    assert len(rest) == 14
    assert all(same(one, other) for one, other in zip(rest, expected[6:], strict=True))
    # A loader that was left goes on where it stood, too.
    assert all(same(one, other) for one, other in zip(loader, expected[6:10], strict=True))


def test_resume_at_the_end_of_an_epoch(files):
    whole = open_loader(files, "train", **SHUFFLED)
    expected = [global_rows(whole), global_rows(whole)]
    loader = open_loader(files, "train", **SHUFFLED)
    batches = iter(loader)
    for _ in range(loader.steps):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, loader.steps)
    resumed = open_loader(files, "train", **SHUFFLED)
    resumed.load_state_dict(state)
    assert list(resumed) == [] and global_rows(resumed) == expected[1]


def test_resume_reads_nothing_that_lies_before(files, monkeypatch):
    read = []
    original = SegmentReader.read
    monkeypatch.setattr(
        SegmentReader, "read", lambda self, s, split: read.append(s) or original(self, s, split)
    )
    loader = open_loader(files, "train", **SHUFFLED)
    list(loader)
    everything = list(read)
    assert len(everything) == len(set(everything)) == 13
    read.clear()
    loader = open_loader(files, "train", **SHUFFLED)
    loader.load_state_dict({**loader.state_dict(), "step": 18})
    assert len(list(loader)) == 2
    assert read == everything[-len(read) :] and 0 < len(read) <= 3


def test_a_position_in_another_order_is_refused(files):
    loader = open_loader(files, "train", **SHUFFLED)
    next(iter(loader))
    state = loader.state_dict()
    other = open_loader(files, "train", **{**SHUFFLED, "batch_size": 4})
    with pytest.raises(ValueError, match="mid-epoch with batch_size=8; .* with batch_size=4"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "step": 0, "epoch": 5})
    assert other.epoch == 5


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(files, workers):
    expected = list(open_loader(files, "train", **SHUFFLED))
    found = list(open_loader(files, "train", workers=workers, **SHUFFLED))
    assert len(found) == len(expected) == 20
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_workers_leave_the_random_state_alone(files):
    """Drawing in the trainer must not depend on how often a loader was started."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(iter(open_loader(files, workers=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_report_errors_in_one_sentence_and_count_what_they_skip(tmp_path):
    table = small_table(64)
    table["color"][33] = 7
    table["click"][50] = 2
    file = write(tmp_path / "f.parquet", table)
    loader = open_loader(file, workers=2)
    batches = iter(loader)
    assert row_numbers([next(batches) for _ in range(4)]) == list(range(32))
    with pytest.raises(BadIdError) as error:
        next(batches)
    assert str(error.value) == (
        f"{file}, row 33: feature 'color' (column 'color') has id 7, outside its table of 3 rows"
    )
    assert loader.step == 4

    loader = open_loader(file, workers=2, on_bad_row="skip")
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    # Prefetched batches do not count.
    assert loader.skipped == {"id": 1} and loader.state_dict()["skipped"] == {"id": 1}
    assert len(list(batches)) == 3
    assert loader.skipped == {"id": 1, "label": 1}


def test_memory_holds_a_shuffle_buffer(tmp_path, monkeypatch):
    file = write(tmp_path / "f.parquet", small_table(3000), group_rows=1000)
    loader = open_loader(file, shuffle=True, shuffle_buffer=128)
    largest = 0
    original = SegmentReader.read

    def read(self, segment, split):
        nonlocal largest
        table = original(self, segment, split)
        largest = max(largest, table["user"].num_rows)
        return table

    monkeypatch.setattr(SegmentReader, "read", read)
    rows = row_numbers(loader)
    assert sorted(rows) == list(range(3000)) and 100 < largest <= 128
    # Rows stay within the piece of a row group that they were read with.
    assert max(rows[:125]) - min(rows[:125]) == 124 and rows[:125] != sorted(rows[:125])


def test_reset(files):
    loader = open_loader(files, "valid")
    first = next(iter(loader))
    loader.reset()
    assert same(next(iter(loader)), first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; it must be at least 1"),
        ({"workers": -1}, "workers=-1; it must be at least 0"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not in 0 .. world_size - 1 = 1"),
        ({"on_bad_row": "ignore"}, "on_bad_row='ignore'; it must be error or skip"),
        ({"split": "dev"}, "split='dev'; it must be one of train, valid, test, all"),
        ({"batch_size": 101, "world_size": 2, "drop_last": True}, "not one batch of 101 rows each"),
    ],
)
def test_arguments_are_checked(files, options, message):
    with pytest.raises(ValueError, match=message):
        open_loader(files, **options)


def test_files_that_disagree_with_the_schema(files, tmp_path):
    table = small_table(8)
    del table["browse_item"]
    other = write(tmp_path / "other.parquet", table)
    with pytest.raises(ValueError, match=r"other.parquet: column 'browse_item' \(field 'item' of"):
        open_loader([files[0], other])


def test_files_may_differ_in_width(files, tmp_path):
    import pyarrow as pa

    types = {"item": pa.list_(pa.int64()), "browse_item": pa.large_list(pa.int64())}
    table = small_table(8)
    lists = write(tmp_path / "x.parquet", table | {"item": [[i] for i in table["item"]]}, types)
    plain = write(tmp_path / "y.parquet", table)
    [one] = open_loader([lists], batch_size=8)
    [two] = open_loader([plain], batch_size=8)
    assert same(one, two)
    [both] = open_loader([lists, plain], batch_size=16, shuffle=True)
    assert sorted(both.sparse["item"].values().tolist()) == sorted(
        one.sparse["item"].values().tolist() * 2
    )


def data_config(folder, **changes):
    return DataConfig(
        name="x",
        dataset=ParquetFiles(str(folder)),
        schema=small_schema(),
        split=SplitConfig(0.1, 0.1),
        batch_size=16,
        eval_batch_size=8,
        workers=0,
        **changes,
    )


def test_make_loaders(files):
    folder = files[0].rsplit("/", 1)[0]
    loaders = make_loaders(
        data_config(folder), seed=1, rank=1, world_size=2, device=torch.device("cpu")
    )
    assert {name: loader.rows for name, loader in loaders.items()} == {
        "train": 160,
        "valid": 20,
        "test": 20,
    }
    assert [loader.steps for loader in loaders.values()] == [5, 2, 2]
    train = global_rows(loaders["train"])
    assert len(train) == 80 and train != sorted(train)
    assert global_rows(loaders["test"]) == list(range(190, 200))
    assert loaders["valid"].split == "valid" and not loaders["valid"].pin_memory


def test_make_loaders_takes_a_target_and_skips(tmp_path):
    table = small_table(40)
    table["click"][3] = 9
    write(tmp_path / "f.parquet", table)
    config = data_config(tmp_path, on_bad_row=OnBadRow.skip)
    config.dataset = {
        "_target_": "gem.data.datasets.ParquetFiles",
        "path": str(tmp_path / "*.parquet"),
    }
    loaders = make_loaders(config, seed=0, rank=0, world_size=1, device=torch.device("cpu"))
    assert sum(len(global_rows([batch])) for batch in loaders["train"]) == 31
    assert loaders["train"].skipped == {"label": 1}
    config.dataset["path"] = str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="data.dataset.path=.*nothing leads to no parquet"):
        make_loaders(config, seed=0, rank=0, world_size=1, device=torch.device("cpu"))
    config.dataset["path"] = 7
    with pytest.raises(ValueError, match="^data.dataset.path=7; it must be a folder"):
        make_loaders(config, seed=0, rank=0, world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_skipping_is_off_leaves_the_position(files, tmp_path, workers):
    table = small_table(24)
    table["user"][9] = None
    file = write(tmp_path / "f.parquet", table)
    loader = open_loader(file, workers=workers)
    with pytest.raises(BadRowError, match="row 9: column 'user' is null"):
        list(loader)
    assert (loader.epoch, loader.step) == (0, 1)


def test_order_ignores_the_global_random_state(files):
    np.random.seed(1)
    one = global_rows(open_loader(files, "train", **SHUFFLED))
    np.random.seed(2)
    assert global_rows(open_loader(files, "train", **SHUFFLED)) == one


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_go_to_the_gpu_without_copies_back(files, workers):
    device = torch.device("cuda")
    expected = list(open_loader(files, "train", **SHUFFLED))
    loader = open_loader(files, "train", workers=workers, pin_memory=True, **SHUFFLED)
    for batch, plain in zip(loader, expected, strict=True):
        assert batch.dense.is_pinned() and batch.sparse.values().is_pinned()
        assert batch.sequences["browse"].layout.offsets.is_pinned()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            moved = batch.to(device, non_blocking=True)
            keys = moved.sequences["browse"].ids.to_dict(), moved.sparse.to_dict()
            moved.record_stream(torch.cuda.current_stream())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert keys[0]["event"].values().is_cuda and moved.users.device.type == "cpu"
        assert torch.equal(moved.dense.cpu(), plain.dense)
        assert torch.equal(moved.sparse.values().cpu(), plain.sparse.values())

import math

import numpy as np
import pytest
import torch

from gem.data import BadIdError, BadRowError, Batch
from gem.data.hashing import hash_ids, table_seed
from gem.data.schema import IdFeature, IdKind, Schema, SequenceFeature, Task
from tests.data.helpers import open_loader, row_numbers, small_schema, small_table, write


def one_batch(path, table, **options) -> Batch:
    file = write(path / "rows.parquet", table)
    [batch] = open_loader(file, batch_size=1000, **options)
    return batch


def test_batch_of_sound_rows(tmp_path):
    table = small_table(12)
    batch = one_batch(tmp_path, table)
    rows = np.arange(12)
    assert batch.batch_size == 12
    assert torch.equal(batch.rows, torch.stack([torch.zeros(12).long(), torch.arange(12)], 1))
    assert batch.users.tolist() == table["user"] and batch.times.tolist() == table["time"]
    assert batch.dense.dtype == torch.float32 and batch.dense.shape == (12, 2)
    assert torch.allclose(batch.dense[:, 0], torch.log1p(torch.arange(12.0)))
    assert batch.dense[:, 1].tolist() == table["raw_score"]

    sparse = batch.sparse
    assert sparse.keys() == ["item", "color", "tags", "word"]
    items = hash_ids(rows + 100, 1000, table_seed("item"))
    assert sparse["item"].values().tolist() == items.tolist()
    assert sparse["color"].values().tolist() == table["color"]
    assert sparse["tags"].lengths().tolist() == [i % 5 for i in rows]
    assert sparse["tags"].values().tolist() == [tag for tags in table["tags"] for tag in tags]
    words = sparse["word"].values().tolist()
    assert words[0] == words[11] and len(set(words)) > 5 and max(words) < 50

    browse = batch.sequences["browse"]
    lengths = [i % 4 for i in rows]
    assert browse.layout.lengths.tolist() == lengths
    assert browse.layout.offsets.tolist() == [0, *np.cumsum(lengths)]
    assert browse.ids.keys() == ["item", "event"]
    for key in browse.ids.keys():
        assert browse.ids[key].lengths().tolist() == lengths
    assert browse.ids.length_per_key() == [sum(lengths)] * 2
    events = [item for items in table["browse_item"] for item in items]
    assert browse.ids["item"].values().tolist() == (
        hash_ids(np.array(events), 1000, table_seed("item")).tolist()
    )
    assert browse.ids["event"].values().tolist() == sum(table["browse_event"], [])
    assert browse.age.dtype == torch.float32
    assert browse.age.tolist() == [100 - j for i in rows for j in range(i % 4)]
    assert browse.dense.shape == (sum(lengths), 1)
    assert browse.dense[:, 0].tolist() == sum(table["browse_dwell"], [])
    orders = batch.sequences["orders"]
    assert orders.dense.shape == (sum(i % 3 for i in rows), 0)
    assert orders.layout.lengths.tolist() == [i % 3 for i in rows]


def test_candidate_and_history_meet_in_a_shared_table(tmp_path):
    table = small_table(4)
    table["browse_item"][3] = [table["item"][3]] * 3
    batch = one_batch(tmp_path, table)
    assert set(batch.sequences["browse"].ids["item"].values()[-3:].tolist()) == {
        int(batch.sparse["item"].values()[3])
    }


def test_given_task_counts_only_where_the_other_is_one(tmp_path):
    batch = one_batch(tmp_path, small_table(8))
    assert batch.labels[:, 0].tolist() == [0, 1] * 4
    assert batch.weights[:, 0].tolist() == [1] * 8
    assert batch.labels[:, 1].tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert batch.weights[:, 1].tolist() == [0, 1] * 4
    assert batch.probabilities[:, 0].tolist() == [0.25] * 8
    assert batch.probabilities[:, 1].isnan().all()
    assert not batch.labels.isnan().any()


def test_what_stands_where_a_label_does_not_count_is_ignored(tmp_path):
    table = small_table(8)
    table["conversion"] = [math.nan if i % 2 == 0 else float(i % 4 == 1) for i in range(8)]
    file = write(tmp_path / "rows.parquet", table, {"conversion": None})
    [batch] = open_loader(file)
    assert batch.labels[:, 1].tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert batch.weights[:, 1].tolist() == [0, 1] * 4


def test_a_chain_of_given_tasks(tmp_path):
    schema = small_schema()
    schema.tasks = [
        Task("refund", given="conversion"),
        Task("conversion", given="click"),
        Task("click"),
    ]
    table = small_table(4)
    table |= {"click": [0, 1, 1, 1], "conversion": [1, 0, 1, 1], "refund": [1, 1, 1, 0]}
    batch = one_batch(tmp_path, table, schema=schema)
    assert batch.weights.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert batch.labels.tolist() == [[0, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert batch.probabilities is None


def test_only_the_newest_events_are_kept(tmp_path):
    table = small_table(8)
    batch = one_batch(tmp_path, table, schema=small_schema(max_length=2))
    browse = batch.sequences["browse"]
    assert browse.layout.lengths.tolist() == [0, 1, 2, 2, 0, 1, 2, 2]
    assert browse.ids["event"].values().tolist() == [0, 0, 1, 1, 2, 0, 0, 1, 1, 2]
    assert browse.dense[3:5, 0].tolist() == [3.25, 3.5]
    assert batch.sequences["orders"].layout.lengths.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_no_features_but_a_sequence(tmp_path):
    sequences = [SequenceFeature("orders", fields=[IdFeature("item", rows=10)])]
    schema = Schema("user", "time", [Task("click")], sequences=sequences)
    batch = one_batch(tmp_path, small_table(3), schema=schema)
    assert batch.dense.shape == (3, 0)
    assert batch.sparse.keys() == [] and batch.to(torch.device("cpu")).batch_size == 3


def edit(table, column, row, value):
    table[column][row] = value
    return table


BAD = {
    "null user": ("user", None, "null", "column 'user' is null"),
    "null dense": ("price", None, "null", "column 'price' is null"),
    "null id": ("item", None, "null", "column 'item' is null"),
    "null list": ("tags", None, "null", "column 'tags' is null or holds a null"),
    "null in a list": ("tags", [1, None], "null", "column 'tags' is null or holds a null"),
    "null events": ("browse_item", None, "null", "column 'browse_item' is null or holds a null"),
    "null event": ("orders_time", [500, None], "null", "column 'orders_time' is null or holds"),
    "null label": ("click", None, "null", "column 'click' is null"),
    "null label that is given": (
        "conversion",
        None,
        "null",
        "column 'conversion' is null, but task 'click' is 1",
    ),
    "label": ("click", 2, "label", "label 'click' is 2; it must be 0 or 1"),
    "label that is given": ("conversion", -1, "label", "label 'conversion' is -1; it must be 0 or"),
    "nan": ("price", math.nan, "dense", "column 'price' holds nan; it must be finite"),
    "infinite": ("raw_score", -math.inf, "dense", "column 'raw_score' holds -inf; it must be"),
    "nan of an event": (
        "browse_dwell",
        [1.0, math.nan, 2.0],
        "dense",
        "column 'browse_dwell' holds nan; it must",
    ),
    "id outside": (
        "color",
        3,
        "id",
        "feature 'color' (column 'color') has id 3, outside its table of 3 rows",
    ),
    "negative id": ("color", -1, "id", "feature 'color' (column 'color') has id -1, outside its"),
    "id outside in a list": (
        "tags",
        [0, 4, 100],
        "id",
        "feature 'tags' (column 'tags') has id 100, outside its table",
    ),
    "id outside in a sequence": (
        "browse_event",
        [0, 2, 3],
        "id",
        "feature 'browse.event' (column 'browse_event') has id 3, outside its table of 3 rows",
    ),
    "lengths": (
        "browse_item",
        [1, 2],
        "lengths",
        "sequence 'browse' has 3 events in column 'browse_time', but 2 in column 'browse_item'",
    ),
    "lengths of dense": (
        "browse_dwell",
        [],
        "lengths",
        "sequence 'browse' has 3 events in column 'browse_time', but 0 in column 'browse_dwell'",
    ),
    "event at the impression": (
        "browse_time",
        [1, 2, 1011],
        "history",
        "column 'browse_time' has an event at 1011, not before the impression at 1011",
    ),
    "event after the impression": (
        "orders_time",
        [1, 5000],
        "history",
        "column 'orders_time' has an event at 5000, not before the impression at 1011",
    ),
    "order": (
        "browse_time",
        [5, 4, 6],
        "order",
        "column 'browse_time' has 4 after 5; events must be sorted by time, oldest first",
    ),
}


@pytest.mark.parametrize("column, value, reason, message", BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_named_or_skipped(tmp_path, column, value, reason, message):
    table = edit(small_table(16), column, 11, value)
    file = write(tmp_path / "rows.parquet", table)
    with pytest.raises(BadRowError) as error:
        list(open_loader(file))
    assert str(error.value).startswith(f"{file}, row 11: {message}")
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, IndexError) == (reason == "id")
    assert isinstance(error.value, BadIdError) == (reason == "id")

    loader = open_loader(file, on_bad_row="skip")
    batches = list(loader)
    assert row_numbers(batches) == [i for i in range(16) if i != 11]
    assert [batch.batch_size for batch in batches] == [8, 7]
    assert loader.skipped == {reason: 1}
    # What is left is what a file without the row would give.
    clean = {name: values[:11] + values[12:] for name, values in small_table(16).items()}
    [expected] = open_loader(write(tmp_path / "clean.parquet", clean), batch_size=15)
    [found] = open_loader(file, batch_size=16, on_bad_row="skip")
    assert torch.equal(found.dense, expected.dense)
    assert torch.equal(found.sparse.values(), expected.sparse.values())
    for name in ("browse", "orders"):
        one, other = found.sequences[name], expected.sequences[name]
        assert torch.equal(one.ids.values(), other.ids.values())
        assert torch.equal(one.age, other.age)
        assert torch.equal(one.layout.offsets, other.layout.offsets)


@pytest.mark.parametrize("ids", [[0, 2, 3], [0, 2, 100], [-1]])
def test_ids_outside_a_table_of_three_rows(tmp_path, ids):
    """pytorch#70170, #99221, torchrec#575, FBGEMM#6215: never a segfault, never silently row 0."""
    schema = Schema(
        "user", "time", [Task("click")], sparse=[IdFeature("ids", rows=3, id=IdKind.direct)]
    )
    table = small_table(2) | {"ids": [[0, 2], ids]}
    with pytest.raises(IndexError, match=rf"feature 'ids' .* has id {ids[-1]}, outside .* 3 rows"):
        one_batch(tmp_path, table, schema=schema)
    table["ids"][1] = [0, 2, 2]
    batch = one_batch(tmp_path, table, schema=schema)
    assert batch.sparse["ids"].values().tolist() == [0, 2, 0, 2, 2]


def test_hashed_ids_may_be_any_integer(tmp_path):
    table = edit(small_table(4), "item", 0, -(2**31))
    batch = one_batch(tmp_path, table)
    assert 0 <= int(batch.sparse["item"].values()[0]) < 1000


def test_equal_times_of_events_are_in_order(tmp_path):
    table = edit(small_table(4), "browse_time", 3, [7, 7, 7])
    browse = one_batch(tmp_path, table).sequences["browse"]
    assert browse.age.tolist()[-3:] == [996, 996, 996]


def test_a_row_counts_once_and_rows_count_each(tmp_path, caplog):
    table = small_table(32)
    for row in (3, 7, 9, 20, 21, 22, 30):
        edit(table, "click", row, 5)
    edit(table, "price", 3, None)
    edit(table, "browse_time", 10, [1, 5000])
    loader = open_loader(write(tmp_path / "rows.parquet", table), on_bad_row="skip")
    kept = row_numbers(list(loader))
    assert sorted(set(range(32)) - set(kept)) == [3, 7, 9, 10, 20, 21, 22, 30]
    assert sum(loader.skipped.values()) == 8
    assert loader.skipped == {"null": 1, "label": 6, "history": 1}
    assert len(caplog.messages) == 5
    assert "rows.parquet, row 3: column 'price' is null" in caplog.messages[0]


def test_a_batch_of_skipped_rows_is_empty_and_valid(tmp_path):
    table = small_table(16)
    for row in range(8, 16):
        edit(table, "user", row, None)
    file = write(tmp_path / "rows.parquet", table)
    full, empty = open_loader(file, on_bad_row="skip")
    assert full.batch_size == 8
    empty = empty.to(torch.device("cpu"))
    assert empty.batch_size == 0 and empty.dense.shape == (0, 2) and empty.labels.shape == (0, 2)
    assert empty.probabilities.shape == (0, 2) and empty.rows.shape == (0, 2)
    assert empty.sparse["tags"].offsets().tolist() == [0]
    browse = empty.sequences["browse"]
    assert browse.layout.batch_size == 0 and browse.age.shape == (0,)
    assert browse.dense.shape == (0, 1) and browse.ids["item"].lengths().tolist() == []


def test_histories_that_are_all_empty(tmp_path):
    table = small_table(4)
    for column in ("browse_time", "browse_item", "browse_event", "browse_dwell"):
        table[column] = [[]] * 4
    browse = one_batch(tmp_path, table).sequences["browse"]
    assert browse.layout.lengths.tolist() == [0] * 4 and browse.age.shape == (0,)
    assert browse.ids["event"].lengths().tolist() == [0] * 4

import numpy as np
import pyarrow as pa
import pytest

from gem.data.columns import Column, check_columns, columns_of, jagged_index
from tests.data.helpers import TYPES, small_schema


def as_lists(column: Column) -> list:
    if column.offsets is None:
        return column.values.tolist()
    return [part.tolist() for part in np.split(column.values, column.offsets[1:-1])]


RAGGED = [[1.0], [], [7.0, 8.0], [10.0, 11.0, 12.0]]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_with_an_empty_row(kind):
    column = Column.from_arrow(pa.array(RAGGED, kind(pa.float32())))
    assert column.lengths().tolist() == [1, 0, 2, 3]
    assert as_lists(column) == RAGGED
    assert column.nulls is None


def test_sliced_and_fixed_size_lists():
    column = Column.from_arrow(pa.array(RAGGED, pa.list_(pa.float32())).slice(2))
    assert as_lists(column) == RAGGED[2:]
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    assert as_lists(Column.from_arrow(fixed.slice(1))) == [[3, 4], [5, 6]]


def test_nulls_are_told_by_row():
    column = Column.from_arrow(pa.array([[1], None, [2, None], [], [3]], pa.list_(pa.int64())))
    assert column.nulls.tolist() == [False, True, True, False, False]
    assert column.lengths().tolist() == [1, 0, 2, 0, 1]
    flat = Column.from_arrow(pa.array([1.5, None]))
    assert flat.nulls.tolist() == [False, True] and flat.values.tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (pa.array([-1, 2], pa.int8()), np.int32, [-1, 2]),
        (pa.array([2**31], pa.uint32()), np.int64, [2**31]),
        (pa.array([2**40], pa.int64()), np.int64, [2**40]),
        (pa.array([2**63 + 1], pa.uint64()), np.int64, [-(2**63) + 1]),
        (pa.array([True, None, False]), np.int32, [1, 0, 0]),
        (pa.array([1e300]), np.float32, [np.inf]),
        (pa.array([0.5], pa.float16()), np.float32, [0.5]),
        (pa.array([3, 4]).dictionary_encode(), np.int64, [3, 4]),
    ],
)
def test_element_types(array, dtype, values):
    column = Column.from_arrow(array)
    assert column.values.dtype == dtype
    assert column.values.tolist() == values


def test_take_and_concat():
    one = Column.from_arrow(pa.array([[1], [], [2, 3]], pa.list_(pa.int32())))
    two = Column.from_arrow(pa.array([[None], [4]], pa.list_(pa.int64())))
    both = Column.concat([one, two])
    assert as_lists(both) == [[1], [], [2, 3], [0], [4]]
    assert both.nulls.tolist() == [False, False, False, True, False]
    taken = both.take(np.array([4, 2, 1, 2]))
    assert as_lists(taken) == [[4], [2, 3], [], [2, 3]]
    assert as_lists(both.take(np.zeros(0, dtype=np.int64))) == [[]]
    single = Column.from_arrow(pa.array([7, 8], pa.int32()))
    assert as_lists(Column.concat([single, one])) == [[7], [8], [1], [], [2, 3]]


@pytest.mark.parametrize(
    ("starts", "lengths"), [([], []), ([5, 2], [0, 0]), ([9, 0, 4], [2, 3, 1]), ([3], [0])]
)
def test_jagged_index(starts, lengths):
    expected = [s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)]
    found = jagged_index(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))
    assert found.dtype == np.int64 and found.tolist() == expected


def arrow_schema(**changes) -> pa.Schema:
    types = {**TYPES, **changes}
    return pa.schema([(name, kind) for name, kind in types.items() if kind is not None])


def test_sound_columns_pass():
    check_columns("f", arrow_schema(), small_schema())
    check_columns(
        "f",
        arrow_schema(
            user=pa.string(),
            word=pa.dictionary(pa.int32(), pa.string()),
            tags=pa.int16(),
            item=pa.large_list(pa.string()),
            click=pa.bool_(),
            price=pa.int64(),
        ),
        small_schema(),
    )


@pytest.mark.parametrize(
    ("column", "kind", "wanted"),
    [
        ("browse_event", None, "is not there; the file has user, "),
        ("user", pa.float32(), "has type float; it must be an integer or a string"),
        ("time", pa.timestamp("s"), "has type timestamp[s]; it must be an integer (seconds)"),
        ("click", pa.string(), "it must be a number or a boolean"),
        ("price", pa.list_(pa.float32()), "it must be a number"),
        ("price", pa.decimal128(5, 2), "it must be a number"),
        ("item", pa.float64(), "it must be an integer or a string, or a list of them"),
        ("item", pa.struct([("a", pa.int32())]), "it must be an integer or a string, or a list"),
        ("color", pa.string(), "it must be an integer or a list of integers"),
        ("browse_item", pa.int64(), "it must be a list of integers or strings"),
        ("browse_item", pa.list_(pa.list_(pa.int32())), "it must be a list of integers or strings"),
        ("browse_event", pa.list_(pa.string()), "it must be a list of integers"),
        ("browse_time", pa.list_(pa.float64()), "it must be a list of integers (seconds)"),
        ("browse_dwell", pa.float32(), "it must be a list of numbers"),
        ("click_probability", pa.null(), "it must be a number"),
    ],
)
def test_wrong_columns_are_named(column, kind, wanted):
    with pytest.raises(ValueError) as error:
        check_columns("some/file.parquet", arrow_schema(**{column: kind}), small_schema())
    message = str(error.value)
    assert message.startswith(f"some/file.parquet: column '{column}' (")
    assert wanted in message


def test_a_column_that_is_there_twice():
    schema = arrow_schema().append(pa.field("price", pa.float32()))
    with pytest.raises(
        ValueError, match=r"column 'price' \(dense feature 'price'\) is there twice"
    ):
        check_columns("f", schema, small_schema())


def test_columns_default_to_names():
    found = {column: name for column, _, name in columns_of(small_schema())}
    assert found["browse_item"] == "field 'item' of sequence 'browse'"
    assert found["browse_time"] == "time of sequence 'browse'"
    assert found["raw_score"] == "dense feature 'score'"
    assert set(found) == set(TYPES)

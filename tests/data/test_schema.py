from dataclasses import replace

import pytest

from gem.data.schema import DenseFeature, IdFeature, Schema, SequenceFeature, Task
from tests.data.helpers import small_schema


def test_tables_are_shared_by_name():
    schema = small_schema()
    schema.validate()
    assert schema.tables() == {"item": 1000, "color": 3, "tags": 5, "word": 50, "browse.event": 3}
    assert [name for name, _ in schema.id_features()][-3:] == [
        "browse.item",
        "browse.event",
        "orders.item",
    ]


def test_tasks_come_after_what_they_are_given():
    tasks = [Task("c", given="b"), Task("b", given="a"), Task("d"), Task("a")]
    order = [task.name for task in Schema("u", "t", tasks).tasks_in_order()]
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order.index("a") < order.index("b") < order.index("c")


ITEM = IdFeature("item", rows=10)
SEQUENCE = SequenceFeature("s", fields=[ITEM])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, "the schema has no task"),
        ({"tasks": [Task("a"), Task("a")]}, "task 'a' is named twice"),
        ({"tasks": [Task("a", given="b")]}, "task 'a' is given 'b', which is no other task"),
        ({"tasks": [Task("a", given="a")]}, "task 'a' is given 'a', which is no other task"),
        (
            {"tasks": [Task("a", given="b"), Task("b", given="a"), Task("c")]},
            r"tasks \['a', 'b'\] are given each other in a circle",
        ),
        ({"dense": [DenseFeature("x"), DenseFeature("x")]}, "dense feature 'x' is named twice"),
        ({"sparse": [ITEM, ITEM]}, "sparse feature 'item' is named twice"),
        ({"sequences": [SEQUENCE, SEQUENCE]}, "sequence 's' is named twice"),
        ({"sequences": [SequenceFeature("s", fields=[])]}, "sequence 's' has no id field"),
        (
            {"sequences": [SequenceFeature("s", fields=[ITEM, ITEM])]},
            "field of sequence 's' 'item' is named twice",
        ),
        ({"sequences": [replace(SEQUENCE, max_length=0)]}, "sequence 's' has max_length 0"),
        (
            {"sparse": [IdFeature("a", 5, table="t"), IdFeature("b", 6, table="t")]},
            "table 't' has 5 rows, but feature 'b' asks for 6",
        ),
        ({"sparse": [IdFeature("a", 2**32 + 1)]}, "table 'a' has 4294967297 rows; at most"),
    ],
)
def test_what_does_not_hold_together(changes, message):
    schema = replace(Schema("user", "time", [Task("click")]), **changes)
    with pytest.raises(ValueError, match=message):
        schema.validate()


def test_a_table_without_rows():
    with pytest.raises(ValueError, match="feature 'a' has a table of 0 rows; 1 or more"):
        IdFeature("a", 0)

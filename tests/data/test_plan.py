import numpy as np
import pytest

from gem.data.plan import plan_epoch, rank_range, steps_per_epoch


def planned(counts, groups=None, limit=100, seed=0, epoch=0, shuffle=True):
    counts = np.array(counts, dtype=np.int64)
    groups = np.arange(len(counts)) if groups is None else np.array(groups)
    return plan_epoch(counts, groups, limit, seed, epoch, shuffle)


def order_of(plan, counts):
    """(segment, row) in the planned order."""
    rows = []
    for chunk, segments in enumerate(plan.chunks):
        read = [(int(s), row) for s in segments for row in range(counts[s])]
        rows += [read[i] for i in plan.order(chunk)]
    return rows


COUNTS = [30, 0, 50, 20, 70, 100, 1, 0, 29]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_once_in_bounded_chunks(shuffle):
    plan = planned(COUNTS, shuffle=shuffle)
    rows = order_of(plan, COUNTS)
    assert sorted(rows) == [(s, row) for s, count in enumerate(COUNTS) for row in range(count)]
    assert (rows == sorted(rows)) == (not shuffle)
    assert plan.starts[0] == 0 and plan.starts[-1] == sum(COUNTS)
    assert all(0 < size <= 100 for size in np.diff(plan.starts))
    for position in (0, 1, 29, 30, 100, 299):
        chunk = plan.chunk_at(position)
        assert plan.starts[chunk] <= position < plan.starts[chunk + 1]


def test_order_follows_from_seed_and_epoch():
    counts = [40] * 20
    first = order_of(planned(counts), counts)
    assert order_of(planned(counts), counts) == first
    for change in ({"epoch": 1}, {"seed": 1}):
        assert order_of(planned(counts, **change), counts) != first
    # Seed and epoch are not added up.
    one = order_of(planned(counts, seed=1, epoch=0), counts)
    assert one != order_of(planned(counts, seed=0, epoch=1), counts)


def test_rows_of_several_row_groups_are_mixed():
    counts = [25] * 40
    plan = planned(counts, limit=100)
    segments = [segment for segment, _ in order_of(plan, counts)[:40]]
    assert len(set(segments)) == 4 and segments != sorted(segments)
    assert sorted(np.concatenate(plan.chunks).tolist()) == list(range(40))
    assert np.concatenate(plan.chunks).tolist() != list(range(40))


def test_segments_of_a_row_group_stay_in_order():
    groups = [0, 0, 0, 1, 2, 2]
    for seed in range(10):
        plan = planned([60] * 6, groups, seed=seed)
        order = np.concatenate(plan.chunks).tolist()
        where = {segment: place for place, segment in enumerate(order)}
        assert where[1] == where[0] + 1 and where[2] == where[1] + 1 and where[5] == where[4] + 1


@pytest.mark.parametrize("counts", [[], [0, 0]])
@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_to_plan(counts, shuffle):
    plan = planned(counts, shuffle=shuffle)
    assert plan.chunks == [] and plan.starts.tolist() == [0]


@pytest.mark.parametrize("rows", [0, 1, 7, 100, 101, 10**12 + 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 33])
def test_ranks_share_rows_and_steps(rows, world_size, batch_size):
    ranges = [rank_range(rows, rank, world_size) for rank in range(world_size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == rows
    assert all(one[1] == other[0] for one, other in zip(ranges[:-1], ranges[1:], strict=True))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    full = steps_per_epoch(rows, world_size, batch_size, drop_last=True)
    assert all(full * batch_size <= size for size in sizes)
    assert any((full + 1) * batch_size > size for size in sizes)
    complete = steps_per_epoch(rows, world_size, batch_size, drop_last=False)
    assert all(complete * batch_size >= size for size in sizes)
    assert rows == 0 or any((complete - 1) * batch_size < size for size in sizes)

"""The pure functions that decide which tile runs when."""

import random

import pytest
import torch

from gem.attention import schedule
from tests.attention.lengths import CPU, WINDOWS, random_lengths, visible_keys


@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
def test_query_tiles_are_complete_and_longest_first(left, right, shared):
    rng = random.Random(0)
    for block in (4, 16):
        keys = random_lengths(rng, 7)
        queries = 9 if shared else random_lengths(rng, 7)
        each = [9] * 7 if shared else queries.tolist()
        tiles = schedule.query_tiles(keys, queries, left, right, block, CPU)
        assert tiles.dtype == torch.int32
        expected = {(b, m) for b, n in enumerate(each) for m in range(-(-n // block))}
        listed = [tuple(row) for row in tiles.tolist()]
        assert len(listed) == len(expected) and set(listed) == expected
        loads = [
            visible_keys(
                each[b],
                int(keys[b]),
                m * block,
                min(each[b], (m + 1) * block),
                left,
                right,
            )
            for b, m in listed
        ]
        assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_key_tiles_are_complete_and_most_seen_first(left, right):
    rng = random.Random(1)
    keys, queries = random_lengths(rng, 9), random_lengths(rng, 9)
    tiles = [tuple(row) for row in schedule.key_tiles(keys, queries, left, right, 8, CPU).tolist()]
    expected = {(b, n) for b, k in enumerate(keys.tolist()) for n in range(-(-k // 8))}
    assert len(tiles) == len(expected) and set(tiles) == expected

    def load(b, n):
        k, q = int(keys[b]), int(queries[b])
        return visible_keys(k, q, 8 * n, min(k, 8 * n + 8), right, left)

    loads = [load(*tile) for tile in tiles]
    assert loads == sorted(loads, reverse=True)


def dealt(segments):
    """For each worker, the (sample, begin, end) that it takes, as the kernels read the table."""
    table = segments.table.tolist()
    hands = [[] for _ in range(segments.workers)]
    for turn in range(segments.turns):
        for worker in range(segments.workers):
            place = worker if turn % 2 == 0 else segments.workers - 1 - worker
            hands[worker].append(table[turn * segments.workers + place])
    return hands


@pytest.mark.parametrize(
    "lengths",
    [[3], [0, 0, 5], [40_000], [1, 2, 3, 200_000, 5], [700] * 50, list(range(0, 4000, 7))],
    ids=lambda x: f"{len(x)}-{max(x)}",
)
@pytest.mark.parametrize("workers", [1, 7, 64])
def test_key_segments_cover_every_key_once_and_balance(lengths, workers):
    segments = schedule.key_segments(torch.tensor(lengths), workers, CPU)
    assert 1 <= segments.workers <= workers
    hands = dealt(segments)
    seen = sorted(run for hand in hands for run in hand if run[1] < run[2])
    covered = dict.fromkeys(range(len(lengths)), 0)
    for b, begin, end in seen:
        assert begin == covered[b] and begin % schedule.SEGMENT_ALIGNMENT == 0
        covered[b] = end
    assert covered == dict(enumerate(lengths))
    loads = [sum(end - begin for _, begin, end in hand) for hand in hands]
    longest = max(end - begin for _, begin, end in seen)
    assert max(loads) - min(loads) <= 2 * longest
    if workers > 1 and sum(lengths) > 100 * workers * schedule.SEGMENT_ALIGNMENT:
        assert max(loads) <= 1.15 * sum(lengths) / segments.workers


def test_no_keys_at_all():
    for lengths in ([], [0, 0]):
        lengths = torch.tensor(lengths, dtype=torch.int64)
        segments = schedule.key_segments(lengths, 8, CPU)
        assert segments.turns == 0 and segments.table.shape == (0, 3)
        assert schedule.query_tiles(lengths, 0, None, None, 64, CPU).shape == (0, 2)

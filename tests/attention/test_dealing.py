"""The tables of tiles for kernels whose CTAs stay: complete, in order, and balanced."""

import random

import pytest
import torch

from gem.attention import dealing
from tests.attention.lengths import CPU, WINDOWS, random_lengths, visible_keys

# Broadcast attention has no window.
FORMS = [*((*window, False) for window in WINDOWS), (None, None, True)]


def blocks_of(rows, block):
    """Blocks that tiles see, in all."""
    return sum(-(-(row[3] - row[2]) // block) for row in rows)


def zigzag(rows, ctas):
    """The tiles of each CTA, as the forward deals a table."""
    hands = [[] for _ in range(ctas)]
    for place, row in enumerate(rows):
        turn, at = divmod(place, ctas)
        hands[at if turn % 2 == 0 else ctas - 1 - at].append(row)
    return hands


def units_of(tiles):
    """What CTAs take at a time, as the backward reads `dealing.KeyTiles`."""
    rows, at, units = tiles.table.tolist(), 0, []
    for unit in range(tiles.units):
        two = tiles.single <= unit < tiles.single + tiles.pairs
        units.append(rows[at : at + 1 + two])
        at += 1 + two
    assert at == len(rows) and tiles.table.dtype == torch.int32
    return units


@pytest.mark.parametrize(("left", "right", "shared"), FORMS)
def test_dealt_tiles_hold_every_tile_of_every_head_once(left, right, shared):
    rng = random.Random(2)
    keys = random_lengths(rng, 9)
    queries = 21 if shared else random_lengths(rng, 9)
    each = [21] * 9 if shared else queries.tolist()
    tiles = dealing.dealt_tiles(keys, queries, left, right, 3, 8, 4, CPU)
    k_first, out_first = keys.cumsum(0) - keys, torch.tensor(each).cumsum(0) - torch.tensor(each)
    seen = {}
    for row, empty in [(r, False) for r in tiles.table.tolist()] + [
        (r, True) for r in tiles.empty.tolist()
    ]:
        first_key, n_keys, begin, end, first_out, n_queries, first, head, part = row
        assert part == -1
        sample = next(
            b for b in range(9)
            if out_first[b] <= first_out + first < out_first[b] + each[b]
        )  # fmt: skip
        assert (first_key, n_keys) == (k_first[sample], keys[sample])
        assert (first_out, n_queries) == (out_first[sample], each[sample])
        last = min(first + 8, n_queries)
        count = visible_keys(n_queries, n_keys, first, last, left, right)
        assert (count == 0) == empty and (empty or count == end - begin)
        seen[sample, first, head] = seen.get((sample, first, head), 0) + 1
    expected = {(b, i, h) for b, n in enumerate(each) for i in range(0, n, 8) for h in range(3)}
    assert set(seen) == expected and set(seen.values()) == {1}
    loads = [-(-(row[3] - row[2]) // 4) for row in tiles.table.tolist()]
    assert loads == sorted(loads, reverse=True)


def test_dealt_tiles_balance_the_ctas_and_keep_a_sample_together():
    lengths = torch.randint(1, 2000, (512,), generator=torch.Generator().manual_seed(0))
    rows = dealing.dealt_tiles(lengths, 256, None, None, 4, 128, 64, CPU).table.tolist()
    for ctas in (1, 7, 132):
        loads = [blocks_of(hand, 64) for hand in zigzag(rows, ctas)]
        assert max(loads) <= 1.02 * sum(loads) / ctas
    pairs = [(row[0], row[7]) for row in rows]
    assert pairs[::2] == pairs[1::2]  # the two tiles of a sample and head


def tiles_and_loads(lengths, queries, ctas, **options):
    """(tiles of 4 heads in blocks of 128 queries and 64 keys, blocks of each of the CTAs)."""
    tiles = dealing.dealt_tiles(lengths, queries, None, None, 4, 128, 64, CPU, ctas, **options)
    return tiles, [blocks_of(hand, 64) for hand in zigzag(tiles.table.tolist(), ctas)]


@pytest.mark.parametrize("team", [1, 4])
@pytest.mark.parametrize(("most", "samples"), [(600, 1024), (150, 1024), (3000, 300), (90, 20)])
def test_evened_turns_hold_the_same_tiles_and_balance_better(most, samples, team):
    lengths = torch.randint(1, most, (samples,), generator=torch.Generator().manual_seed(most))
    ctas = 132
    before, loads = tiles_and_loads(lengths, 128, ctas)
    after, evened = tiles_and_loads(lengths, 128, ctas, team=team, even=True)
    rows, others = before.table.tolist(), after.table.tolist()
    for turn in range(0, len(rows), ctas):
        assert sorted(rows[turn : turn + ctas]) == sorted(others[turn : turn + ctas])
    if team > 1:  # a sample's heads, in order
        assert all(row[7] == place % 4 for place, row in enumerate(others))
        assert all(len({row[0] for row in others[i : i + 4]}) == 1 for i in range(0, len(rows), 4))
    # What a tile costs by itself counts too, so that blocks alone may be off by a tile's half.
    assert max(evened) <= max(loads) + 1
    if samples > 300 and team == 1:
        assert max(evened) <= 1.012 * sum(evened) / ctas


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(
    ("lengths", "queries", "at_most"),
    [
        ([60_000], 50, 1.2),  # one sample has all the work
        ([60_000, *range(20, 2000, 40)], 50, 1.2),  # or most of it
        ([100_000, 0, 3, 40_000], 300, 1.1),
        ([2**20], 1, 1.1),
    ],
    ids=["one", "most", "few", "million"],
)
def test_parts_of_long_tiles_hold_every_key_once_and_balance(lengths, queries, at_most, even):
    lengths, ctas = torch.tensor(lengths), 132
    whole, _ = tiles_and_loads(lengths, queries, ctas)
    tiles, loads = tiles_and_loads(lengths, queries, ctas, even=even, in_parts=True)
    assert max(loads) <= at_most * sum(loads) / ctas
    seen, results = {}, {}
    for row in tiles.table.tolist():
        keys, begin, end, tile, part = row[:2], row[2], row[3], row[4:8], row[8]
        seen.setdefault((*keys, *tile), []).append((begin, end))
        if part >= 0:
            results[part] = *tile, begin
    expected = {(*r[:2], *r[4:8]): r[2:4] for r in whole.table.tolist()}
    assert seen.keys() == expected.keys()
    for tile, spans in seen.items():
        spans.sort()
        assert [spans[0][0], spans[-1][1]] == expected[tile]
        assert all(a[1] == b[0] and a[1] % 64 == 0 for a, b in zip(spans, spans[1:], strict=False))
    # Merges name the parts of each tile, in the order of their keys.
    assert sorted(results) == list(range(tiles.parts)) and tiles.parts > 0
    of_merges = []
    for begin, count, _, _, *tile, part in tiles.merges.tolist():
        assert count > 1 and part == -1
        mine = [results[p] for p in range(begin, begin + count)]
        assert {x[:4] for x in mine} == {tuple(tile)}
        assert [x[4] for x in mine] == sorted(x[4] for x in mine)
        of_merges += range(begin, begin + count)
    assert sorted(of_merges) == list(range(tiles.parts))


def test_tiles_stay_whole_where_parts_would_save_little():
    lengths = torch.randint(1, 4000, (512,), generator=torch.Generator().manual_seed(0))
    assert tiles_and_loads(lengths, 256, 132, in_parts=True)[0].parts == 0
    assert tiles_and_loads(torch.tensor([100, 200]), 256, 132, in_parts=True)[0].parts == 0


@pytest.mark.parametrize("build", [dealing.dealt_tiles, dealing.dealt_keys])
def test_causal_tiles_are_dealt_evenly_though_sections_end_within_turns(build):
    lengths = torch.full((8,), 4096)

    def built(ctas):
        return build(lengths, lengths, None, 0, 16, 128, 64, CPU, ctas)

    loads = [blocks_of(hand, 64) for hand in zigzag(built(132).table.tolist(), 132)]
    # What is sorted for one CTA only, all of each section, does not deal evenly.
    others = [blocks_of(hand, 64) for hand in zigzag(built(1).table.tolist(), 132)]
    mean = sum(loads) / 132
    assert sum(others) == sum(loads)
    assert max(loads) <= 1.04 * mean < 1.2 * mean <= max(others)


def test_no_tiles_at_all():
    lengths = torch.tensor([0, 0])
    tiles = dealing.dealt_tiles(lengths, 5, None, None, 2, 64, 64, CPU)
    assert tiles.table.shape == tiles.merges.shape == (0, 9) and tiles.empty.shape == (4, 9)
    tiles = dealing.dealt_tiles(lengths[:0], lengths[:0], 3, 0, 2, 64, 64, CPU)
    assert tiles.table.shape == tiles.empty.shape == (0, 9)


def check_keys(tiles, keys, queries, left, right, heads):
    """Every block of 8 keys of every head is there once; it sees the queries that see its keys."""
    q_first, k_first = queries.cumsum(0) - queries, keys.cumsum(0) - keys
    sample_of = torch.repeat_interleave(torch.arange(len(keys)), keys).tolist()
    stats = dealing.statistic_tiles(keys, queries, 4, CPU)
    seen = {}
    for row, empty in [(r, False) for unit in units_of(tiles) for r in unit] + [
        (r, True) for r in tiles.empty.tolist()
    ]:
        first_q, n_queries, begin, end, first_key, n_keys, first, head, first_stats, _ = row
        b = sample_of[first_key + first]
        assert (first_q, n_queries) == (q_first[b], queries[b])
        assert (first_key, n_keys) == (k_first[b], keys[b])
        # The queries that see some of the keys are next to each other.
        count = visible_keys(n_keys, n_queries, first, min(first + 8, n_keys), right, left)
        assert (count == 0) == empty
        if not empty:
            # Rounding down leaves no block of queries out and adds none.
            assert begin % 4 == 0 and 0 <= end - begin - count < 4 and end <= n_queries
            # Where a sample's statistics are is where its first query's are.
            assert first_stats % 4 == 0
            assert stats[first_stats // 4, :2].tolist() == [first_q, min(4, n_queries)]
        seen[b, first, head] = seen.get((b, first, head), 0) + 1
    expected = {
        (b, j, h) for b, n in enumerate(keys.tolist()) for j in range(0, n, 8) for h in range(heads)
    }
    assert set(seen) == expected and set(seen.values()) == {1}


@pytest.mark.parametrize(("left", "right", "shared"), FORMS)
def test_dealt_keys_hold_every_block_of_every_head_once(left, right, shared):
    rng = random.Random(3)
    keys = random_lengths(rng, 12)
    queries = torch.full_like(keys, 21) if shared else random_lengths(rng, 12)
    tiles = dealing.dealt_keys(keys, 21 if shared else queries, left, right, 3, 8, 4, CPU, 7)
    assert tiles.empty.dtype == torch.int32
    check_keys(tiles, keys, queries, left, right, 3)
    assert tiles.units == tiles.single == len(tiles.table) and tiles.pairs == 0
    # Nobody has to wait for anybody, or may write sums that others have added to.
    assert not tiles.table[:, 9].any()


@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_dealt_keys_begin_with_those_that_most_queries_see(left, right):
    rng = random.Random(4)
    keys, queries = random_lengths(rng, 20), random_lengths(rng, 20)
    tiles = dealing.dealt_keys(keys, queries, left, right, 2, 8, 4, CPU)

    def blocks(row):
        first_q, n_queries, begin, end, first_key, n_keys, first, *_ = row
        return -(-visible_keys(n_keys, n_queries, first, min(first + 8, n_keys), right, left) // 4)

    loads = [blocks(row) for row in tiles.table.tolist()]
    assert loads == sorted(loads, reverse=True) and max(loads) > 1


@pytest.mark.parametrize("whole", [False, True])
def test_no_keys_to_deal(whole):
    def deal(keys, queries):
        return dealing.dealt_keys(keys, queries, None, None, 2, 64, 64, CPU, 3, whole)

    zero = torch.tensor([0, 0])
    unseen = deal(zero + 70, zero)
    none = zero[:0]
    for tiles in (deal(zero, 5), unseen, deal(zero + 9, zero), deal(none, none)):
        assert tiles.table.shape == (0, 10)
        assert tiles.units == tiles.single == tiles.pairs == 0
    assert unseen.empty.shape == (8, 10) and deal(zero + 9, zero).empty.shape == (4, 10)
    assert deal(zero, 5).empty.shape == deal(none, none).empty.shape == (0, 10)
    tiles = dealing.dealt_keys(none, none, 3, 0, 2, 64, 64, CPU)
    assert tiles.table.shape == tiles.empty.shape == (0, 10)


@pytest.mark.parametrize("most", [8, 16, 40])
def test_whole_samples_are_taken_at_once_in_the_order_of_their_keys(most):
    rng = random.Random(6)
    keys, queries = (random_lengths(rng, 40).clamp(max=most) for _ in range(2))
    tiles = dealing.dealt_keys(keys, queries, None, None, 3, 8, 4, CPU, 7, True)
    check_keys(tiles, keys, queries, None, None, 3)
    units = units_of(tiles)
    longer, rest = units[: tiles.single], units[tiles.single :]
    assert all(row[5] > 16 and row[9] == 0 for (row,) in longer)
    found = []
    for rows in rest:
        assert {row[5] for row in rows} == {rows[0][5]} and rows[0][5] <= 8 * len(rows)
        assert [row[6] for row in rows] == [0, 8][: len(rows)]
        assert [row[9] for row in rows] == ([3] if len(rows) == 1 else [1, 2])
        found += {(row[4], row[7]) for row in rows}
    short = (keys > 0) & (keys <= 16) & (queries > 0)
    assert len(found) == len(set(found)) == len(rest) == 3 * int(short.sum()) > 0
    for part in (longer, rest[: tiles.pairs], rest[tiles.pairs :]):
        steps = [blocks_of(rows[:1], 4) for rows in part]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("shared", [False, True])
def test_statistic_tiles_hold_every_query_once_each_sample_from_a_new_block(shared):
    rng = random.Random(5)
    keys = random_lengths(rng, 30)
    queries = torch.full_like(keys, 21) if shared else random_lengths(rng, 30)
    tiles = dealing.statistic_tiles(keys, 21 if shared else queries, 8, CPU)
    assert tiles.dtype == torch.int32
    first, expected = 0, []
    for b, n in enumerate(queries.tolist()):
        clear = 1 if b == 0 or not shared else 0  # shared queries have one set of sums
        expected += [[first + m, min(8, n - m), clear] for m in range(0, n, 8)]
        first += n
    assert tiles.tolist() == expected
    assert dealing.statistic_tiles(keys, 0, 8, CPU).shape == (0, 3)
    assert dealing.statistic_tiles(keys[:0], 21, 8, CPU).shape == (0, 3)


@pytest.mark.parametrize("whole", [16, 20])
def test_sums_begin_as_zero_but_for_whole_samples_with_keys(whole):
    """Where there are no keys nobody writes sums; the queries' gradient is 0 nevertheless."""
    rng = random.Random(7)
    bounds = [n + more for n in (whole // 2, whole) for more in (-1, 0, 1)]
    keys = torch.cat([random_lengths(rng, 60), torch.tensor(bounds)])
    queries = torch.cat([random_lengths(rng, 60), torch.tensor([9] * len(bounds))])
    tiles = dealing.statistic_tiles(keys, queries, 8, CPU, whole // 2)
    begin = [
        1 if k == 0 or k > whole else 2 if k <= whole // 2 else 0
        for k, n in zip(keys.tolist(), queries.tolist(), strict=True)
        for _ in range(0, n, 8)
    ]
    assert tiles[:, 2].tolist() == begin and set(begin) == {0, 1, 2}
    assert torch.equal(tiles[:, :2], dealing.statistic_tiles(keys, queries, 8, CPU)[:, :2])
    # Exactly these samples have a first tile that writes.
    dealt = dealing.dealt_keys(keys, queries, None, None, 1, whole // 2, 8, CPU, 3, True)
    written = {row[0] for row in dealt.table.tolist() if row[9] in (1, 3)}
    starts = (queries.cumsum(0) - queries).tolist()
    cleared = {row[0] for row in tiles.tolist() if row[2] == 1}
    alone = {row[0] for row in tiles.tolist() if row[2] == 2}
    assert {row[0] for row in dealt.table.tolist() if row[9] == 3} == alone & set(starts)
    assert written.isdisjoint(cleared)
    assert written == {
        first for first, k, n in zip(starts, keys.tolist(), queries.tolist(), strict=True)
        if n and 0 < k <= whole
    }  # fmt: skip

"""The tiles of the torch backend: every visible pair once, nothing large, nothing overflowing."""

import random

import pytest
import torch

from gem.attention.backends import torch_
from gem.attention.backends.torch_plan import band_block, padded_size, tiles, window_mask
from gem.attention.reference import visible
from gem.attention.testing import attend, random_problem

CPU = torch.device("cpu")


def plan_of(q_lengths, k_lengths, left, right, heads=1, kv_heads=1):
    k = torch.tensor(k_lengths, dtype=torch.int64)
    q = q_lengths if isinstance(q_lengths, int) else torch.tensor(q_lengths, dtype=torch.int64)
    o_end = q * len(k) if isinstance(q, int) else int(q.sum())
    return tiles(k, q, left, right, heads, kv_heads, o_end, int(k.sum()), CPU)


def pairs_of(plan):
    """Every (output row, key row) that a tile lets through, as a list with repeats."""
    found = []
    for group in plan.groups:
        n, mq, mk = group.size
        mask = torch.zeros(n, mq, mk)
        for column, part in group.chunk_masks(0, n):
            mask[..., column : column + part.shape[-1]] += part
        if group.key_bias is not None:
            mask += group.key_bias[:, None]
        padding = group.o_write != group.o_rows
        mask[padding[:, :, None].expand_as(mask)] = -torch.inf
        for t, i, j in (mask == 0).nonzero().tolist():
            found.append((int(group.o_rows[t, i]), int(group.k_rows[t, j])))
    return found


def expected_pairs(q_lengths, k_lengths, left, right):
    pairs, q_start, k_start = [], 0, 0
    for i, keys in enumerate(k_lengths):
        queries = q_lengths if isinstance(q_lengths, int) else q_lengths[i]
        seen = visible(queries, keys, left, right, CPU)
        pairs += [(q_start + a, k_start + b) for a, b in seen.nonzero().tolist()]
        q_start, k_start = q_start + queries, k_start + keys
    return pairs


@pytest.mark.parametrize("seed", range(25))
def test_every_visible_pair_is_in_one_tile(seed, monkeypatch):
    monkeypatch.setattr("gem.attention.backends.torch_plan.WHOLE_LIMIT", 40 * 40)
    monkeypatch.setattr("gem.attention.backends.torch_plan.STRIP_PAIRS", 20 * 40)
    rng = random.Random(seed)
    batch = rng.randint(1, 6)
    k = [rng.choice([0, 1, rng.randint(0, 90)]) for _ in range(batch)]
    q = rng.choice([k, [rng.choice([0, 1, rng.randint(0, 90)]) for _ in range(batch)], 7])
    sides = [None, 0, 1, rng.randint(0, 20), rng.randint(0, 100)]
    left, right = (None, None) if q == 7 else (rng.choice(sides), rng.choice(sides))
    found = pairs_of(plan_of(q, k, left, right))
    assert len(found) == len(set(found))
    assert sorted(found) == sorted(expected_pairs(q, k, left, right))


@pytest.mark.parametrize(
    ("lengths", "window", "kinds"),
    [
        ([300, 20, 0, 500], (32, 0), {"band", "whole"}),
        ([300, 20, 0, 500], (64, 64), {"band", "whole"}),
        ([300, 20, 0, 100], (None, None), {"strip", "whole"}),
        ([300, 20, 0, 100], (None, 0), {"strip", "whole"}),
        ([3000, 20], (2000, 2000), {"strip", "whole"}),
        ([0, 0], (None, None), set()),
    ],
    ids=str,
)
def test_kinds_of_tiles(lengths, window, kinds):
    assert {g.kind for g in plan_of(lengths, lengths, *window).groups} == kinds


def test_a_narrow_window_costs_little_more_than_what_it_shows():
    lengths = [random.Random(0).randint(0, 2000) for _ in range(50)]
    for left, right in ((32, 0), (64, 64), (128, 0)):
        plan = plan_of(lengths, lengths, left, right)
        worked = sum(n * mq * mk for n, mq, mk in (g.size for g in plan.groups))
        shown = sum(lengths) * (left + right + 1)
        assert worked < 2.2 * shown


@pytest.mark.parametrize(
    ("queries", "window"),
    [(None, None), (None, (None, 0)), (None, (64, 64)), (1, None), (300, None)],
    ids=str,
)
def test_memory_is_bounded_by_the_chunk(queries, window, monkeypatch):
    """No piece of working memory grows with the batch or with the product of lengths."""
    asked = []
    memory = torch_._Work.memory

    def spy(self, name, *shape):
        x = memory(self, name, *shape)
        asked.append(x.numel())
        return x

    monkeypatch.setattr(torch_._Work, "memory", spy)
    lengths = [1500, 40, 900] + [30] * 400
    attend(random_problem(queries or lengths, lengths, window=window, dim=16))
    assert max(asked) <= 1.1 * torch_.CHUNK


def test_padded_sizes():
    lengths = torch.arange(0, 5000)
    padded = padded_size(lengths)
    assert padded.unique()[:9].tolist() == [0, 8, 16, 32, 64, 96, 128, 192, 256]
    assert (padded >= lengths).all()
    assert (padded[65:] <= 1.5 * lengths[65:]).all()
    assert torch.equal(padded_size(padded), padded)


def test_blocks_suit_the_window():
    assert band_block(32, 0, 1) == 32
    assert band_block(0, 0, 1) <= 32
    assert band_block(200, 200, 1) >= 32


def test_window_masks_of_shifted_tiles():
    shifts = torch.tensor([0, 3, -2])
    masks = window_mask(4, 6, shifts[:, None, None], 1, 0)
    for shift, mask in zip(shifts.tolist(), masks, strict=True):
        assert torch.equal(mask, window_mask(4, 6, shift, 1, 0))


@pytest.mark.parametrize("heads", [1, 8])
def test_indices_do_not_overflow(heads):
    """Rows times heads beyond 2**31: the last sample's indices are exact int64."""
    top = 2**31 - 100
    plan = plan_of([0, 3], [top, 5], None, None, heads, heads)
    (group,) = plan.groups
    rows = (torch.arange(top, top + 5, dtype=torch.int64) * heads).tolist()
    assert group.k_rows.dtype == torch.int64
    assert group.k_rows[0, :5].tolist() == rows and group.k_write[0, :5].tolist() == rows
    assert group.k_write[0, 5].item() == (top + 5) * heads

    batch, queries = 2_200_000, 1000
    lengths = torch.zeros(batch, dtype=torch.int64)
    lengths[-1] = 3
    plan = tiles(lengths, queries, None, None, heads, heads, batch * queries, 3, CPU)
    (group,) = plan.groups
    first = (batch - 1) * queries
    assert first * heads > 2**31
    assert group.o_write[0, [0, -1]].tolist() == [first * heads, (first + queries - 1) * heads]
    assert group.q_rows[0, [0, -1]].tolist() == [0, (queries - 1) * heads]

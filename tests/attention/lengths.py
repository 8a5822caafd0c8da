"""Lengths and windows for the tests of schedules."""

import torch

CPU = torch.device("cpu")
WINDOWS = [(None, None), (None, 0), (5, 0), (7, 3), (None, 4), (2, None), (0, 0)]


def visible_keys(queries, keys, first, last, left, right):
    """How many keys some query from first to last (exclusive) sees, by brute force."""
    shift = keys - queries
    return sum(
        any(
            (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
            for i in range(first, last)
        )
        for j in range(keys)
    )


def random_lengths(rng, batch):
    return torch.tensor([rng.choice([0, 1, rng.randint(0, 40)]) for _ in range(batch)])

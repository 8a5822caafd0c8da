"""Fresh random data for a row of the benchmark."""

from __future__ import annotations

import secrets

import torch

from bench.shapes import Row
from gem.attention.layout import JaggedLayout
from gem.attention.testing import Problem


def fresh_seed() -> int:
    return secrets.randbits(48)


def make_problems(
    row: Row, dtype: torch.dtype, device: torch.device, seed: int, l2_bytes: int, at_most: int = 8
) -> list[Problem]:
    """Input sets of one row: as many as make twice the L2 cache, at least one.

    All share one layout; the numbers are normally distributed and differ between sets.
    """
    layout = JaggedLayout.from_lengths(torch.from_numpy(row.lengths()), device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, row.dim, generator=generator, dtype=dtype, device=device)

    read = 2 * layout.rows * row.kv_heads * row.dim * dtype.itemsize
    sets = min(at_most, max(1, -(-2 * l2_bytes // max(1, read))))
    problems = []
    for _ in range(sets):
        rows = row.queries if row.broadcast else layout.rows
        q = normal(rows, row.heads)
        dout = normal(row.batch, rows, row.heads) if row.broadcast else normal(rows, row.heads)
        problems.append(
            Problem(
                q,
                normal(layout.rows, row.kv_heads),
                normal(layout.rows, row.kv_heads),
                dout,
                layout,
                None if row.broadcast else layout,
                causal=row.causal,
                window=row.window,
            )
        )
    return problems

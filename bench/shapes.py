"""The rows of the attention benchmark: shapes, lengths, FLOPs and compulsory bytes.

Lengths come from a generator seeded with the row's name, so that they are the same on every
machine; the data are fresh at every run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

SHAPES = Path(__file__).with_name("shapes.yaml")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of shapes.yaml.

    Attributes:
        set, name: where it stands in the file.
        batch, heads, dim, max_keys: samples, query heads, head dim, longest length.
        kv_heads: heads of k and v.
        queries: rows of the shared q; None where queries and keys share their lengths.
        density: mean over longest length.
        equal: every length is `max_keys`.
        causal, window: as in `jagged_attention`.
    """

    set: str
    name: str
    batch: int
    heads: int
    dim: int
    max_keys: int
    kv_heads: int
    queries: int | None = None
    density: float = 1.0
    equal: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    @property
    def broadcast(self) -> bool:
        return self.queries is not None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right); None is unbounded."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def lengths(self) -> np.ndarray:
        """Keys per sample: int64 `[batch]`."""
        if self.equal:
            return np.full(self.batch, self.max_keys)
        if self.density >= 0.5:
            low, high = round((2 * self.density - 1) * self.max_keys), self.max_keys
        else:
            low, high = 1, max(1, round(2 * self.density * self.max_keys))
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        return generator.integers(low, high, self.batch, endpoint=True)

    def pairs(self) -> int:
        """Pairs of query and key that the mask lets through, in all samples, per head."""
        keys = self.lengths()
        if self.broadcast:
            return int(self.queries * keys.sum())
        return visible_pairs(keys, keys, *self.sides)

    def flops(self, direction: str) -> float:
        """Forward 4 * heads * dim * pairs (two products); backward 2.5 times that (five)."""
        forward = 4.0 * self.heads * self.dim * self.pairs()
        return forward if direction == "forward" else 2.5 * forward

    def bytes(self, direction: str, itemsize: int = 2) -> int:
        """Bytes that any implementation moves: each input read once, each result written once.

        Forward: q, k, v, out and the log-sum-exp (float32). Backward: these and dout read, dq, dk
        and dv written.
        """
        rows = int(self.lengths().sum())
        queries = self.batch * self.queries if self.broadcast else rows
        q = (self.queries if self.broadcast else rows) * self.heads * self.dim * itemsize
        kv = 2 * rows * self.kv_heads * self.dim * itemsize
        out = queries * self.heads * self.dim * itemsize
        lse = queries * self.heads * 4
        if direction == "forward":
            return q + kv + out + lse
        return 2 * (q + kv + out) + lse


def visible_pairs(
    queries: np.ndarray, keys: np.ndarray, left: int | None, right: int | None
) -> int:
    """Pairs that a window lets through, summed over samples; last query at the last key."""
    queries, keys = np.asarray(queries, np.int64), np.asarray(keys, np.int64)
    if left is None and right is None:
        return int((queries * keys).sum())
    first = queries.cumsum() - queries
    sample = np.repeat(np.arange(len(queries)), queries)
    position = np.arange(len(sample)) - first[sample] + (keys - queries)[sample]
    low = 0 if left is None else np.maximum(position - left, 0)
    high = keys[sample] - 1
    if right is not None:
        high = np.minimum(high, position + right)
    return int(np.maximum(high - low + 1, 0).sum())


def load(path: Path | str = SHAPES) -> list[Row]:
    """All rows of a shapes file, in its order.

    Raises:
        ValueError: if a name occurs twice or a row has an unknown key.
    """
    rows = []
    known = {field.name for field in dataclasses.fields(Row)} - {"set"}
    for group, entries in yaml.safe_load(Path(path).read_text()).items():
        for entry in entries:
            if unknown := sorted(set(entry) - known):
                raise ValueError(f"{path}: row {entry.get('name')} has unknown keys {unknown}")
            window = entry.get("window")
            rows.append(
                Row(
                    **{
                        **entry,
                        "set": group,
                        "kv_heads": entry.get("kv_heads", entry["heads"]),
                        "window": tuple(window) if window else None,
                    }
                )
            )
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: row names occur twice: {twice}")
    return rows


def choose(rows: Sequence[Row], sets: Sequence[str], names: Sequence[str]) -> list[Row]:
    """The rows of the sets (all if none) whose names match one of the patterns (all if none).

    Raises:
        ValueError: if a set does not exist or a pattern matches no row.
    """
    known = list(dict.fromkeys(row.set for row in rows))
    if unknown := [name for name in sets if name not in known]:
        raise ValueError(f"--sets must be among {known}, but got {unknown}")
    for pattern in names:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"--rows {pattern!r} matches no row of the shapes file")
    return [
        row
        for row in rows
        if (not sets or row.set in sets)
        and (not names or any(fnmatch.fnmatchcase(row.name, p) for p in names))
    ]

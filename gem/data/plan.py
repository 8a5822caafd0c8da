"""The order of an epoch: which rows make which batch, known before anything is read."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EpochPlan:
    """An epoch as chunks of rows that are read together.

    Chunks follow one another; position p of the epoch lies in the chunk with
    `starts[c] <= p < starts[c + 1]`. Every rank and worker computes the same plan.

    Attributes:
        chunks: segment indices of each chunk.
        starts: [chunks + 1] int64, the position of each chunk's first row.
        seed: (seed, epoch) of the order within a chunk, or None to keep the files' order.
    """

    chunks: list[np.ndarray]
    starts: np.ndarray
    seed: tuple[int, int] | None

    def order(self, chunk: int) -> np.ndarray:
        """[rows] int64: which row of the chunk, counted as read, comes at each position."""
        rows = int(self.starts[chunk + 1] - self.starts[chunk])
        if self.seed is None:
            return np.arange(rows)
        return np.random.default_rng([*self.seed, 1, chunk]).permutation(rows)

    def chunk_at(self, position: int) -> int:
        """The chunk that holds a position."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1


def plan_epoch(
    counts: np.ndarray, groups: np.ndarray, limit: int, seed: int, epoch: int, shuffle: bool
) -> EpochPlan:
    """Plans an epoch over the rows of one split.

    Shuffled, row groups come in random order and fill chunks of at most `limit` rows, whose rows
    are mixed. In order, every segment is a chunk, so that the first batch needs little reading.

    Args:
        counts: [segments] int64, rows of the split in each segment; none is above `limit`.
        groups: [segments] int64, ascending: the row group of each segment. Segments of a row group
            stay together and in order, since parquet reads a row group from its start.
        limit: rows that a chunk may hold.
    """
    used = np.flatnonzero(counts)
    if not shuffle:
        starts = np.concatenate([[0], np.cumsum(counts[used])])
        return EpochPlan([used[i : i + 1] for i in range(len(used))], starts, None)
    _, group = np.unique(groups[used], return_inverse=True)
    rank = np.random.default_rng([seed, epoch, 0]).permutation(int(group.max(initial=-1)) + 1)
    used = used[np.argsort(rank[group], kind="stable")]
    chunks, starts, first, rows = [], [0], 0, 0
    for i, count in enumerate(counts[used]):
        if rows + count > limit and i > first:
            chunks.append(used[first:i])
            starts.append(starts[-1] + rows)
            first, rows = i, 0
        rows += int(count)
    if len(used):
        chunks.append(used[first:])
        starts.append(starts[-1] + rows)
    return EpochPlan(chunks, np.array(starts, dtype=np.int64), (seed, epoch))


def rank_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The positions [start, stop) of a rank: contiguous, sizes differ by at most one row."""
    return rows * rank // world_size, rows * (rank + 1) // world_size


def steps_per_epoch(rows: int, world_size: int, batch_size: int, drop_last: bool) -> int:
    """Batches of every rank, from the smallest share (`drop_last`) or the largest."""
    if drop_last:
        return rows // world_size // batch_size
    largest_share = -(-rows // world_size)
    return -(-largest_share // batch_size)

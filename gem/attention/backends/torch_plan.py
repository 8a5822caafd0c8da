"""How the torch backend cuts a batch into dense tiles: pure functions of host lengths.

A tile is a run of query rows of one sample and the run of keys that they see, both padded to a
size that depends on that sample alone, so that a sample's result never depends, bit for bit, on
its neighbours in the batch. Tiles of one size form a group and are worked on together:

- whole: all queries and all keys of short samples, one tile each;
- strip: some queries of one long sample and every key that they see, one tile at a time;
- band: blocks of `block` queries of self-attention with a narrow window, each with its own block
  of keys and the neighbours that the window reaches.

Row indices are clamped to the tile's own sample: padding reads real rows of the same sample, which
the mask then hides, never a neighbour's.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gem.attention import schedule

WHOLE_LIMIT = 256 * 256  # pairs: above, a sample is cut into strips
STRIP_PAIRS = 128 * 1024  # pairs of a strip, as long as it has few enough keys
STRIP_LIMIT = 4 * 1024 * 1024  # pairs of a strip, however many keys it has (but at least one row)
BAND_REACH = 512  # left + right: above, the neighbours of a block are no longer few


@dataclasses.dataclass(frozen=True)
class Group:
    """n tiles of mq query rows by mk key rows.

    Rows are given as `row * heads`, the place of the row's first head in a tensor `[rows, heads,
    dim]` whose first two dimensions are merged.

    Attributes:
        kind: "whole", "strip" or "band".
        q_rows: int64 `[n, mq]`, rows to read from q.
        o_rows: int64 `[n, mq]`, rows to read from the output's side; q_rows unless q is shared.
        o_write: int64 `[n, mq]`, o_rows, but padding points one past the last row.
        k_rows: int64 `[n, mk]`, rows to read from k and v.
        k_write: int64 `[n, mk]`, k_rows, but padding points one past the last row. For bands
            `[n, block]`: the rows of each tile's own block.
        masks: (first column, float32 `[mq, width]`) where the window hides pairs: 0 or -inf.
        shift: int64 `[n]` if tiles differ in it: query i stands at key i + shift. Then masks are
            empty and made from `left` and `right` for each chunk of tiles.
        key_bias: float32 `[n, mk]`, -inf where a key is padding that the window does not hide;
            None where there is none.
        block: query rows of a band's tile.
        before: blocks of a band that lie before a tile's own block.
        edges: bands only: for each of a tile's blocks, the tiles (ascending) for which that block
            lies outside of their sample.
    """

    kind: str
    q_rows: Tensor
    o_rows: Tensor
    o_write: Tensor
    k_rows: Tensor
    k_write: Tensor
    masks: tuple[tuple[int, Tensor], ...] = ()
    shift: Tensor | None = None
    left: int | None = None
    right: int | None = None
    key_bias: Tensor | None = None
    block: int = 0
    before: int = 0
    edges: tuple[list[int], ...] = ()

    @property
    def size(self) -> tuple[int, int, int]:
        """(n, mq, mk)."""
        return *self.q_rows.shape, self.k_rows.shape[1]

    def to(self, device: torch.device) -> Group:
        """The group with its tensors on `device`."""
        moved = {"masks": tuple((c, m.to(device, non_blocking=True)) for c, m in self.masks)}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
        return dataclasses.replace(self, **moved)

    def chunk_masks(self, a: int, b: int) -> tuple[tuple[int, Tensor], ...]:
        """masks of the tiles a .. b, each `[mq, width]` or `[b - a, mq, width]`."""
        if self.shift is None:
            return self.masks
        _, mq, mk = self.size
        mask = window_mask(mq, mk, self.shift[a:b, None, None], self.left, self.right)
        return ((0, mask),)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All tiles of a batch.

    Attributes:
        groups: the tiles.
        covers_queries, covers_keys: whether every row of the output, or of k's gradient, is
            written exactly once, so that it need not be zeroed before.
    """

    groups: list[Group]
    covers_queries: bool
    covers_keys: bool


def padded_size(lengths: Tensor) -> Tensor:
    """Lengths rounded up to 8, 16, 32, 64, 96, 128, 192, 256, 384, ...

    Few sizes make few groups: a group costs some hundred microseconds however small it is.
    """
    octave = (lengths.clamp(min=5) - 1).double().log2().floor().to(torch.int64)
    step = torch.where(octave < 6, 2 << octave, 1 << (octave - 1).clamp(min=0))
    return (lengths + step - 1) // step * step


def window_mask(
    queries: int, keys: int, shift: Tensor | int, left: int | None, right: int | None
) -> Tensor:
    """0 where key j is seen by query i, that is -left <= j - i - shift <= right, else -inf.

    float32 `[queries, keys]`, or `[n, queries, keys]` for shifts `[n, 1, 1]`.
    """
    device = shift.device if isinstance(shift, Tensor) else None
    i = torch.arange(queries, device=device)[:, None]
    distance = torch.arange(keys, device=device) - i - shift
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)


def partial_masks(
    queries: int, keys: int, shift: int, left: int | None, right: int | None, made: dict
) -> tuple[tuple[int, Tensor], ...]:
    """The window's mask on those columns only that are hidden from some query.

    `made` keeps the masks, since most tiles share theirs.
    """
    first = 0 if left is None else min(max(shift + queries - 1 - left, 0), keys)
    last = keys if right is None else min(max(shift + right + 1, 0), keys)
    spans = [(0, keys)] if first > last else [(0, first), (last, keys)]
    masks = []
    for a, b in spans:
        if a < b:
            key = (queries, b - a, shift - a)
            if key not in made:
                made[key] = window_mask(*key, left, right)
            masks.append((a, made[key]))
    return tuple(masks)


def band_block(left: int, right: int, group: int) -> int:
    """Rows of a band's block for which a row's products cost least.

    Small blocks waste less of the window's neighbourhood, but their products run slower.
    """
    costs = {}
    for block, cost in ((16, 1.8), (32, 1.1), (64, 1.0), (128, 1.0)):
        span = block * (1 + -(-left // block) + -(-right // block))
        costs[block] = span * (cost if group == 1 else 1.0)
    return min(costs, key=costs.get)


@schedule.register("torch_tiles")
def tiles(
    k_lengths: Tensor,
    q_lengths: Tensor | int,
    left: int | None,
    right: int | None,
    heads: int,
    kv_heads: int,
    o_end: int,
    k_end: int,
    device: torch.device,
) -> Plan:
    """The tiles that together cover every visible pair of the batch.

    Args:
        k_lengths: int64 `[batch]`, keys per sample.
        q_lengths: int64 `[batch]`, queries per sample; an int for that many shared queries.
        left, right: the window.
        heads, kv_heads: of q, and of k and v.
        o_end, k_end: the row, one past the last, that padding is written to.
        device: where the indices go.
    """
    batch = _Batch(k_lengths, q_lengths, heads, kv_heads, o_end, k_end)
    alive = (batch.k > 0) & (batch.q > 0)
    mq = batch.q if batch.shared else padded_size(batch.q)
    mk = padded_size(batch.k)
    is_band = torch.zeros_like(alive)
    block = 0
    narrow = left is not None and right is not None and left + right <= BAND_REACH
    if narrow and not batch.shared and torch.equal(batch.k, batch.q):
        block = band_block(left, right, heads // kv_heads)
        span = block * (1 + -(-left // block) + -(-right // block))
        is_band = alive & ((batch.q + block - 1) // block * block * span < mq * mk)
    is_whole = alive & ~is_band & (mq * mk <= WHOLE_LIMIT)
    is_strip = alive & ~is_band & ~is_whole
    groups = []
    if is_band.any():
        groups.append(_band(batch, is_band.nonzero()[:, 0], left, right, block))
    if is_whole.any():
        groups += _whole(batch, is_whole.nonzero()[:, 0], mq, mk, left, right)
    made: dict[tuple, Tensor] = {}
    for i in is_strip.nonzero()[:, 0].tolist():
        groups += _strips(batch, i, left, right, made)
    # Strips add to the gradients of their keys, and queries that see nothing have no strip.
    tiled = not bool(is_strip.any())
    return Plan(
        [g.to(device) for g in groups],
        covers_queries=tiled and int(batch.q[alive].sum()) == o_end,
        covers_keys=tiled and int(batch.k[alive].sum()) == k_end,
    )


class _Batch:
    """Lengths and first rows of a batch. Shared queries are rows 0 .. q - 1 for every sample."""

    def __init__(
        self,
        k_lengths: Tensor,
        q_lengths: Tensor | int,
        heads: int,
        kv_heads: int,
        o_end: int,
        k_end: int,
    ) -> None:
        self.k, self.k_end, self.o_end = k_lengths, k_end, o_end
        self.heads, self.kv_heads = heads, kv_heads
        self.k_start = k_lengths.cumsum(0) - k_lengths
        self.shared = isinstance(q_lengths, int)
        if self.shared:
            self.q = torch.full_like(k_lengths, q_lengths)
            self.o_start = torch.arange(k_lengths.shape[0]) * q_lengths
        else:
            self.q = q_lengths
            self.o_start = q_lengths.cumsum(0) - q_lengths

    def group(self, kind: str, sample: Tensor, q_local: Tensor, k_local: Tensor, **rest) -> Group:
        """A group from the places `[n, mq]` and `[n, mk]` of its rows within their samples."""
        o_rows, o_write = _rows(self.o_start[sample], self.q[sample], q_local, self.o_end)
        k_rows, k_write = _rows(self.k_start[sample], self.k[sample], k_local, self.k_end)
        hidden = k_write == self.k_end
        # Causal: a key past the end lies to the right of every real query.
        if (self.shared or rest.get("right") != 0 or kind == "band") and hidden.any():
            rest["key_bias"] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        if kind == "band":
            _, k_write = _rows(self.k_start[sample], self.k[sample], q_local, self.k_end)
        o_rows, o_write = o_rows * self.heads, o_write * self.heads
        q_rows = q_local * self.heads if self.shared else o_rows
        k_rows, k_write = k_rows * self.kv_heads, k_write * self.kv_heads
        return Group(kind, q_rows, o_rows, o_write, k_rows, k_write, **rest)


def _rows(start: Tensor, length: Tensor, local: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Rows at places `local` `[n, m]` of samples: clamped to the sample, and with `end` outside."""
    inside = (local >= 0) & (local < length[:, None])
    clamped = torch.minimum(local.clamp(min=0), length[:, None] - 1) + start[:, None]
    return clamped, torch.where(inside, clamped, end)


def _whole(
    batch: _Batch, samples: Tensor, mq: Tensor, mk: Tensor, left: int | None, right: int | None
) -> list[Group]:
    """One tile per sample, grouped by padded size."""
    groups = []
    sizes = torch.stack([mq[samples], mk[samples]], dim=1)
    unique, inverse = torch.unique(sizes, dim=0, return_inverse=True)
    for index, (rows, keys) in enumerate(unique.tolist()):
        sample = samples[inverse == index]
        shift = batch.k[sample] - batch.q[sample]
        rest = {"left": left, "right": right}
        if not batch.shared and (left is not None or right is not None):
            if bool((shift == shift[0]).all()):
                rest["masks"] = ((0, window_mask(rows, keys, int(shift[0]), left, right)),)
            else:
                rest["shift"] = shift
        q_local = torch.arange(rows).expand(len(sample), rows)
        k_local = torch.arange(keys).expand(len(sample), keys)
        groups.append(batch.group("whole", sample, q_local, k_local, **rest))
    return groups


def _strips(
    batch: _Batch, i: int, left: int | None, right: int | None, made: dict[tuple, Tensor]
) -> list[Group]:
    """Runs of queries of sample i, each with the keys between its first and its last."""
    queries, keys = int(batch.q[i]), int(batch.k[i])
    shift = keys - queries
    bounded = left is not None and right is not None
    reach = min(keys, left + right + 256) if bounded else keys
    rows = max(1, min(256, max(STRIP_PAIRS // reach, min(32, STRIP_LIMIT // reach))))
    sample = torch.tensor([i])
    groups = []
    for first in range(0, queries, rows):
        count = min(rows, queries - first)
        lo = 0 if left is None else max(0, first + shift - left)
        hi = keys if right is None else min(keys, first + count + shift + right)
        if lo >= hi:
            continue  # these queries see nothing
        q_local = torch.arange(first, first + count)[None]
        k_local = torch.arange(lo, hi)[None]
        masks = partial_masks(count, hi - lo, first + shift - lo, left, right, made)
        groups.append(batch.group("strip", sample, q_local, k_local, masks=masks))
    return groups


def _band(batch: _Batch, samples: Tensor, left: int, right: int, block: int) -> Group:
    """Every block of the given samples, with its neighbours."""
    before, after = -(-left // block), -(-right // block)
    blocks = (batch.q[samples] + block - 1) // block
    first = torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    sample = torch.repeat_interleave(samples, blocks)
    index = torch.arange(sample.shape[0]) - first
    span = (before + 1 + after) * block
    neighbours = index[:, None] + torch.arange(-before, after + 1)
    outside = (neighbours < 0) | (neighbours >= torch.repeat_interleave(blocks, blocks)[:, None])
    q_local = index[:, None] * block + torch.arange(block)
    k_local = (index[:, None] - before) * block + torch.arange(span)
    return batch.group(
        "band",
        sample,
        q_local,
        k_local,
        masks=((0, window_mask(block, span, before * block, left, right)),),
        left=left,
        right=right,
        block=block,
        before=before,
        edges=tuple(column.nonzero()[:, 0].tolist() for column in outside.unbind(1)),
    )

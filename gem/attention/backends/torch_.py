"""Attention on plain PyTorch operators, for every device, dtype and option.

The batch is cut into dense tiles (`torch_plan`), padded only inside a chunk of a few megabytes, so
that the work is batched matrix products of well-filled matrices. The backward recomputes the
probabilities from the log-sum-exp; autograd records nothing. Products and sums are float32
(float64 for float64), for half precision too; only inputs and results are rounded.

Exponentials are base 2: exp2 is the fastest of PyTorch's on a CPU, and has no slow path at -inf.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from gem.attention import schedule
from gem.attention.backends import Call
from gem.attention.backends.torch_plan import Group, Plan

LOG2_E = math.log2(math.e)
CHUNK = 1 << 19  # scores (or numbers of keys) worked on at a time: 2 MiB, which caches hold
KEY_PART = 256  # keys that shared queries' gradient is summed over at a time
KEEP = 2 * CHUNK  # numbers of a piece of scratch memory that outlives its call

Chunk = tuple[int, int, int, int]  # first and last key head, first and last tile


def unsupported(call: Call) -> str | None:
    """None: it serves every call."""
    return None


class _Workspace(threading.local):
    """Scratch memory that a thread keeps between calls, a few times CHUNK numbers at most.

    On a CPU, memory fresh from the system costs more at its first touch than what is computed in
    it. Accelerators have caching allocators, and their streams must not share scratch memory.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}


_workspace = _Workspace()


def plan_of(call: Call, q: Tensor, k: Tensor) -> Plan:
    """The tiles of a call, made from its lengths the first time and kept with them."""
    shared = call.form == "broadcast"
    return schedule.schedule(
        "torch_tiles",
        call.k_lengths,
        q.shape[0] if shared else call.q_lengths,
        call.left,
        call.right,
        call.heads,
        call.kv_heads,
        call.k_lengths.shape[0] * q.shape[0] if shared else q.shape[0],
        k.shape[0],
        q.device,
    )


class _Work:
    """What a call needs at every chunk: sizes, tiles, scratch memory.

    The matrices of a chunk are ordered by tile, then by key head; the rows of each are the query
    heads of its key head, one after the other.
    """

    def __init__(self, call: Call, q: Tensor, k: Tensor) -> None:
        self.call = call
        self.dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
        self.group = call.heads // call.kv_heads
        self.shared = call.form == "broadcast"
        self.o_rows = call.k_lengths.shape[0] * q.shape[0] if self.shared else q.shape[0]
        self.plan = plan_of(call, q, k)
        self.heads = torch.arange(call.heads, device=q.device).view(1, -1, self.group, 1)
        self.scratch = _workspace.kept if q.device.type == "cpu" else {}

    def result(self, rows: int, heads: int, covered: bool) -> Tensor:
        """`[rows + 1, heads, dim]`: a result, and a last row that padding is written to."""
        make = torch.empty if covered else torch.zeros
        shape = (rows + 1, heads, self.call.head_dim)
        return make(shape, dtype=self.dtype, device=self.call.device)

    def memory(self, name: str, *shape: int) -> Tensor:
        """Unwritten scratch memory of this shape, reused from chunk to chunk."""
        size = math.prod(shape)
        memory = self.scratch.get((name, self.dtype))
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # it may serve a training step next
                memory = torch.empty(size, dtype=self.dtype, device=self.call.device)
            if size <= KEEP:
                self.scratch[name, self.dtype] = memory
        return memory[:size].view(shape)

    def chunks(self, tiles: Group) -> Iterator[Chunk]:
        """Cuts a group into chunks: tiles first, heads only where one tile is large."""
        n, mq, mk = tiles.size
        numbers = max(self.group * mq, self.call.head_dim) * mk  # of scores, of keys
        heads = max(1, min(self.call.kv_heads, CHUNK // numbers))
        step = max(1, CHUNK // (numbers * heads)) if heads == self.call.kv_heads else 1
        for h in range(0, self.call.kv_heads, heads):
            for a in range(0, n, step):
                yield h, min(h + heads, self.call.kv_heads), a, min(a + step, n)

    def q_index(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """Flat indices of rows `[n, mq]` of a chunk, for a tensor with q's heads."""
        h0, h1, a, b = chunk
        return (rows[a:b, None, None] + self.heads[:, h0:h1]).flatten()

    def k_index(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """Flat indices of rows `[n, mk]` of a chunk, for a tensor with k's heads."""
        h0, h1, a, b = chunk
        heads = self.heads.view(-1)[h0:h1, None]
        return (rows[a:b, None] + heads).flatten()

    def take(self, name: str, x: Tensor, index: Tensor, m: int) -> Tensor:
        """The rows of x `[rows, heads, dim]` at `index`, as `[matrices, m, dim]`."""
        flat = x.flatten(0, 1)
        rows = self.memory(name, index.shape[0], x.shape[-1])
        if x.dtype == self.dtype:
            torch.index_select(flat, 0, index, out=rows)
        else:
            rows.copy_(flat.index_select(0, index))
        return rows.view(-1, m, x.shape[-1])


def _scores(work: _Work, tiles: Group, chunk: Chunk, q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores of a chunk `[matrices, group * mq, mk]`, -inf where a pair is masked."""
    h0, h1, a, b = chunk
    _, mq, mk = tiles.size
    s = work.memory("p", q.shape[0], q.shape[1], mk)
    tiled = s.view(b - a, h1 - h0, work.group, mq, mk)
    masks = list(tiles.chunk_masks(a, b))
    terms = []
    if len(masks) == 1 and masks[0][1].shape[-1] == mk:
        mask = masks.pop()[1]
        terms.append(mask[:, None, None] if mask.dim() == 3 else mask)
    if tiles.key_bias is not None:
        terms.append(tiles.key_bias[a:b, None, None, None])
    if len(terms) == 2:
        torch.add(terms[0].expand_as(tiled), terms[1], out=tiled)
    elif terms:
        tiled.copy_(terms[0])
    s.baddbmm_(q, k.transpose(1, 2), beta=int(bool(terms)), alpha=work.call.scale)
    for column, mask in masks:
        tiled[..., column : column + mask.shape[-1]].add_(mask)
    return s


def _exponentials(s: Tensor, top: Tensor) -> Tensor:
    """exp(s - top) in place, as exp2(log2(e) s - log2(e) top) with one rounding of the difference.

    Rounding log2(e) top changes a row by a common factor only. To scale q or the products by
    log2(e) instead would round every score, which large scores would feel.
    """
    return torch.add(top * -LOG2_E, s, alpha=LOG2_E, out=s).exp2_()


def _inverse(total: Tensor) -> Tensor:
    """1 / total, and 0 where the total is 0: where a query sees nothing."""
    return total.reciprocal().masked_fill_(total == 0, 0.0)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    work = _Work(call, q, k)
    out = work.result(work.o_rows, call.heads, work.plan.covers_queries)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=work.dtype, device=q.device)
    for tiles in work.plan.groups:
        for chunk in work.chunks(tiles):
            _forward_chunk(work, tiles, chunk, (q, k, v), out.flatten(0, 1), lse.flatten())
    out, lse = out[:-1].to(call.dtype), lse[:-1]
    if work.shared:
        shape = (call.k_lengths.shape[0], q.shape[0], call.heads)
        out, lse = out.view(*shape, call.head_dim), lse.view(shape)
    return out, lse


def _forward_chunk(
    work: _Work,
    tiles: Group,
    chunk: Chunk,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
) -> None:
    _, mq, mk = tiles.size
    m = work.group * mq
    q, k, v = qkv
    k_index = work.k_index(tiles.k_rows, chunk)
    q_t = work.take("q", q, work.q_index(tiles.q_rows, chunk), m)
    k_t, v_t = work.take("k", k, k_index, mk), work.take("v", v, k_index, mk)
    s = _scores(work, tiles, chunk, q_t, k_t)
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    total = _exponentials(s, top).sum(-1, keepdim=True)
    o = torch.bmm(s, v_t, out=work.memory("o", *q_t.shape))
    o.mul_(_inverse(total))
    write = work.q_index(tiles.o_write, chunk)
    out.index_copy_(0, write, o.flatten(0, 1))
    lse.index_copy_(0, write, total.log_().add_(top).flatten())


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see `gem.attention.backends`."""
    grads = _Backward(call, dout, dlse, q, k, v, lse)
    for tiles in grads.work.plan.groups:
        grads.add(tiles)
    dq = grads.dq if grads.work.shared else grads.dq[:-1]
    return dq.to(call.dtype), grads.dk[:-1].to(call.dtype), grads.dv[:-1].to(call.dtype)


class _Backward:
    """The gradients of one call while its tiles are walked."""

    def __init__(
        self,
        call: Call,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
    ) -> None:
        self.call = call
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.work = work = _Work(call, q, k)
        self.dout = dout.contiguous().view(work.o_rows, call.heads, call.head_dim)
        # Where a query sees nothing, and in padding, exp(score - inf) makes a probability of 0.
        lse = lse.reshape(work.o_rows, call.heads)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        pad = lse.new_full((1, call.heads), torch.inf)
        self.lse = torch.cat([lse, pad]).flatten()
        self.dlse = None
        if dlse is not None:
            dlse = dlse.reshape(work.o_rows, call.heads).to(work.dtype)
            self.dlse = torch.cat([dlse, torch.zeros_like(pad)]).flatten()
        if work.shared:
            self.dq = torch.zeros_like(q, dtype=work.dtype, memory_format=torch.contiguous_format)
        else:
            self.dq = work.result(q.shape[0], call.heads, work.plan.covers_queries)
        self.dk = work.result(k.shape[0], call.kv_heads, work.plan.covers_keys)
        self.dv = work.result(k.shape[0], call.kv_heads, work.plan.covers_keys)

    def add(self, tiles: Group) -> None:
        """Adds the gradients of a group of tiles."""
        band = tiles.kind == "band"
        for chunk in self.work.chunks(tiles):
            q_t, do_t, p, ds = self._chunk(tiles, chunk)
            for name, grad, left, right, alpha in (
                ("dk", self.dk, ds, q_t, self.call.scale),
                ("dv", self.dv, p, do_t, 1.0),
            ):
                add = self._add_band if band else self._add_tiles
                add(tiles, chunk, name, grad.flatten(0, 1), left, right, alpha)

    def _chunk(self, tiles: Group, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Writes dq of a chunk; returns its q, dout, probabilities and their gradients."""
        work, scale = self.work, self.call.scale
        h0, h1, a, b = chunk
        _, mq, mk = tiles.size
        m = work.group * mq
        write = work.q_index(tiles.o_write, chunk)
        q_t = work.take("q", self.q, work.q_index(tiles.q_rows, chunk), m)
        do_t = work.take("dout", self.dout, work.q_index(tiles.o_rows, chunk), m)
        k_index = work.k_index(tiles.k_rows, chunk)
        k_t, v_t = work.take("k", self.k, k_index, mk), work.take("v", self.v, k_index, mk)

        lse = self.lse.index_select(0, write).view(-1, m, 1)
        p = _exponentials(_scores(work, tiles, chunk, q_t, k_t), lse)
        # At large scores the rounding of the log-sum-exp is felt: rows must sum to 1 again.
        p.mul_(_inverse(p.sum(-1, keepdim=True)))
        ds = work.memory("ds", q_t.shape[0], m, mk)
        torch.bmm(do_t, v_t.transpose(1, 2), out=ds)
        # ds = p * (dp - sum(p * dp)), in one pass
        torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)
        if self.dlse is not None:
            ds.addcmul_(p, self.dlse.index_select(0, write).view(-1, m, 1))

        if work.shared:
            dq = self._shared_dq(ds, k_t).view(b - a, -1, q_t.shape[-1]).sum(0)
            first = work.q_index(tiles.q_rows, (h0, h1, a, a + 1))
            self.dq.flatten(0, 1).index_add_(0, first, dq, alpha=scale)
        else:
            dq = work.memory("o", *q_t.shape).baddbmm_(ds, k_t, beta=0, alpha=scale)
            self.dq.flatten(0, 1).index_copy_(0, write, dq.flatten(0, 1))
        return q_t, do_t, p, ds

    def _shared_dq(self, ds: Tensor, k: Tensor) -> Tensor:
        """`ds k` `[matrices, m, dim]`, summed over KEY_PART keys at a time.

        A product of few rows adds its keys one after the other. Its rounding is most of what dq of
        few shared queries is off by; in parts it is a third of that for 2048 keys.
        """
        matrices, m, mk = ds.shape
        dim = k.shape[-1]
        if mk <= KEY_PART or mk % KEY_PART:
            return torch.bmm(ds, k, out=self.work.memory("o", matrices, m, dim))
        count = mk // KEY_PART
        cut = self.work.memory("cut", matrices, count, m, KEY_PART)
        cut.copy_(ds.view(matrices, m, count, KEY_PART).transpose(1, 2))
        parts = self.work.memory("part", matrices * count, m, dim)
        torch.bmm(cut.view(-1, m, KEY_PART), k.view(-1, KEY_PART, dim), out=parts)
        return parts.view(matrices, count, m, dim).sum(1)

    def _add_tiles(
        self,
        tiles: Group,
        chunk: Chunk,
        name: str,
        grad: Tensor,
        left: Tensor,
        right: Tensor,
        alpha: float,
    ) -> None:
        """Writes alpha `left^T right` of each tile to the rows of its keys, or adds it there."""
        write = self.work.k_index(tiles.k_write, chunk)
        shape = (left.shape[0], left.shape[2], right.shape[2])
        if tiles.kind == "strip":  # strips of one sample share its keys
            part = grad.index_select(0, write).view(shape)
        else:
            part = self.work.memory("part", *shape)
        part.baddbmm_(left.transpose(1, 2), right, beta=int(tiles.kind == "strip"), alpha=alpha)
        grad.index_copy_(0, write, part.flatten(0, 1))

    def _add_band(
        self,
        tiles: Group,
        chunk: Chunk,
        name: str,
        grad: Tensor,
        left: Tensor,
        right: Tensor,
        alpha: float,
    ) -> None:
        """Sums alpha `left^T right` over the tiles that see a block; writes blocks when complete.

        Tile t sees the blocks t - before .. t + after. `sums` holds the blocks of this chunk from
        a - before on, the first few of them as the chunk before left them.
        """
        work = self.work
        h0, h1, a, b = chunk
        heads, count, span = h1 - h0, b - a, len(tiles.edges)
        block, dim = tiles.block, right.shape[-1]
        part = work.memory("part", left.shape[0], left.shape[2], dim)
        part.baddbmm_(left.transpose(1, 2), right, beta=0, alpha=alpha)
        part = part.view(count, heads, span, block, dim)
        sums = work.memory(f"sums of {name}", count + span - 1, heads, block, dim)
        if a == 0:
            sums[: span - 1].zero_()
        for j in reversed(range(span)):
            self._clear(part[:, :, j], tiles.edges[j], a, b)
            target = sums[j : j + count]
            target.copy_(part[:, :, j]) if j == span - 1 else target.add_(part[:, :, j])
        first = a - tiles.before
        last = b - tiles.before if b < tiles.size[0] else b
        skip = max(0, -first)
        if first + skip < last:
            index = work.k_index(tiles.k_write, (h0, h1, first + skip, last))
            grad.index_copy_(0, index, sums[skip : last - first].reshape(-1, dim))
        sums[: span - 1] = sums[count : count + span - 1].clone()

    @staticmethod
    def _clear(part: Tensor, edge: list[int], a: int, b: int) -> None:
        """Zeroes what the tiles `edge` add to a block of a neighbouring sample.

        It is 0 already, unless the tile's own sample holds a NaN, which must not spread.
        """
        lo, hi = bisect.bisect_left(edge, a), bisect.bisect_left(edge, b)
        if lo < hi:
            local = torch.tensor([t - a for t in edge[lo:hi]])
            part.index_fill_(0, local.to(part.device, non_blocking=True), 0.0)

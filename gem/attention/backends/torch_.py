"""Attention on plain PyTorch operators, for every device, dtype and option.

The batch is cut into dense tiles (`torch_plan`), padded only inside a chunk of a few megabytes, so
that the work is batched matrix products of well-filled matrices. The backward recomputes the
probabilities from the log-sum-exp; autograd records nothing. Products and sums are float32
(float64 for float64), for half precision too; only inputs and results are rounded.

Exponentials are base 2: exp2 is the fastest of PyTorch's on a CPU, and has no slow path at -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem.attention import schedule
from gem.attention.backends import Call
from gem.attention.backends.torch_plan import Group

LOG2_E = math.log2(math.e)
CHUNK = 1 << 19  # scores that are worked on at a time: 2 MiB, which caches hold


def unsupported(call: Call) -> str | None:
    """None: it serves every call."""
    return None


class _Work:
    """What a call needs at every chunk: sizes, tiles, scratch memory."""

    def __init__(self, call: Call, q: Tensor, k: Tensor) -> None:
        self.call = call
        self.dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
        self.group = call.heads // call.kv_heads
        self.shared = call.form == "broadcast"
        batch = call.k_lengths.shape[0]
        self.o_rows = batch * q.shape[0] if self.shared else q.shape[0]
        self.tiles: list[Group] = schedule.schedule(
            "torch_tiles",
            call.k_lengths,
            q.shape[0] if self.shared else call.q_lengths,
            call.left,
            call.right,
            self.group,
            self.o_rows,
            k.shape[0],
            q.device,
        )
        self.scratch: dict[str, Tensor] = {}

    def zeros(self, rows: int, heads: int) -> Tensor:
        """`[rows + 1, heads, dim]`: a result, and a last row that padding is written to."""
        return torch.zeros(
            rows + 1, heads, self.call.head_dim, dtype=self.dtype, device=self.call.device
        )

    def scores(self, name: str, *shape: int) -> Tensor:
        """Unwritten scratch memory of this shape, reused from chunk to chunk."""
        size = math.prod(shape)
        memory = self.scratch.get(name)
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=self.dtype, device=self.call.device)
            self.scratch[name] = memory
        return memory[:size].view(shape)

    def chunks(self, tiles: Group):
        """(first head, last head, first tile, last tile) of each chunk, in key heads."""
        n, mq, mk = tiles.size
        pairs = self.group * mq * mk
        heads = max(1, min(self.call.kv_heads, CHUNK // pairs))
        step = max(1, CHUNK // (pairs * heads))
        for h in range(0, self.call.kv_heads, heads):
            for a in range(0, n, step):
                yield h, min(h + heads, self.call.kv_heads), a, min(a + step, n)

    def index(self, rows: Tensor, h0: int, h1: int, group: int) -> Tensor:
        """Flat indices of rows `[n, m]` for the key heads h0 .. h1 with `group` heads each.

        For a tensor `[rows, heads, ...]` whose first two dimensions are merged: int64
        `[(h1 - h0) * n * group * m]`, in the order head, tile, head of the group, row.
        """
        heads = torch.arange(h0 * group, h1 * group, device=rows.device)
        heads = heads.view(h1 - h0, 1, group, 1)
        return (rows[None, :, None, :] * (self.call.kv_heads * group) + heads).flatten()

    def take(self, x: Tensor, index: Tensor, m: int) -> Tensor:
        """The rows of x `[rows, heads, dim]` at `index`, as `[matrices, m, dim]`."""
        rows = x.flatten(0, 1).index_select(0, index)
        return rows.view(-1, m, x.shape[-1]).to(self.dtype)


def _fill_scores(tiles: Group, s: Tensor, a: int, b: int, lse: Tensor | None) -> bool:
    """Writes what the scores are added to: the masks, and minus the log-sum-exp.

    s: `[heads, tiles, group, mq, mk]`; lse: `[heads, tiles, group, mq, 1]` or None. Returns
    whether there was anything to write; if not, s is left as it is.
    """
    masks = [(column, m[:, None] if m.dim() == 3 else m) for column, m in tiles.chunk_masks(a, b)]
    terms = []
    if len(masks) == 1 and masks[0][1].shape[-1] == s.shape[-1]:
        terms.append(masks.pop()[1])
    if tiles.key_bias is not None:
        terms.append(tiles.key_bias[a:b, None, None, :])
    if lse is not None:
        terms.append(-lse)
    if len(terms) > 1:
        torch.add(terms[0].expand_as(s), terms[1], out=s)
    elif terms:
        s.copy_(terms[0])
    elif masks:
        s.zero_()
    for term in terms[2:]:
        s.add_(term)
    for column, mask in masks:
        s[..., column : column + mask.shape[-1]].add_(mask)
    return bool(terms or masks)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    work = _Work(call, q, k)
    out = work.zeros(work.o_rows, call.heads)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=work.dtype, device=q.device)
    for tiles in work.tiles:
        for chunk in work.chunks(tiles):
            _forward_chunk(work, tiles, chunk, q, k, v, out.flatten(0, 1), lse.flatten())
    out, lse = out[:-1].to(call.dtype), lse[:-1]
    if work.shared:
        shape = (call.k_lengths.shape[0], q.shape[0], call.heads)
        out, lse = out.view(*shape, call.head_dim), lse.view(shape)
    return out, lse


def _forward_chunk(
    work: _Work,
    tiles: Group,
    chunk: tuple[int, int, int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    h0, h1, a, b = chunk
    _, mq, mk = tiles.size
    m = work.group * mq
    q_t = work.take(q, work.index(tiles.q_rows[a:b], h0, h1, work.group), m)
    k_index = work.index(tiles.k_rows[a:b], h0, h1, 1)
    k_t, v_t = work.take(k, k_index, mk), work.take(v, k_index, mk)
    s = work.scores("p", q_t.shape[0], m, mk)
    masked = _fill_scores(tiles, s.view(h1 - h0, b - a, work.group, mq, mk), a, b, None)
    s.baddbmm_(q_t, k_t.transpose(1, 2), beta=int(masked), alpha=work.call.scale * LOG2_E)
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    total = s.sub_(top).exp2_().sum(-1, keepdim=True)
    o = torch.bmm(s, v_t).mul_(total.reciprocal().masked_fill_(total == 0, 0.0))
    write = work.index(tiles.o_write[a:b], h0, h1, work.group)
    out.index_copy_(0, write, o.flatten(0, 1))
    lse.index_copy_(0, write, total.log2_().add_(top).div_(LOG2_E).flatten())


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
    for tiles in grads.work.tiles:
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
        # Where a query sees nothing, and in padding, exp2(score - inf) makes a probability of 0.
        lse = lse.reshape(work.o_rows, call.heads)
        lse = (lse * LOG2_E).masked_fill_(lse == -torch.inf, torch.inf)
        pad = lse.new_full((1, call.heads), torch.inf)
        self.lse = torch.cat([lse, pad]).flatten()
        self.dlse = None
        if dlse is not None:
            dlse = dlse.reshape(work.o_rows, call.heads).to(work.dtype)
            self.dlse = torch.cat([dlse, torch.zeros_like(pad)]).flatten()
        self.dq = work.zeros(q.shape[0] - work.shared, call.heads)
        self.dk = work.zeros(k.shape[0], call.kv_heads)
        self.dv = work.zeros(k.shape[0], call.kv_heads)

    def add(self, tiles: Group) -> None:
        """Adds the gradients of a group of tiles."""
        if tiles.kind != "band":
            for chunk in self.work.chunks(tiles):
                self._chunk(tiles, chunk, None)
            return
        n, block = tiles.k_write.shape
        blocks = n + len(tiles.edges) - 1
        shape = (self.call.kv_heads, blocks * block, self.call.head_dim)
        sums = [torch.zeros(shape, dtype=self.work.dtype, device=self.q.device) for _ in range(2)]
        for chunk in self.work.chunks(tiles):
            self._chunk(tiles, chunk, sums)
        own = slice(tiles.before * block, (tiles.before + n) * block)
        for h in range(self.call.kv_heads):
            index = self.work.index(tiles.k_write, h, h + 1, 1)
            for grad, summed in zip((self.dk, self.dv), sums, strict=True):
                grad.flatten(0, 1).index_copy_(0, index, summed[h, own])

    def _chunk(
        self, tiles: Group, chunk: tuple[int, int, int, int], sums: list[Tensor] | None
    ) -> None:
        work, scale = self.work, self.call.scale
        h0, h1, a, b = chunk
        _, mq, mk = tiles.size
        m = work.group * mq
        tiled = (h1 - h0, b - a, work.group, mq)
        q_index = work.index(tiles.q_rows[a:b], h0, h1, work.group)
        o_index = work.index(tiles.o_rows[a:b], h0, h1, work.group)
        o_write = work.index(tiles.o_write[a:b], h0, h1, work.group)
        k_index = work.index(tiles.k_rows[a:b], h0, h1, 1)
        q_t, do_t = work.take(self.q, q_index, m), work.take(self.dout, o_index, m)
        k_t, v_t = work.take(self.k, k_index, mk), work.take(self.v, k_index, mk)

        p = work.scores("p", q_t.shape[0], m, mk)
        _fill_scores(tiles, p.view(*tiled, mk), a, b, self.lse[o_write].view(*tiled, 1))
        p.baddbmm_(q_t, k_t.transpose(1, 2), alpha=scale * LOG2_E).exp2_()
        ds = work.scores("ds", q_t.shape[0], m, mk)
        torch.bmm(do_t, v_t.transpose(1, 2), out=ds)
        # ds = p * (dp - sum(p * dp)), in one pass
        torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)
        if self.dlse is not None:
            ds.addcmul_(p, self.dlse[o_write].view(-1, m, 1))
        for j, edge in enumerate(tiles.edges):
            self._clear(edge, (a, b), p, ds, slice(j * tiles.block, (j + 1) * tiles.block))

        dq = work.scores("dq", *q_t.shape).baddbmm_(ds, k_t, beta=0, alpha=scale)
        if work.shared:
            summed = dq.view(h1 - h0, b - a, -1, dq.shape[-1]).sum(1)
            index = work.index(tiles.q_rows[a : a + 1], h0, h1, work.group)
            self.dq.flatten(0, 1).index_add_(0, index, summed.flatten(0, 1))
        else:
            self.dq.flatten(0, 1).index_copy_(0, o_write, dq.flatten(0, 1))
        if sums is not None:
            self._add_band(tiles, chunk, (ds, p), (q_t, do_t), sums)
            return
        write = work.index(tiles.k_write[a:b], h0, h1, 1)
        for grad, left, right, alpha in ((self.dk, ds, q_t, scale), (self.dv, p, do_t, 1.0)):
            grad = grad.flatten(0, 1)
            if tiles.kind == "strip":  # strips of one sample share its keys
                part = grad.index_select(0, write).view(k_t.shape)
            else:
                part = work.scores("dk", *k_t.shape)
            part.baddbmm_(left.transpose(1, 2), right, beta=int(tiles.kind == "strip"), alpha=alpha)
            grad.index_copy_(0, write, part.flatten(0, 1))

    def _clear(
        self, edge: Tensor, span: tuple[int, int], p: Tensor, ds: Tensor, columns: slice
    ) -> None:
        """Zeroes the columns of a band's blocks that lie in a neighbouring sample.

        They are 0 already, unless the tile's own sample has a NaN, which must not spread.
        """
        a, b = span
        lo, hi = torch.searchsorted(edge, torch.tensor(span)).tolist()
        if lo == hi:
            return
        local = (edge[lo:hi] - a).to(p.device, non_blocking=True)
        for x in (p, ds):
            x.view(-1, b - a, *x.shape[1:])[..., columns].index_fill_(1, local, 0.0)

    def _add_band(
        self,
        tiles: Group,
        chunk: tuple[int, int, int, int],
        lefts: tuple[Tensor, Tensor],
        rights: tuple[Tensor, Tensor],
        sums: list[Tensor],
    ) -> None:
        """Adds `left^T right` of every tile to the blocks of keys that it covers."""
        h0, h1, a, b = chunk
        block, dim = tiles.block, self.call.head_dim
        for summed, left, right, alpha in zip(
            sums, lefts, rights, (self.call.scale, 1.0), strict=True
        ):
            for h in range(h1 - h0):
                part = slice(h * (b - a), (h + 1) * (b - a))
                for j in range(len(tiles.edges)):
                    rows = summed[h0 + h, (a + j) * block : (b + j) * block].view(-1, block, dim)
                    columns = left[part, :, j * block : (j + 1) * block]
                    rows.baddbmm_(columns.transpose(1, 2), right[part], alpha=alpha)

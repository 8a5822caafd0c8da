"""The backward in TLX on Hopper GPUs: which kernel serves a call, its memory and its launches.

Broadcast attention with at most 64 queries has `tlx_hopper_shared_backward`, everything else
`tlx_hopper_backward`. The latter adds up dQ in an order that is not fixed; where the call asks for
the same bits on every run, dQ comes from the Triton backend's kernels, at the price of computing
scores twice.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention import schedule
from gem.attention.backends import Call, triton_
from gem.attention.backends.tlx_backward_sums import dq_kernel, statistics_kernel
from gem.attention.backends.tlx_common import block_columns, is_narrow, processors, ragged, readable
from gem.attention.backends.tlx_hopper_backward import hopper_backward_kernel
from gem.attention.backends.tlx_hopper_shared_backward import hopper_shared_backward_kernel
from gem.attention.backends.triton_backward import sum_kernel

BLOCK_K = 128


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
    if not q.shape[0] or not int(call.k_lengths.sum()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    work = _Backward(call, dout, dlse, q, k, v, out, lse)
    if work.shared:
        work.add_all_shared()
    elif call.deterministic:
        work.add_keys(with_dq=False)
        return triton_.dq(call, dout, dlse, q, k, v, out, lse), work.dk, work.dv
    else:
        work.add_keys(with_dq=True)
    return work.dq, work.dk, work.dv


class _Backward:
    """The memory of one backward and its launches."""

    def __init__(
        self,
        call: Call,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        self.call = call
        self.q, self.k, self.v = readable(q), readable(k), readable(v)
        self.dout = readable(dout.reshape(-1, call.heads, call.head_dim))
        self.broadcast = call.form == "broadcast"
        self.shared = self.broadcast and call.heads == call.kv_heads and q.shape[0] <= 64
        self.block_d = block_columns(call)
        self.block_q = 64 if self.shared else 8192 // self.block_d
        self.dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not self.broadcast:  # rows past the last sample
            self.dq[int(call.q_lengths.sum()) :] = 0
        self.dk, self.dv = triton_.key_results(call, k, v)
        queries = triton_.queries_of(call, q)
        self.tiles = tiles = schedule.schedule(
            "statistic_tiles", call.k_lengths, queries, self.block_q, q.device
        )
        self.stats = tiles.shape[0] * self.block_q
        size = call.heads, self.stats
        self.delta = torch.empty(size, dtype=torch.float32, device=q.device)
        self.lse2 = torch.empty_like(self.delta)
        triton_.run(
            statistics_kernel,
            (tiles.shape[0], call.heads),
            *(out.contiguous(), self.dout, lse.contiguous()),
            dlse if dlse is None else dlse.float().contiguous(),
            *(self.delta, self.lse2, tiles, self.stats, *self.dout.stride()[:2]),
            HEADS=call.heads,
            DIM=call.head_dim,
            BLOCK=self.block_q,
            BLOCK_D=self.block_d,
            HAS_DLSE=dlse is not None,
        )

    def _descriptors(self, k_rows: int, dv_columns: int) -> tuple:
        return (
            ragged(self.q, 64, self.block_d),
            ragged(self.k, k_rows, self.block_d),
            *(ragged(x, 64, self.block_d) for x in (self.v, self.dout, self.dk)),
            ragged(self.dv, 64, dv_columns),
        )

    def add_keys(self, with_dq: bool) -> None:
        """Writes dk and dv and, if asked for, dq."""
        call = self.call
        tiles: schedule.DealtTiles = schedule.schedule(
            "dealt_keys",
            call.k_lengths,
            triton_.queries_of(call, self.q),
            call.left,
            call.right,
            call.kv_heads,
            BLOCK_K,
            self.block_q,
            self.q.device,
            processors(self.q.device),
        )
        if tiles.empty.shape[0]:
            self.dk.zero_()
            self.dv.zero_()
        heads, block_d = call.heads, self.block_d
        rows = self.q.shape[0] if self.broadcast else self.stats
        q_tiles = triton.cdiv(rows, self.block_q) * (self.block_q // 64)
        size = max(1, q_tiles) if with_dq else 1, heads, 64 * block_d
        sums = torch.zeros(size, dtype=torch.float32, device=self.q.device)
        flat = sums.view(-1, 32)
        count = tiles.table.shape[0]
        triton_.run(
            hopper_backward_kernel,
            (min(count, processors(self.q.device)),),
            *self._descriptors(BLOCK_K, 64),
            TensorDescriptor(flat, list(flat.shape), [32, 1], [2 * block_d, 32]),
            *(self.lse2, self.delta, tiles.table, count, self.stats),
            *(call.scale * triton_.LOG2_E, call.scale, call.left or 0, call.right or 0),
            GROUP=heads // call.kv_heads,
            HEADS=heads,
            BROADCAST=self.broadcast,
            HAS_LEFT=call.left is not None,
            HAS_RIGHT=call.right is not None,
            NARROW=is_narrow(call.left, call.right, self.block_q),
            BLOCK_D=block_d,
            WITH_DQ=with_dq,
            num_warps=4,
            num_stages=1,
        )
        if with_dq and q_tiles:
            triton_.run(
                dq_kernel,
                (q_tiles, heads),
                *(sums, self.dq, self.tiles, self.q.shape[0], call.scale),
                HEADS=heads,
                DIM=call.head_dim,
                BROADCAST=self.broadcast,
                BLOCK=self.block_q,
                BLOCK_D=block_d,
                num_warps=8,
            )

    def add_all_shared(self) -> None:
        """Writes dq, dk and dv of broadcast attention with at most 64 queries."""
        call, queries = self.call, self.q.shape[0]
        workers = max(1, processors(self.q.device) // call.heads)
        segments = schedule.schedule("key_segments", call.k_lengths, workers, self.q.device)
        consumers = 2
        partial = torch.empty(
            (segments.workers * consumers, *self.q.shape), dtype=torch.float32, device=self.q.device
        )
        triton_.run(
            hopper_shared_backward_kernel,
            (segments.workers * call.heads,),
            *self._descriptors(64, self.block_d),
            ragged(partial.view(-1, *self.q.shape[1:]), 64, self.block_d),
            *(self.lse2, self.delta, segments.table, call.k_offsets),
            *(call.scale * triton_.LOG2_E, call.scale),
            *(queries, self.stats, segments.turns, segments.workers),
            HEADS=call.heads,
            BLOCK_D=self.block_d,
            CONSUMERS=consumers,
            STAGES=256 // self.block_d,
            num_warps=4,
            num_stages=1,
        )
        size = self.dq.numel()
        triton_.run(
            sum_kernel,
            (triton.cdiv(size, 256),),
            *(partial, self.dq, call.scale, partial.shape[0], size),
            BLOCK=256,
            num_warps=4,
        )

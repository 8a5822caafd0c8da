"""The backward in TLX on Hopper GPUs: which kernel serves a call, its memory and its launches.

Broadcast attention with at most 64 queries has `tlx_hopper_shared_backward` (unless heads are
grouped), everything else `tlx_hopper_backward`. The latter adds up dQ in an order that is not
fixed, but for whole samples (`Form.whole`); where the call asks for the same bits on every run and
not all are whole, or the sums would be mostly padding, dQ comes from the Triton backend's kernels,
at the price of computing scores twice.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention import dealing, schedule
from gem.attention.backends import Call, triton_
from gem.attention.backends.launching import run
from gem.attention.backends.tlx_backward_sums import dq_kernel, statistics_kernel
from gem.attention.backends.tlx_common import (
    LAUNCH_OPTIONS,
    block_columns,
    is_narrow,
    processors,
    ragged,
    readable,
)
from gem.attention.backends.tlx_hopper_backward import hopper_backward_kernel
from gem.attention.backends.tlx_hopper_shared_backward import (
    CONSUMERS,
    hopper_shared_backward_kernel,
)

BLOCK_K = 128
# The float32 sums of dQ have whole tiles of queries for every sample. Where that is more than so
# many times the queries that there are, dQ has a kernel of its own, without sums.
MOST_PADDING = 4
# Samples of so many keys (two tiles) may be one CTA's. Each CTA then reads queries of its own, and
# those of all should stay in the L2 cache from one tile of a sample to the next.
WHOLE_KEYS = 2 * BLOCK_K
# CTAs should have at least so many whole samples, or they end at different times. And these should
# have at least such a share of the queries, as the kernel that serves both kinds is itself slower.
LEAST_WHOLE = 4
LEAST_SHARE = 1 / 8


@dataclasses.dataclass(frozen=True)
class Form:
    """How the gradients are computed.

    Attributes:
        kept: what a CTA keeps while the rest streams by: "keys", or "queries" of broadcast
            attention without grouped heads, at most 64.
        split: with "keys", whether dQ has a kernel of its own. Nothing is then added to in global
            memory, so that every run has the same bits; with "queries" nothing is anyway.
        whole: with "keys" of jagged attention without a window, whether samples of at most
            WHOLE_KEYS keys are whole: one CTA has all of their keys, and its first tile writes the
            sums of dQ, so that nobody clears them and they come from the L2 cache, or, if it is the
            only one and heads are not grouped, dQ itself.
    """

    kept: str
    split: bool = False
    whole: bool = False


def form_of(call: Call, q: Tensor) -> Form:
    """The form that `backward` takes for a call."""
    if call.form == "broadcast":
        if keeps_queries(q.shape[0], call.heads, call.kv_heads):
            return Form("queries")
        return Form("keys", split=call.deterministic)
    return schedule.schedule(
        "backward_form",
        call.k_lengths,
        call.q_lengths,
        call.left is None and call.right is None,
        call.kv_heads,
        step_rows(block_columns(call)),
        call.deterministic,
        processors(q.device),
    )


@schedule.register("backward_form")
def jagged_form(
    k_lengths: Tensor,
    q_lengths: Tensor,
    all_seen: bool,
    kv_heads: int,
    block: int,
    deterministic: bool,
    ctas: int,
) -> Form:
    """The form for jagged attention.

    Args:
        all_seen: whether there is no window.
        block: queries of a step.
        ctas: as many as run at once.
    """
    rows = int(((q_lengths + block - 1) // block).sum()) * block
    if rows > MOST_PADDING * int(q_lengths.sum()):
        return Form("keys", split=True)
    if not all_seen:
        return Form("keys", split=deterministic)
    if deterministic:
        seen = (q_lengths > 0) & (k_lengths > 0)
        # Only whole samples are added up in a fixed order.
        fixed = not (seen & (k_lengths > WHOLE_KEYS)).any()
        return Form("keys", split=not fixed, whole=fixed)
    return Form("keys", whole=whole_pays(q_lengths, k_lengths, kv_heads, ctas))


def whole_pays(q_lengths: Tensor, k_lengths: Tensor, kv_heads: int, ctas: int) -> bool:
    """Whether there are enough samples that can be whole."""
    short = (q_lengths > 0) & (k_lengths > 0) & (k_lengths <= WHOLE_KEYS)
    if int(short.sum()) * kv_heads < LEAST_WHOLE * ctas:
        return False
    return int(q_lengths[short].sum()) >= LEAST_SHARE * int(q_lengths.sum())


def keeps_queries(queries: int, heads: int, kv_heads: int) -> bool:
    """Whether a CTA can keep the queries of broadcast attention, with their dQ, for its life."""
    return queries <= 64 and heads == kv_heads


def step_rows(block_d: int) -> int:
    """Queries of a step of the kernel that keeps keys."""
    return 8192 // block_d


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    form: Form | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; see `gem.attention.backends`. `form` is chosen unless it is given."""
    if not q.shape[0] or not int(call.k_lengths.sum()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    form = form or form_of(call, q)
    work = _Backward(call, dout, dlse, q, k, v, out, lse, form)
    if form.kept == "queries":
        work.add_all_shared()
    else:
        work.add_keys()
    dq = triton_.dq(call, dout, dlse, q, k, v, out, lse) if form.split else work.dq
    return dq, work.dk, work.dv


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
        form: Form,
    ) -> None:
        self.call, self.form = call, form
        self.q, self.k, self.v = readable(q), readable(k), readable(v)
        self.out, self.dout = (
            readable(x.reshape(-1, call.heads, call.head_dim)) for x in (out, dout)
        )
        self.lse = lse.contiguous()
        self.dlse = None if dlse is None else dlse.float().contiguous()
        self.broadcast = call.form == "broadcast"
        self.block_d = block_columns(call)
        self.dq = None if form.split else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.dk, self.dv = triton_.key_results(call, k, v)

    def _statistics(self) -> None:
        """Tiles of queries, their delta and log-sum-exp, and the sums of dQ, 0 where need be."""
        call, device = self.call, self.q.device
        self.block_q = step_rows(self.block_d)
        self.tiles = schedule.schedule(
            "statistic_tiles",
            call.k_lengths,
            triton_.queries_of(call, self.q),
            self.block_q,
            device,
            BLOCK_K if self.form.whole else 0,
        )
        self.stats = self.tiles.shape[0] * self.block_q
        self.delta = torch.empty((call.heads, self.stats), dtype=torch.float32, device=device)
        self.lse2 = torch.empty_like(self.delta)
        self.counter = torch.empty(1, dtype=torch.int32, device=device)
        self.sums, clear = self._sums()
        run(
            statistics_kernel,
            (self.tiles.shape[0], call.heads),
            *(self.out, self.dout, self.lse, self.dlse),
            *(self.delta, self.lse2, self.sums if clear else None, self.counter, self.tiles),
            *(self.stats, *self.out.stride()[:2], *self.dout.stride()[:2]),
            HEADS=call.heads,
            DIM=call.head_dim,
            BLOCK=self.block_q,
            BLOCK_D=self.block_d,
            HAS_DLSE=self.dlse is not None,
            CLEAR=clear,
        )

    def _sums(self) -> tuple[Tensor, bool]:
        """float32 sums of dQ `[tiles of 64 queries, heads, 64 * block_d]`; whether to clear them.

        One where there are none, since a descriptor needs something to describe.
        """
        rows, tile = self.q.shape[0] if self.broadcast else self.stats, 64 * self.block_d
        tiles = triton.cdiv(rows, self.block_q) * (self.block_q // 64)
        if self.form.split or not tiles:
            return torch.empty((1, 1, tile), dtype=torch.float32, device=self.q.device), False
        size = tiles, self.call.heads, tile
        return torch.empty(size, dtype=torch.float32, device=self.q.device), True

    def _descriptors(self, k_rows: int, *more: Tensor) -> tuple:
        return (
            ragged(self.q, 64, self.block_d),
            ragged(self.k, k_rows, self.block_d),
            *(ragged(x, 64, self.block_d) for x in (self.v, *more, self.dout, self.dk, self.dv)),
        )

    def add_keys(self) -> None:
        """Writes dk and dv and, unless it has a kernel of its own, dq."""
        call, form = self.call, self.form
        self._statistics()
        tiles: dealing.KeyTiles = schedule.schedule(
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
            form.whole,
        )
        if tiles.empty.shape[0]:
            self.dk.zero_()
            self.dv.zero_()
        heads, block_d = call.heads, self.block_d
        flat = self.sums.view(-1, 32)
        alone = form.whole and heads == call.kv_heads
        run(
            hopper_backward_kernel,
            (min(tiles.units, processors(self.q.device)),),
            *self._descriptors(BLOCK_K),
            ragged(self.dq if alone else self.dk, 64, block_d),  # or dk, which is not used
            TensorDescriptor(flat, list(flat.shape), [32, 1], [2 * block_d, 32]),
            *(self.lse2, self.delta, tiles.table, self.counter),
            *(tiles.single, tiles.pairs, tiles.units, self.stats),
            *(call.scale * triton_.LOG2_E, call.scale, call.left or 0, call.right or 0),
            GROUP=heads // call.kv_heads,
            HEADS=heads,
            BROADCAST=self.broadcast,
            HAS_LEFT=call.left is not None,
            HAS_RIGHT=call.right is not None,
            NARROW=is_narrow(call.left, call.right, self.block_q),
            # With one side of a window tiles differ, and are dealt such that their sums do not.
            BY_COUNTER=(call.left is None) == (call.right is None),
            BLOCK_D=block_d,
            WITH_DQ=not form.split,
            WHOLE=form.whole,
            ALONE=alone,
            **LAUNCH_OPTIONS,
        )
        if form.split:
            return
        if not self.broadcast:
            triton_.clear_spare(call.q_lengths, self.dq)
        if self.stats:
            run(
                dq_kernel,
                (self.sums.shape[0], heads),
                *(self.sums, self.dq, self.tiles, self.q.shape[0], call.scale),
                HEADS=heads,
                DIM=call.head_dim,
                BROADCAST=self.broadcast,
                ALONE=alone,
                BLOCK=self.block_q,
                BLOCK_D=block_d,
                num_warps=8,
            )

    def add_all_shared(self) -> None:
        """Writes dq, dk and dv of broadcast attention with at most 64 queries."""
        call, queries = self.call, self.q.shape[0]
        workers = max(1, processors(self.q.device) // call.heads)
        segments = schedule.schedule("key_segments", call.k_lengths, workers, self.q.device)
        partial = torch.empty(
            (segments.workers * CONSUMERS.value, *self.q.shape),
            dtype=torch.float32,
            device=self.q.device,
        )
        run(
            hopper_shared_backward_kernel,
            (segments.workers * call.heads,),
            *self._descriptors(64, self.out),
            ragged(partial.view(-1, *self.q.shape[1:]), 64, self.block_d),
            *(self.lse, self.dlse, segments.table, call.k_offsets),
            *(call.scale * triton_.LOG2_E, call.scale),
            *(queries, segments.turns, segments.workers),
            HEADS=call.heads,
            BLOCK_D=self.block_d,
            STAGES=256 // self.block_d,
            HAS_DLSE=self.dlse is not None,
            **LAUNCH_OPTIONS,
        )
        triton_.sum_partial(partial, self.dq, call.scale)

"""Attention in the stock Triton language, for every GPU that Triton knows.

Half precision, all options. The kernels are in `triton_forward` and `triton_backward`; this file
chooses tile sizes, lays out memory and launches. No gradient is summed by atomics, so that every
result has the same bits on every run and `deterministic` costs nothing.

With TRITON_INTERPRET=1 in the environment from the start, the kernels run on CPU tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import triton
from torch import Tensor

from gem.attention import schedule
from gem.attention.backends import Call
from gem.attention.backends import triton_backward as backward_kernels
from gem.attention.backends.launching import run
from gem.attention.backends.triton_forward import forward_kernel

LOG2_E = math.log2(math.e)
DTYPES = (torch.float16, torch.bfloat16)
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
PROGRAMS = 2  # of a backward kernel on a multiprocessor at once
_MAX_STRIDE = 2**31 // 256 - 1  # offsets within a tile are 32 bits wide


def unsupported(call: Call) -> str | None:
    """None if Triton can serve the call, else why not."""
    if call.device.type == "cpu" and not INTERPRETED:
        return "needs a GPU"
    if call.device.type not in ("cpu", "cuda", "xpu"):
        return f"does not know {call.device.type} devices"
    if call.dtype not in DTYPES:
        return f"needs float16 or bfloat16, not {str(call.dtype).removeprefix('torch.')}"
    return None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of one kernel.

    Attributes:
        queries, keys: rows of a tile of either.
        warps: warps of a program.
        stages: blocks under way at once in the main loop.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def fitted(self, resident: str, block_d: int, memory: int) -> Tiles:
        """The same, with fewer stages and then smaller tiles if `memory` bytes demand it.

        Args:
            resident: the side that stays for a program's life, "queries" or "keys"; two tensors of
                each side at most are in shared memory, and once per stage those of the other.
        """
        tiles = self
        streamed = "keys" if resident == "queries" else "queries"
        while tiles._bytes(resident, block_d) > memory:
            if tiles.stages > 1:
                tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
                continue
            larger = max((streamed, resident), key=lambda side: getattr(tiles, side))
            if getattr(tiles, larger) <= 16:
                break
            tiles = dataclasses.replace(tiles, **{larger: getattr(tiles, larger) // 2})
        return tiles

    def _bytes(self, resident: str, block_d: int) -> int:
        still, moving = (
            (self.queries, self.keys) if resident == "queries" else (self.keys, self.queries)
        )
        scores = self.queries * self.keys * 2
        return (2 * still + 2 * moving * self.stages) * block_d * 2 + scores


# Measured on an H200 at head dims 64 and 128. Tiles of 128 queries waste much of the last one where
# a sample has, say, 192; and with few keys per sample, small tiles hide their own start and end.


def forward_tiles(block_d: int, queries: float, keys: float) -> Tiles:
    """Of the forward, for head dims up to `block_d` and these means per sample."""
    if block_d > 128:
        return Tiles(64, 32, 4, 2)
    if block_d > 64:
        long = _fills_tiles(queries, 128) and keys >= 768
        return Tiles(128, 64, 8, 3) if long else Tiles(64, 32, 4, 3)
    return Tiles(128, 64, 4, 3) if _fills_tiles(queries, 128) else Tiles(64, 64, 4, 3)


def keys_tiles(block_d: int) -> Tiles:
    """Of the kernel that computes dK and dV."""
    return Tiles(32, 32, 4, 1) if block_d > 128 else Tiles(32, 64, 4, 3)


def queries_tiles(block_d: int, queries: float) -> Tiles:
    """Of the kernels that compute dQ."""
    if block_d > 128:
        return Tiles(32, 32, 4, 1)
    if block_d > 64:
        return Tiles(128, 64, 8, 3) if _fills_tiles(queries, 128) else Tiles(64, 32, 4, 3)
    return Tiles(64, 64, 4, 3)


def shared_queries_tiles(block_d: int, queries: int) -> Tiles | None:
    """Of the kernel that computes all gradients of broadcast attention; None where it is unfit.

    dQ of all queries has to fit into the registers of a program.
    """
    block = max(16, triton.next_power_of_2(queries))
    if block > 128 or block * block_d > 64 * 128:
        return None
    return Tiles(block, 32 if block_d > 64 or block > 64 else 64, 4, 3)


def _fills_tiles(rows: float, block: int) -> bool:
    """Whether tiles of `block` rows are at least three quarters full, or samples are long."""
    return rows >= 4 * block or rows / (math.ceil(rows / block) * block or 1) > 0.75


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse; see `gem.attention.backends`."""
    q, k, v = (_readable(x) for x in (q, k, v))
    out, lse = results(call, q)
    block_d = _block_d(call)
    tiles = forward_tiles(block_d, mean_queries(call, q), mean(call.k_lengths))
    tiles = tiles.fitted("queries", block_d, _shared_memory(q.device))
    table = schedule.schedule(
        "query_tiles",
        call.k_lengths,
        queries_of(call, q),
        call.left,
        call.right,
        tiles.queries,
        q.device,
    )
    run(
        forward_kernel,
        (table.shape[0] * call.heads,),
        *(q, k, v, out, lse, table, call.q_offsets, call.k_offsets),
        *(call.scale * LOG2_E, call.left or 0, call.right or 0, q.shape[0]),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        **_constants(call, tiles, block_d),
        BROADCAST=call.form == "broadcast",
        HAS_LEFT=call.left is not None,
        HAS_RIGHT=call.right is not None,
        FLIPPED=call.scale < 0,
    )
    return out, lse


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
    work = _Backward(call, dout, dlse, q, k, v, out, lse)
    shared = None
    if work.broadcast and call.heads == call.kv_heads:
        shared = shared_queries_tiles(work.block_d, q.shape[0])
    if shared is not None:
        work.add_all(shared)
    else:
        work.add_keys()
        work.add_broadcast_queries() if work.broadcast else work.add_queries()
    return work.dq, work.dk, work.dv


def dq(call: Call, *tensors: Tensor | None) -> Tensor:
    """dq alone, of the arguments of `backward`."""
    work = _Backward(call, *tensors, with_keys=False)
    work.add_broadcast_queries() if work.broadcast else work.add_queries()
    return work.dq


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
        with_keys: bool = True,
    ) -> None:
        self.call = call
        self.broadcast = call.form == "broadcast"
        self.block_d = _block_d(call)
        self.q, self.k, self.v, self.dout = (_readable(x) for x in (q, k, v, dout))
        make = functools.partial(torch.empty, device=q.device)
        self.dq = make(q.shape, dtype=q.dtype)
        if with_keys:
            self.dk, self.dv = key_results(call, k, v)
        if not self.broadcast:
            clear_spare(call.q_lengths, self.dq)
        # [heads, rows]: a tile's statistics are consecutive
        self.rows = math.prod(lse.shape[:-1])
        self.delta = make((call.heads, self.rows), dtype=torch.float32)
        self.lse2 = torch.empty_like(self.delta)
        # (sample, row, head); samples of jagged attention are all the one at 0
        strides = self.dout.stride()[:-1]
        self.do_strides = strides if self.broadcast else (0, *strides)
        block = max(16, 4096 // self.block_d)
        run(
            backward_kernels.prepare_kernel,
            (triton.cdiv(self.rows, block), call.heads),
            *(out.contiguous(), self.dout, lse.contiguous()),
            dlse if dlse is None else dlse.float().contiguous(),
            *(self.delta, self.lse2, self.rows, q.shape[0] if self.broadcast else self.rows),
            *self.do_strides,
            HEADS=call.heads,
            DIM=call.head_dim,
            BLOCK=block,
            BLOCK_D=self.block_d,
            HAS_DLSE=dlse is not None,
        )

    def _fitted(self, tiles: Tiles, resident: str) -> Tiles:
        return tiles.fitted(resident, self.block_d, _shared_memory(self.q.device))

    @property
    def _inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.dout, self.delta, self.lse2

    @property
    def _strides(self) -> tuple[int, ...]:
        return *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2]

    @property
    def _scales(self) -> tuple[float, float]:
        """(of scores in base 2, of the gradients)."""
        return self.call.scale * LOG2_E, self.call.scale

    @property
    def _window(self) -> dict[str, bool]:
        return {"HAS_LEFT": self.call.left is not None, "HAS_RIGHT": self.call.right is not None}

    def _table(self, kind: str, block: int) -> Tensor:
        call = self.call
        queries = queries_of(call, self.q)
        return schedule.schedule(
            kind, call.k_lengths, queries, call.left, call.right, block, self.q.device
        )

    def add_keys(self) -> None:
        """Writes dk and dv."""
        call = self.call
        tiles = self._fitted(keys_tiles(self.block_d), "keys")
        table = self._table("key_tiles", tiles.keys)
        run(
            backward_kernels.keys_kernel,
            (table.shape[0] * call.kv_heads,),
            *self._inputs,
            *(self.dk, self.dv, table, call.q_offsets, call.k_offsets, *self._scales),
            *(call.left or 0, call.right or 0, self.q.shape[0], self.rows),
            *self._strides,
            *self.do_strides,
            **_constants(call, tiles, self.block_d),
            **self._window,
            BROADCAST=self.broadcast,
        )

    def add_queries(self) -> None:
        """Writes dq of jagged attention."""
        call = self.call
        tiles = self._fitted(queries_tiles(self.block_d, mean_queries(call, self.q)), "queries")
        table = self._table("query_tiles", tiles.queries)
        run(
            backward_kernels.queries_kernel,
            (table.shape[0] * call.heads,),
            *self._inputs,
            *(self.dq, table, call.q_offsets, call.k_offsets, *self._scales),
            *(call.left or 0, call.right or 0, self.rows),
            *self._strides,
            *self.do_strides[1:],
            **_constants(call, tiles, self.block_d),
            **self._window,
        )

    def add_broadcast_queries(self) -> None:
        """Writes dq of broadcast attention."""
        call = self.call
        tiles = self._fitted(queries_tiles(self.block_d, mean_queries(call, self.q)), "queries")
        blocks = triton.cdiv(self.q.shape[0], tiles.queries)
        segments = self._segments(call.heads * blocks)
        partial = self._partial(segments)
        run(
            backward_kernels.partial_queries_kernel,
            (call.heads, blocks, segments.workers),
            *self._inputs,
            *(partial, segments.table, call.k_offsets, self._scales[0]),
            *(self.q.shape[0], self.rows, segments.turns, segments.workers),
            *self._strides,
            *self.do_strides,
            **_constants(call, tiles, self.block_d),
        )
        sum_partial(partial, self.dq, self.call.scale)

    def add_all(self, tiles: Tiles) -> None:
        """Writes dq, dk and dv of broadcast attention with few queries."""
        call = self.call
        tiles = self._fitted(tiles, "queries")
        segments = self._segments(call.heads)
        partial = self._partial(segments)
        constants = _constants(call, tiles, self.block_d)
        del constants["GROUP"]
        run(
            backward_kernels.shared_queries_kernel,
            (call.heads, segments.workers),
            *self._inputs,
            *(self.dk, self.dv, partial, segments.table, call.k_offsets, *self._scales),
            *(self.q.shape[0], self.rows, segments.turns, segments.workers),
            *self._strides,
            *self.do_strides,
            **constants,
        )
        sum_partial(partial, self.dq, self.call.scale)

    def _segments(self, programs_per_worker: int) -> schedule.Segments:
        """For as many workers as the device holds at once."""
        workers = max(1, PROGRAMS * processors(self.q.device) // max(1, programs_per_worker))
        return schedule.schedule("key_segments", self.call.k_lengths, workers, self.q.device)

    def _partial(self, segments: schedule.Segments) -> Tensor:
        shape = (segments.workers, *self.q.shape)
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


def sum_partial(partial: Tensor, dq: Tensor, scale: float) -> None:
    """dq = scale times the sum of partial, float32 `[workers, *dq.shape]`, over the workers."""
    size, block = dq.numel(), 64
    run(
        backward_kernels.sum_kernel,
        (triton.cdiv(size, block),),
        *(partial, dq, scale, partial.shape[0], size),
        BLOCK=block,
        WORKERS=32,
        num_warps=4,
    )


def _constants(call: Call, tiles: Tiles, block_d: int) -> dict[str, int]:
    return {
        "HEADS": call.heads,
        "GROUP": call.heads // call.kv_heads,
        "DIM": call.head_dim,
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "BLOCK_D": block_d,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }


def results(call: Call, q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out and lse, written only where rows lie past the last sample."""
    broadcast = call.form == "broadcast"
    shape = (call.k_lengths.shape[0], *q.shape) if broadcast else q.shape
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
    if not broadcast:
        clear_spare(call.q_lengths, out)
        clear_spare(call.q_lengths, lse, -torch.inf)
    return out, lse


def key_results(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for dk and dv, written only where rows lie past the last sample."""
    made = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    for x in made:
        clear_spare(call.k_lengths, x)
    return made


def clear_spare(lengths: Tensor, x: Tensor, value: float = 0.0) -> None:
    """Fills the rows of x past the last sample; mostly there are none, and nothing is called."""
    covered = int(lengths.sum())
    if covered < x.shape[0]:
        x[covered:] = value


def queries_of(call: Call, q: Tensor) -> Tensor | int:
    """Queries of each sample, or of every one, as schedules take them."""
    return q.shape[0] if call.form == "broadcast" else call.q_lengths


def mean_queries(call: Call, q: Tensor) -> float:
    """Queries of a sample, on average."""
    return q.shape[0] if call.form == "broadcast" else mean(call.q_lengths)


def mean(lengths: Tensor) -> float:
    """The mean of host lengths."""
    return int(lengths.sum()) / max(1, lengths.shape[0])


def _block_d(call: Call) -> int:
    """Columns of a tile: products need powers of two of at least 16."""
    return max(16, triton.next_power_of_2(call.head_dim))


def _readable(x: Tensor) -> Tensor:
    """x, copied only where its strides are more than a kernel's addresses take."""
    plain = x.stride(-1) == 1 and max(x.stride()) <= _MAX_STRIDE
    return x if plain or x.numel() == 0 else x.contiguous()


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type == "cpu":
        return 227 * 1024
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["max_shared_mem"]


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type == "cpu":
        return 4
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"]

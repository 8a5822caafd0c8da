"""scaled_dot_product_attention on tensors padded to the longest sample, as a backend.

Its kernels are called below autograd. They take no gradient of the log-sum-exp, but that gradient
enters theirs only through `sum(dout * out) - dlse`, so that an `out` changed along dout brings it
in (where dout is 0, dlse is lost; behind a sink both are 0 together). What the lengths decide is
made once per batch. Padding is a multiple of 64, so that few lengths are compiled for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from bench.peers.padded import as_words, gather_rows
from bench.rivals import kept
from gem.attention import schedule
from gem.attention.backends import Call

MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of PyTorch's kernels.

    Attributes:
        device: where it runs.
        forward: (q, k, v, bias, scale) to out, its log-sum-exp and what else it returns; q, k, v
            and out are `[batch, heads, rows, dim]`, bias is 0 or -inf and broadcasts to the scores.
        backward: (dout, q, k, v, bias, scale, *what forward returned) to (dq, dk, dv).
        expands: whether the bias has to have the scores' shape.
    """

    device: str
    forward: Callable[..., tuple]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    expands: bool


@dataclasses.dataclass(frozen=True)
class Places:
    """Where packed rows lie in `[batch, length]`.

    Attributes:
        length: of a padded sample.
        places: `[batch * length]`, the packed row of each padded one (padding: some row).
        back: `[rows]`, the padded row of each packed one.
        empty: samples without rows.
    """

    length: int
    places: Tensor
    back: Tensor
    empty: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """Packed `[rows, ...]` to `[batch, length, ...]`; padding holds some row's values."""
        padded = gather_rows(x, self.places).view(-1, self.length, *x.shape[1:])
        return padded.index_fill_(0, self.empty, 0.0) if self.empty.numel() else padded

    def pad_with_zeros(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.places.shape[0], *x.shape[1:])
        as_words(padded).index_copy_(0, self.back, as_words(x.contiguous()))
        return padded.view(-1, self.length, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[batch, length, ...]` to packed `[rows, ...]`."""
        return gather_rows(x.flatten(0, 1), self.back)


@schedule.register("padded_places")
def padded_places(lengths: Tensor, device: torch.device) -> Places:
    length = max(1, -(-int(lengths.max()) // MULTIPLE)) * MULTIPLE
    on_device = lengths.to(device)
    position = torch.arange(length, device=device)
    valid = (position < on_device[:, None]).flatten()
    first = on_device.cumsum(0) - on_device
    rows = int(lengths.sum())
    return Places(
        length,
        (first[:, None] + position).flatten().clamp_(max=max(0, rows - 1)),
        valid.nonzero()[:, 0],
        (lengths == 0).nonzero()[:, 0].to(device),
    )


@schedule.register("padded_bias")
def padded_bias(
    k_lengths: Tensor,
    keys: int,
    left: int | None,
    right: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """0 or -inf: `[B, 1, 1, keys]` without a window, `[1 or B, 1, keys, keys]` with one."""
    j = torch.arange(keys, device=device)
    lengths = k_lengths.to(device)[:, None, None]
    # No softmax may be empty: a sample without keys sees its padding.
    seen = (j < lengths) | (lengths == 0)
    if left is not None or right is not None:
        i = j[:, None]
        window = torch.ones(keys, keys, dtype=torch.bool, device=device)
        if left is not None:
            window &= j >= i - left
        if right is not None:
            window &= j <= i + right
        # Nobody sees past itself, so that no event sees padding.
        seen = window[None] if right == 0 else (seen & window) | (i >= lengths)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None]


class Padded:
    """The functions of a backend module around one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def unsupported(self, call: Call) -> str | None:
        """None if it can serve the call, else why not."""
        if call.device.type != self.kernel.device:
            return f"needs a {self.kernel.device} device"
        if call.heads != call.kv_heads:
            return "has no grouped heads"
        windowed = call.left is not None or call.right is not None
        if windowed and not torch.equal(call.q_lengths, call.k_lengths):
            return "has a window for queries and keys of one length only"
        return None

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse; see `gem.attention.backends`."""
        keys = schedule.schedule("padded_places", call.k_lengths, call.device)
        mask = (keys.length, call.left, call.right, call.dtype, call.device)
        bias = schedule.schedule("padded_bias", call.k_lengths, *mask)
        batch = call.k_lengths.shape[0]
        if call.form == "broadcast":
            queries, rows = None, q.expand(batch, *q.shape).contiguous()
        else:
            queries = schedule.schedule("padded_places", call.q_lengths, call.device)
            rows = queries.pad(q)
        inputs = [x.transpose(1, 2) for x in (rows, keys.pad(k), keys.pad(v))]
        if self.kernel.expands:
            bias = bias.expand(batch, q.shape[1], rows.shape[1], keys.length)
        padded, raw, *state = self.kernel.forward(*inputs, bias, call.scale)
        out = padded.transpose(1, 2)
        # A kernel may round the number of queries up, or add a dimension of 1.
        lse = raw.view(*raw.shape[:3])[:, :, : rows.shape[1]].transpose(1, 2)
        if keys.empty.numel():
            lse = lse.index_fill(0, keys.empty, -torch.inf)
        if queries is not None:
            out, lse = queries.unpad(out), queries.unpad(lse)
        kept.put(out, ([*inputs, bias], [padded, raw, *state]))
        return out, lse.contiguous()

    def backward(
        self,
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
        inputs, (padded, *state) = kept.take(out)
        keys = schedule.schedule("padded_places", call.k_lengths, call.device)
        queries = None
        if call.form == "jagged":
            queries = schedule.schedule("padded_places", call.q_lengths, call.device)
            dout = queries.pad_with_zeros(dout)
            dlse = None if dlse is None else queries.pad_with_zeros(dlse)
        dout = dout.transpose(1, 2)
        if dlse is not None:
            padded = _with_gradient_of_lse(padded, dout, dlse.transpose(1, 2))
        grads = self.kernel.backward(dout, *inputs, call.scale, padded, *state)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        dq = dq.sum(0) if queries is None else queries.unpad(dq)
        return dq, keys.unpad(dk), keys.unpad(dv)


def _with_gradient_of_lse(out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    """`out` such that `sum(dout * out)` is less by dlse; dlse `[batch, heads, rows]`."""
    direction = dout.float()
    squares = direction.square().sum(-1, keepdim=True)
    step = torch.where(squares > 0, dlse[..., None] / squares, 0.0)
    return (out - step * direction).to(out.dtype)

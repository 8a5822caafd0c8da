"""The backends that compute attention, and which of them serves a call.

A backend is a module in this folder with three functions:

    unsupported(call) -> str | None
        None if it can serve the call, else the reason in a few words ("needs a CUDA device").
    forward(call, q, k, v) -> (out, lse)
        lse natural, float32 (float64 for float64 inputs), -inf where a query sees nothing.
    backward(call, dout, dlse, q, k, v, out, lse) -> (dq, dk, dv)
        dlse is None where the log-sum-exp was not used; dout may have any strides.

Inputs are checked before; rows past the last offset are neither read nor left unwritten (0).
Forward and backward are chosen separately, since out and lse mean the same to all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Fastest first: `auto` takes the first that supports the call. The reference is never automatic.
AUTOMATIC = {
    "tlx": "gem.attention.backends.tlx_",
    "triton": "gem.attention.backends.triton_",
    "torch": "gem.attention.backends.torch_",
}
BY_NAME = {**AUTOMATIC, "reference": "gem.attention.backends.reference_"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call, as a backend sees it.

    Attributes:
        form: "jagged" (q `[rows_q, heads, dim]`) or "broadcast" (q `[queries, heads, dim]`).
        direction: "forward" or "backward".
        device, dtype: of q, k and v.
        heads, kv_heads, head_dim: heads is a multiple of kv_heads.
        scale: factor of the scores, applied in the accumulator.
        left, right: how far a query sees to either side; None is unbounded. Causal is right = 0.
        deterministic: the same bits on every run.
        q_offsets, q_lengths: of the queries; None for "broadcast".
        k_offsets, k_lengths: of the keys. Offsets int32 on the device, lengths int64 on the CPU.
    """

    form: str
    direction: str
    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    deterministic: bool = False
    q_offsets: Tensor | None = None
    q_lengths: Tensor | None = None
    k_offsets: Tensor | None = None
    k_lengths: Tensor | None = None


def names() -> list[str]:
    """Every value that `backend=` takes."""
    return ["auto", *BY_NAME]


@functools.cache
def _load(name: str) -> ModuleType | str:
    """The backend's module, or why it cannot be imported."""
    try:
        return importlib.import_module(BY_NAME[name])
    except ImportError as error:
        return f"cannot be imported: {error}"


def unsupported(name: str, call: Call) -> str | None:
    """Why the backend cannot serve the call, or None if it can."""
    module = _load(name)
    return module if isinstance(module, str) else module.unsupported(call)


def report(call: Call) -> dict[str, str | None]:
    """For each automatic backend, fastest first: why it cannot serve the call, or None."""
    return {name: unsupported(name, call) for name in AUTOMATIC}


def select(backend: str, call: Call) -> ModuleType:
    """The module that serves the call.

    Raises:
        ValueError: if the backend named by hand cannot serve the call, or none can.
    """
    if backend != "auto":
        reason = unsupported(backend, call)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")
        return _load(backend)
    passed_over = []
    for name in AUTOMATIC:
        reason = unsupported(name, call)
        if reason is None:
            if passed_over:
                # On a CPU there is nothing to gain from knowing it.
                level = logging.DEBUG if call.device.type == "cpu" else logging.WARNING
                _log_once(level, f"attention {call.direction}: {name} ({'; '.join(passed_over)})")
            return _load(name)
        passed_over.append(f"{name}: {reason}")
    raise ValueError(f"no attention backend can serve this call: {'; '.join(passed_over)}")


@functools.cache
def _log_once(level: int, message: str) -> None:
    log.log(level, message)

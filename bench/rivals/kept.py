"""What a forward leaves for its backward beside the tensors that a backend is handed.

An autograd function of one's own would keep these; here they are found by the output's memory,
which autograd holds until the backward has run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_KEPT: dict[int, Any] = {}


def put(out: Tensor, value: Any) -> None:
    _KEPT[out.data_ptr()] = value


def take(out: Tensor) -> Any:
    return _KEPT.pop(out.data_ptr())


def clear() -> None:
    """Drops what forwards without a backward left."""
    _KEPT.clear()

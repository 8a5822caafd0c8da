"""Launches of Triton kernels, with what they cost the host kept low.

`kernel[grid](...)` works out anew for every launch which compiled kernel serves the arguments. That
takes the host three times as long as the launch itself, and attention of short sequences may take
the GPU less than its launches the host. So here a compiled kernel is kept and found again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# By what it depends on: the compiled kernel, and its constants in the order of its parameters.
_compiled: dict[tuple, tuple[Any, tuple]] = {}
_record: list[tuple] | None = None


def run(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """Launches a kernel on its tensors' device; an empty grid does nothing.

    Args:
        args: the kernel's first parameters, all that are no constants.
        options: its constants, and Triton's options.
    """
    if _record is not None:
        _record.append((kernel, args, options))
        return
    if math.prod(grid) == 0:
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type != "cuda" or torch.version.hip is not None:
        # Other backends of Triton compile other things into a kernel than `kind` tells apart.
        kernel[grid](*args, **options)
    elif device.index == torch.cuda.current_device():
        _launch(device, kernel, grid, args, options)
    else:  # Triton launches on the current device, whatever device the tensors are on
        with torch.cuda.device(device):
            _launch(device, kernel, grid, args, options)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple]]:
    """While it is open, launches are not made but listed: (kernel, arguments, options)."""
    global _record
    _record = []
    try:
        yield _record
    finally:
        _record = None


def _launch(
    device: torch.device, kernel, grid: tuple[int, ...], args: tuple, options: dict[str, Any]
) -> None:
    key = (kernel.fn, device, *map(kind, args), *options.items())
    found = _compiled.get(key)
    if found is not None:
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return
    compiled = kernel[grid](*args, **options)
    if compiled is not None:  # None where kernels are interpreted
        names = kernel.arg_names[len(args) :]
        _compiled[key] = compiled, tuple(options[name] for name in names)


def kind(x: Any) -> Hashable:
    """All that Triton may have compiled into a kernel of an argument that is no constant.

    Of two arguments of one kind Triton's own specialization is the same. It knows of integers
    whether they are 1, multiples of 16, and within 32 or 64 bits; where a parameter is not
    specialized, it knows less.
    """
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, int):
        return int, x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    return type(x)

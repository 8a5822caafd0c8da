"""The ceilings of the machine, measured, and the least time that a row can take under them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.shapes import Row
from bench.timing import measure


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """`matmul_tflops` of a square product of random matrices, `copy_tb_s` of a device copy.

    On a GPU the product is 8192^3 and the copy 4 GiB, counted read and written.
    """
    size = 2**32 if device.type == "cuda" else 2**24
    product, flops = matmul(dtype, device)
    return {
        "matmul_tflops": flops / measure([product], device, 100.0).ms / 1e9,
        "copy_tb_s": 2 * size / _copy_ms(size, device) / 1e9,
    }


def matmul(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """A call that multiplies two random square matrices, and its FLOPs."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * n**3


def _copy_ms(size: int, device: torch.device) -> float:
    # By a kernel: a graph gives a plain copy to a copy engine, at two thirds of the rate.
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return measure([lambda: torch.neg(source, out=target)], device, 100.0).ms


def roofline_ms(row: Row, direction: str, ceilings: dict[str, float], itemsize: int = 2) -> float:
    """The longer of the FLOPs at the matmul rate and the compulsory bytes at the copy rate."""
    compute = row.flops(direction) / ceilings["matmul_tflops"] / 1e9
    memory = row.bytes(direction, itemsize) / ceilings["copy_tb_s"] / 1e9
    return max(compute, memory)

"""The ceilings of the machine, measured, and the least time that a row can take under them."""

from __future__ import annotations

import torch

from bench.shapes import Row
from bench.timing import measure


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """`matmul_tflops` of a square product of random matrices, `copy_tb_s` of a device copy.

    On a GPU the product is 8192^3 and the copy 4 GiB, counted read and written.
    """
    n, size = (8192, 2**32) if device.type == "cuda" else (256, 2**24)
    return {
        "matmul_tflops": 2 * n**3 / _matmul_ms(n, dtype, device) / 1e9,
        "copy_tb_s": 2 * size / _copy_ms(size, device) / 1e9,
    }


def _matmul_ms(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return measure([lambda: torch.mm(a, b, out=out)], device, 100.0).ms


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

"""FLOPs of a step from true lengths, and the peak that they are held against.

A multiply-add counts as two. Nothing is counted for padding, because there is none, nor for
recomputation: a step is the forward pass and the two products of the backward pass per matrix.
"""

import torch
from torch import Tensor, nn

# Attention's backward recomputes the scores: five products to the forward's two.
STEP_PER_FORWARD = 3.0
STEP_PER_FORWARD_ATTENTION = 3.5

# Dense bf16 tensor-core peaks, FLOP/s, from the vendors' data sheets; first match wins.
_PEAKS = (
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
)


def step_flops(model: nn.Module, lengths: dict[str, Tensor], batch_size: int) -> float | None:
    """FLOPs of forward and backward over rows with these event counts.

    Args:
        model: has `flops(lengths, batch_size) -> dict[str, float]`, the forward pass by part.
        lengths: per sequence, [batch_size] events of each row, on the host.

    Returns:
        FLOPs, or None for a model that does not count its own.
    """
    count = getattr(model, "flops", None)
    if count is None:
        return None
    return sum(
        value * (STEP_PER_FORWARD_ATTENTION if part == "attention" else STEP_PER_FORWARD)
        for part, value in count(lengths, batch_size).items()
    )


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None on a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS if part in name), None)

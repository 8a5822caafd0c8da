"""A stand-in for Triton's GPU driver, for modules that ask for one when they are imported."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget

from gem.attention.simulator.targets import target


class StandIn:
    """A driver that has a device, the CPU, and a target, and nothing else."""

    def __init__(self, name: str):
        self._target = GPUTarget("cuda", target(name).capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0


def stand_in(name: str = "sm_90") -> None:
    """Makes Triton's active driver a stand-in for this target, unless a GPU is there."""
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(StandIn(name))

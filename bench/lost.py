"""Whether a contender left the GPU in a state that ends the process's measurements."""

from __future__ import annotations

import contextlib

import torch

from bench.timing import short_reason


class DeviceLost(RuntimeError):
    """A contender left the GPU unusable for this process."""

    def __init__(self, contender: str, direction: str, reason: str) -> None:
        super().__init__(f"{contender} ({direction}) left the GPU unusable: {reason}")
        self.contender, self.direction, self.reason = contender, direction, reason


def check_device(device: torch.device, contender: str, direction: str) -> None:
    """Raises DeviceLost where the GPU's error outlives the call that made it."""
    if device.type != "cuda":
        return
    with contextlib.suppress(Exception):  # an error of the call itself may be reported once more
        torch.cuda.synchronize(device)
    try:
        torch.cuda.synchronize(device)
        assert float(torch.ones(1, device=device).sum()) == 1.0
    except Exception as error:  # noqa: BLE001
        raise DeviceLost(contender, direction, short_reason(error)) from error

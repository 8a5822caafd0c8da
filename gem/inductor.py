"""Where PyTorch's compiler compiles, beside fbtriton.

Inductor has worker processes, each of which asks Triton for its driver. fbtriton 3.7.4 answers by
`cuInit`, which the CUDA driver refuses in a process forked from one that has called it, where stock
Triton asks torch. On an H200 with torch 2.11 some workers, not always the same ones, therefore fail
with "Could not find an active GPU backend", and with them whatever they should compile.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"


def compile_in_process(devices: Path = Path("/dev")) -> None:
    """Lets Inductor compile in its caller's process where fbtriton meets an NVIDIA GPU.

    What the environment already says about it stays.

    Args:
        devices: where the GPUs' device files are.
    """
    if os.environ.get(VARIABLE) or not any(devices.glob("nvidia[0-9]*")):
        return
    try:
        importlib.metadata.version("fbtriton")
    except importlib.metadata.PackageNotFoundError:
        return
    os.environ[VARIABLE] = "1"
    config = sys.modules.get("torch._inductor.config")
    if config is not None:  # it has read the environment
        config.compile_threads = 1

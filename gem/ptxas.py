"""Which ptxas (NVIDIA's assembler) Triton calls.

Triton's wheels ship a ptxas of their own, for Hopper one of CUDA 12.9 in fbtriton 3.7.4. Before
CUDA 13.3, ptxas can reuse the registers of a wgmma operand that is still being read, which gives
wrong numbers in exactly the products of flash attention (triton-lang/triton#11781). So the ptxas
of the nvidia-cuda-nvcc package is used where it is installed, unless the environment names another.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

# Triton asks for the second one on Blackwell.
VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def installed_ptxas() -> Path | None:
    """The ptxas of an installed nvidia-cuda-nvcc (CUDA 13) package, or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "cu13" / "bin" / "ptxas"
        if os.access(path, os.X_OK):
            return path
    return None


def use_installed_ptxas() -> None:
    """Point Triton at `installed_ptxas()`; what the environment already names stays."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    path = installed_ptxas() if missing else None
    if path is not None:
        os.environ.update(dict.fromkeys(missing, str(path)))


def ptxas_version(path: str | Path) -> str | None:
    """The version that `path --version` states, such as "13.3.73"; None where that is no ptxas."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"V(\d+\.\d+\.\d+)", answer.stdout)
    return found and found.group(1)

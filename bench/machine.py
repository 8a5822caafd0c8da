"""What a result was measured with: versions and the GPU, and a mark of this boot of the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import importlib.util
import subprocess
from pathlib import Path

import torch

from bench.compile import assembler
from gem.ptxas import ptxas_version

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot(device: torch.device) -> str:
    """A digest of this boot and the GPU; results of one boot can be compared."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else "no boot id"
    uuid = ""
    if device.type == "cuda":
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return hashlib.sha256(f"{boot} {uuid}".encode()).hexdigest()[:12]


def describe(device: torch.device) -> dict:
    """Versions and the device; no names of hosts, no paths."""
    facts = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": _smi("driver_version") if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("fbtriton", "fbtriton ") or _version("triton"),
        "ptxas": ptxas_version(assembler(90)),
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "flash_attn_4": _version("flash-attn-4") or _found("flash_attn"),
        "flash_attn_3": _version("flash-attn-3")
        or _version("xformers", "from xformers ")
        or _found("fa3"),
        "boot": boot(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["sms"] = properties.multi_processor_count
        facts["clocks"] = _smi("clocks.max.sm,clocks.max.mem,power.limit")
    return facts


def _version(package: str, prefix: str = "") -> str | None:
    try:
        return prefix + metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _found(module: str) -> str | None:
    return "of unknown version" if importlib.util.find_spec(module) else None


def _smi(query: str) -> str | None:
    """What nvidia-smi answers for the first GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None

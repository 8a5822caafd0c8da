"""Versions, GPUs and what does not fit together: `python -m gem.env` prints them.

The exit code is 1 when something does not fit together. A package that is missing or does not
import is a sentence in the report, never an error of this module.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata as metadata
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gem.compatibility import (
    PACKAGES,
    REQUIRED,
    Environment,
    Gpu,
    find_problems,
    numbers,
    tested_as,
)
from gem.ptxas import VARIABLES, ptxas_version, use_installed_ptxas

NEEDS_TORCH = "it needs torch"


@dataclass(frozen=True)
class Report:
    """An environment, what attention runs on in it and why, and what does not fit together."""

    environment: Environment
    backend: str
    reason: str
    problems: list[str]

    def __str__(self) -> str:
        env, packages = self.environment, self.environment.packages
        build = f"CUDA {env.torch_cuda} build" if env.torch_cuda else "CPU build"
        rows = {
            "python": sys.version.split()[0],
            "torch": f"{packages['torch']} ({build})" if "torch" in packages else "missing",
            "fbgemm": env.fbgemm or "missing",
            **{name: packages.get(name, "missing") for name in REQUIRED[1:]},
            "triton": env.triton or "missing",
            "ptxas": f"{env.ptxas_version} ({env.ptxas})" if env.ptxas else "none",
            "driver": env.driver_text or "none",
            "gpu": "; ".join(map(str, env.gpus)) or "none",
            "tested as": tested_as(env) or "not a tested combination of torch, fbgemm, torchrec",
            "attention": f"{self.backend} ({self.reason})",
        }
        width = max(map(len, rows))
        lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
        if self.problems:
            lines += ["Does not fit together:", *(f"- {problem}" for problem in self.problems)]
        else:
            lines.append("Everything fits together.")
        return "\n".join(lines)

    def short(self) -> str:
        """One line, and a second one when something does not fit together."""
        env = self.environment
        parts = [
            env.versions(("torch",)) or "no torch",
            env.fbgemm or "no fbgemm",
            env.versions(("torchrec",)) or "no torchrec",
            env.triton or "no Triton",
            f"ptxas {env.ptxas_version or 'none'}",
            ", ".join(gpu.name for gpu in env.gpus) or "no GPU",
            f"attention on {self.backend}",
        ]
        line = ", ".join(parts)
        if self.problems:
            line += "\ndoes not fit together: " + " ".join(self.problems)
        return line


def report() -> Report:
    """Look at the installed packages (torch, fbgemm and torchrec are imported) and the machine."""
    environment = look()
    backend, reason = _attention(environment)
    problems = find_problems(environment)
    if backend.startswith("none") and reason != NEEDS_TORCH:
        problems.append(f"No attention backend can be used: {reason}")
    return Report(environment, backend, reason, problems)


def short_report() -> str:
    """`report()` in one or two lines, for the start of a run."""
    return report().short()


def look() -> Environment:
    """What `find_problems` judges."""
    use_installed_ptxas()
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    errors: dict[str, str] = {}
    logging.disable(logging.ERROR)  # fbgemm logs what the report says anyway, once per library
    try:
        torch = _import("torch", errors)
        if torch is not None and _import("fbgemm_gpu", errors) is not None:
            _import("torchrec", errors)
        triton = _import("triton", errors)
        tlx = triton is not None and _import("triton.language.extra.tlx", errors) is not None
    finally:
        logging.disable(logging.NOTSET)

    driver, gpus = _nvidia_smi()
    sees_gpu = torch is not None and torch.cuda.is_available()
    if sees_gpu:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = tuple(Gpu(d.name, (d.major, d.minor), d.total_memory / 2**30) for d in devices)
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return Environment(
        packages=packages,
        errors=errors,
        torch_cuda=torch.version.cuda if torch is not None else None,
        torch_sees_gpu=sees_gpu,
        tlx=tlx,
        **_ptxas_of_triton(triton, gpus),
        driver=driver,
        driver_cuda=_driver_cuda(),
        gpus=gpus,
        compiler=compiler is not None,
        headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    )


def _import(module: str, errors: dict[str, str]) -> ModuleType | None:
    """The module, or None; an error other than its absence goes into `errors`."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken library raises OSError, RuntimeError, AttributeError ...
        if not (isinstance(error, ModuleNotFoundError) and error.name == module):
            errors[module] = _causes(error)
        return None


def _causes(error: BaseException) -> str:
    """The first lines of an error and of its causes: which library is missing is in the last."""
    lines = []
    chain: BaseException | None = error
    while chain is not None and len(lines) < 4:
        text = str(chain).strip() or type(chain).__name__
        lines.append(text.splitlines()[0].rstrip("."))
        chain = chain.__cause__ or chain.__context__
    return ": ".join(dict.fromkeys(lines)) + "."


def _attention(env: Environment) -> tuple[str, str]:
    """What `backend="auto"` means for attention as the model calls it, and why."""
    if "torch" not in env.packages or "torch" in env.errors:
        return "none", NEEDS_TORCH
    errors: dict[str, str] = {}
    backends = _import("gem.attention.backends", errors)
    if backends is None:
        return "none", next(iter(errors.values()), "gem.attention is not installed.")
    import torch

    device, dtype = ("cuda", torch.bfloat16) if env.torch_sees_gpu else ("cpu", torch.float32)
    chosen: dict[str, list[str]] = {}
    reasons: dict[str, None] = {}
    for form in ("jagged", "broadcast"):
        for direction in ("forward", "backward"):
            call = backends.Call(form, direction, torch.device(device), dtype, 2, 2, 64)
            verdicts = backends.report(call)
            served = next((name for name, why in verdicts.items() if why is None), "none")
            chosen.setdefault(served, []).append(f"{form} {direction}")
            reasons.update({f"{name}: {why}": None for name, why in verdicts.items() if why})
    reason = "; ".join(reasons) or "the first choice on this machine"
    if len(chosen) == 1:
        return next(iter(chosen)), reason
    uses = {name: f"{name} ({', '.join(calls)})" for name, calls in chosen.items()}
    # "none" first, so that a call which nothing serves shows.
    return " and ".join(uses[name] for name in sorted(uses, key="none".__ne__)), reason


def _nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """The driver's version and the GPUs, as nvidia-smi tells them."""
    query = "--query-gpu=driver_version,compute_cap,memory.total,name"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        rows = [line.split(", ", 3) for line in answer.stdout.splitlines() if line.strip()]
        gpus = [Gpu(name, numbers(cap), float(mib) / 1024) for _, cap, mib, name in rows]
        return rows[0][0], tuple(gpus)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, ()


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def _ptxas_of_triton(triton: ModuleType | None, gpus: tuple[Gpu, ...]) -> dict[str, str | None]:
    """Path, origin and version of the ptxas for these GPUs (without one: for Hopper)."""
    blackwell = bool(gpus) and gpus[0].capability >= (10, 0)
    variable = VARIABLES[blackwell]
    if path := os.environ.get(variable):
        return {"ptxas": path, "ptxas_from": variable, "ptxas_version": ptxas_version(path)}
    if triton is None or not triton.__file__:
        return {}
    name = "ptxas-blackwell" if blackwell else "ptxas"
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return {"ptxas": str(own), "ptxas_version": ptxas_version(own)}


def main() -> int:
    found = report()
    print(found)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What fits together: tested sets, rules between versions, and a sentence for each that is broken.

Nothing here looks at the machine: `gem.env.look` fills an `Environment`, `find_problems` judges it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# The combinations that the tests have run on; README has the same table.
TESTED = {
    "CPU set": {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"},
    "GPU set": {"torch": "2.11.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"},
}
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
TRITON = ("fbtriton", "triton")
REQUIRED = ("torch", "torchrec", "tensordict", "torchmetrics", "hydra-core")
PACKAGES = (*REQUIRED, *FBGEMM, *TRITON, "nvidia-cuda-nvcc")

HOPPER = (9, 0)
# Older ones can reuse the registers of a wgmma operand while it is read (triton-lang/triton#11781).
HOPPER_PTXAS = (13, 3)


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, compute capability and memory in GiB."""

    name: str
    capability: tuple[int, int]
    memory_gib: float

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (sm_{major}{minor}, {self.memory_gib:.0f} GiB)"


@dataclass(frozen=True)
class Environment:
    """What is installed, what of it works, and what the machine has.

    packages: installed version by package, for those of PACKAGES that are installed.
    errors: error and causes by module, for modules that are installed and do not import.
    torch_cuda: CUDA version that torch is built for; None for a CPU build.
    tlx: whether the installed Triton has TLX.
    ptxas: path of the assembler that Triton is told to call; `ptxas_from` is the environment
        variable that names it, or Triton's own wheel; `ptxas_version` is None where it fails.
    driver_cuda: newest CUDA version that the NVIDIA driver serves.
    compiler, headers: whether there is a C compiler and Python.h, which Triton needs on a GPU.
    """

    packages: dict[str, str]
    errors: dict[str, str]
    torch_cuda: str | None = None
    torch_sees_gpu: bool = False
    tlx: bool = False
    ptxas: str | None = None
    ptxas_from: str = "Triton's wheel"
    ptxas_version: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    compiler: bool = True
    headers: bool = True

    def versions(self, names: tuple[str, ...]) -> str:
        """`package version` of the installed ones of `names`, joined with "and"; "" for none."""
        return " and ".join(f"{n} {self.packages[n]}" for n in names if n in self.packages)

    @property
    def fbgemm(self) -> str:
        return self.versions(FBGEMM)

    @property
    def triton(self) -> str:
        found = self.versions(TRITON)
        return found and f"{found} {'with' if self.tlx else 'without'} TLX"

    @property
    def driver_text(self) -> str:
        cuda = "CUDA {}.{}".format(*self.driver_cuda) if self.driver_cuda else None
        return " for ".join(filter(None, (self.driver, cuda)))


def numbers(version: str | None) -> tuple[int, int] | None:
    """(2, 13) for "2.13.0+cpu"; None for what does not start like a version."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def tested_as(env: Environment) -> str | None:
    """The name of the tested set that the installed torch, fbgemm and torchrec are, or None."""
    names = ("torch", *FBGEMM, "torchrec")
    stack = {n: env.packages[n].partition("+")[0] for n in names if n in env.packages}
    return next((name for name, versions in TESTED.items() if versions == stack), None)


def find_problems(env: Environment) -> list[str]:
    """One sentence for each thing that does not fit together."""
    checks = (_stack, _imports, _triton, _ptxas, _driver, _build_tools)
    return [problem for check in checks for problem in check(env)]


def _stack(env: Environment) -> list[str]:
    packages = env.packages
    found = [f"{n} is not installed: run `make venv`." for n in REQUIRED if n not in packages]
    installed = [name for name in FBGEMM if name in packages]
    if not installed:
        return [*found, "fbgemm is not installed: run `make venv`."]
    if len(installed) > 1:
        return [
            *found,
            f"{env.fbgemm} are both installed and overwrite each other's files: uninstall both, "
            "then run `make venv`.",
        ]
    fbgemm, torch = numbers(packages[installed[0]]), numbers(packages.get("torch"))
    torchrec = numbers(packages.get("torchrec"))
    if torch and fbgemm and fbgemm[0] == 1 and torch != (2, fbgemm[1] + 5):
        found.append(
            f"{env.fbgemm} is built against torch 2.{fbgemm[1] + 5}, but torch "
            f"{packages['torch']} is installed (fbgemm 1.X needs torch 2.(X+5))."
        )
    if torchrec and fbgemm and torchrec != fbgemm:
        found.append(
            f"torchrec {packages['torchrec']} goes with fbgemm {torchrec[0]}.{torchrec[1]}, "
            f"but {env.fbgemm} is installed."
        )
    return found


def _imports(env: Environment) -> list[str]:
    found = []
    for module, error in env.errors.items():
        cause = ""
        if "undefined symbol" in error:
            cause = ", since its library was built against another torch"
        found.append(f"{module} is installed but does not import{cause}: {error}")
    return found


def _triton(env: Environment) -> list[str]:
    if all(name in env.packages for name in TRITON):
        return [
            f"{env.versions(TRITON)} share one folder, so that files of one of them are missing or "
            "overwritten: run `python scripts/install.py triton`."
        ]
    if not env.gpus:
        return []
    if not env.triton:
        return ["Triton is not installed, so the GPU's attention kernels cannot run: `make venv`."]
    if not env.tlx and env.gpus[0].capability >= HOPPER:
        return [
            f"{env.triton} has no kernels for {env.gpus[0].name}: run `python scripts/install.py "
            "triton`, which puts fbtriton in its place."
        ]
    return []


def _ptxas(env: Environment) -> list[str]:
    if not env.triton:
        return []
    found = []
    if env.ptxas and not env.ptxas_version:
        found.append(
            f"{env.ptxas}, from {env.ptxas_from}, does not work as a ptxas: Triton takes the one "
            "in its wheel without a word."
        )
    version = numbers(env.ptxas_version)
    recent = version is not None and version >= HOPPER_PTXAS
    if version and not recent and any(gpu.capability == HOPPER for gpu in env.gpus):
        found.append(
            f"ptxas {env.ptxas_version} is older than 13.3 and can miscompile wgmma with a "
            "register operand on Hopper, which makes attention wrong: install nvidia-cuda-nvcc "
            "13.3.73 or set TRITON_PTXAS_PATH."
        )
    if "nvidia-cuda-nvcc" not in env.packages and not recent:
        found.append(
            "nvidia-cuda-nvcc is not installed, so that Triton assembles with ptxas "
            f"{env.ptxas_version or 'of its own'}: run `make venv`."
        )
    return found


def _driver(env: Environment) -> list[str]:
    if "torch" not in env.packages or "torch" in env.errors:
        return []
    torch = f"torch {env.packages['torch']}"
    if env.torch_cuda is None:
        if not env.gpus:
            return []
        name = env.gpus[0].name
        return [f"{torch} is a CPU build, so {name} stays unused: run `make venv SET=gpu`."]
    if env.driver is None and env.driver_cuda is None:
        return [
            f"{torch} is a build for CUDA {env.torch_cuda}, but there is no NVIDIA driver: it runs "
            "on the CPU and fills gigabytes of disk (README tells how to keep it out)."
        ]
    built = numbers(env.torch_cuda)
    if env.driver_cuda and built and env.driver_cuda[0] < built[0]:
        return [
            f"{torch} is a build for CUDA {env.torch_cuda}, but the driver ({env.driver_text}) "
            "is older: update the driver."
        ]
    if not env.torch_sees_gpu:
        return [
            f"{torch} sees no GPU although there is a driver ({env.driver_text}): look at "
            "CUDA_VISIBLE_DEVICES and at what nvidia-smi prints."
        ]
    if "fbgemm-gpu-cpu" in env.packages:
        return ["fbgemm-gpu-cpu has no kernels for the GPU: run `make venv SET=gpu`."]
    return []


def _build_tools(env: Environment) -> list[str]:
    lacking = []
    if not env.compiler:
        lacking.append("There is no C compiler (install gcc)")
    if not env.headers:
        lacking.append("Python.h is missing (install python3-dev)")
    return [f"{what}, so that Triton cannot build its launchers." for what in lacking if env.gpus]

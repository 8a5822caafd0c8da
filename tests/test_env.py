"""`python -m gem.env`: a sentence for each mismatch, and no traceback for a broken package."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gem import compatibility, env, ptxas
from gem.compatibility import Environment, Gpu, find_problems, numbers

ROOT = Path(__file__).resolve().parents[1]

COMMON = {
    "tensordict": "0.15.3",
    "torchmetrics": "1.0.3",
    "hydra-core": "1.3.8",
    "fbtriton": "3.7.4",
    "nvidia-cuda-nvcc": "13.3.73",
}
CPU = Environment(
    packages={"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0", **COMMON},
    errors={},
    tlx=True,
    ptxas="/opt/cuda/bin/ptxas",
    ptxas_from="TRITON_PTXAS_PATH",
    ptxas_version="13.3.73",
)
H200 = Gpu("NVIDIA H200", (9, 0), 139.8)
A100 = Gpu("NVIDIA A100", (8, 0), 79.2)
GPU = replace(
    CPU,
    packages={"torch": "2.11.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1", **COMMON},
    torch_cuda="13.0",
    torch_sees_gpu=True,
    driver="580.65.06",
    driver_cuda=(13, 0),
    gpus=(H200,),
)


def changed(environment, *missing, **versions):
    """The environment with packages taken out and versions set (underscores for hyphens)."""
    packages = {k: v for k, v in environment.packages.items() if k not in missing}
    packages |= {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(environment, packages=packages)


@pytest.mark.parametrize("environment, name", [(CPU, "CPU set"), (GPU, "GPU set")])
def test_a_tested_set_has_no_problems(environment, name):
    assert find_problems(environment) == []
    assert compatibility.tested_as(environment) == name


MISMATCHES = {
    "fbgemm for another torch": (
        changed(CPU, fbgemm_gpu_cpu="1.9.0", torchrec="1.9.2"),
        "fbgemm-gpu-cpu 1.9.0 is built against torch 2.14, but torch 2.13.0+cpu is installed",
    ),
    "torch ahead of fbgemm": (
        changed(GPU, torch="2.15.0"),
        "fbgemm-gpu 1.6.0 is built against torch 2.11, but torch 2.15.0 is installed",
    ),
    "torchrec of another minor version": (
        changed(CPU, torchrec="1.6.1"),
        "torchrec 1.6.1 goes with fbgemm 1.6, but fbgemm-gpu-cpu 1.8.0 is installed",
    ),
    "no fbgemm": (changed(CPU, "fbgemm-gpu-cpu"), "fbgemm is not installed"),
    "both fbgemm": (
        changed(CPU, fbgemm_gpu="1.8.0"),
        "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 are both installed",
    ),
    "fbgemm with an undefined symbol": (
        replace(CPU, errors={"fbgemm_gpu": "fbgemm_gpu_py.so: undefined symbol: _ZN5torch."}),
        "fbgemm_gpu is installed but does not import, since its library was built against another "
        "torch: fbgemm_gpu_py.so: undefined symbol: _ZN5torch.",
    ),
    "fbgemm without a library": (
        replace(CPU, errors={"fbgemm_gpu": "libnvidia-ml.so.1: cannot open."}),
        "fbgemm_gpu is installed but does not import: libnvidia-ml.so.1: cannot open.",
    ),
    "no torch": (changed(CPU, "torch"), "torch is not installed: run `make venv`."),
    "no torchrec": (changed(CPU, "torchrec"), "torchrec is not installed: run `make venv`."),
    "no tensordict": (changed(CPU, "tensordict"), "tensordict is not installed"),
    "no torchmetrics": (changed(CPU, "torchmetrics"), "torchmetrics is not installed"),
    "no hydra": (changed(CPU, "hydra-core"), "hydra-core is not installed"),
    "two Tritons": (
        changed(CPU, triton="3.7.1"),
        "fbtriton 3.7.4 and triton 3.7.1 share one folder",
    ),
    "a GPU without Triton": (
        replace(changed(GPU, "fbtriton"), tlx=False),
        "Triton is not installed, so the GPU's attention kernels cannot run",
    ),
    "Hopper with stock Triton": (
        replace(changed(GPU, "fbtriton", triton="3.6.0"), tlx=False),
        "triton 3.6.0 without TLX has no kernels for NVIDIA H200",
    ),
    "an old ptxas on Hopper": (
        replace(GPU, ptxas_version="12.9.86"),
        "ptxas 12.9.86 is older than 13.3 and can miscompile wgmma",
    ),
    "a ptxas that does not run": (
        replace(GPU, ptxas_version=None),
        "/opt/cuda/bin/ptxas, from TRITON_PTXAS_PATH, does not work as a ptxas",
    ),
    "no nvcc wheel": (
        replace(changed(CPU, "nvidia-cuda-nvcc"), ptxas_version="12.9.86"),
        "nvidia-cuda-nvcc is not installed, so that Triton assembles with ptxas 12.9.86",
    ),
    "a CUDA torch without a driver": (
        replace(changed(CPU, torch="2.13.0"), torch_cuda="13.0"),
        "torch 2.13.0 is a build for CUDA 13.0, but there is no NVIDIA driver",
    ),
    "a driver older than torch's CUDA": (
        replace(GPU, torch_sees_gpu=False, driver="535.104.05", driver_cuda=(12, 2)),
        "torch 2.11.0 is a build for CUDA 13.0, but the driver (535.104.05 for CUDA 12.2) is older",
    ),
    "a CUDA torch that sees no GPU": (
        replace(GPU, torch_sees_gpu=False),
        "torch 2.11.0 sees no GPU although there is a driver (580.65.06 for CUDA 13.0)",
    ),
    "a GPU without a CUDA torch": (
        replace(CPU, driver="580.65.06", driver_cuda=(13, 0), gpus=(H200,)),
        "torch 2.13.0+cpu is a CPU build, so NVIDIA H200 stays unused",
    ),
    "a GPU with the CPU build of fbgemm": (
        changed(GPU, "fbgemm-gpu", fbgemm_gpu_cpu="1.6.0"),
        "fbgemm-gpu-cpu has no kernels for the GPU",
    ),
    "no C compiler": (replace(GPU, compiler=False), "There is no C compiler (install gcc)"),
    "no Python.h": (replace(GPU, headers=False), "Python.h is missing (install python3-dev)"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_gives_one_sentence(name):
    environment, start = MISMATCHES[name]
    problems = find_problems(environment)
    assert [p for p in problems if p.startswith(start)] == problems, problems
    assert len(problems) == 1
    assert problems[0].endswith(".")


@pytest.mark.parametrize(
    "environment",
    [
        replace(GPU, ptxas_version="12.9.86", gpus=(A100,)),  # the fault is Hopper's
        replace(changed(GPU, "fbtriton", triton="3.6.0"), tlx=False, gpus=(A100,)),
        changed(CPU, "fbtriton", "nvidia-cuda-nvcc"),  # nothing compiles
        changed(GPU, "nvidia-cuda-nvcc"),  # a good ptxas from elsewhere
        changed(GPU, fbgemm_gpu="2026.6.11", torchrec="nightly"),  # no rule for nightlies
        replace(CPU, compiler=False, headers=False),
    ],
)
def test_what_does_no_harm_is_no_problem(environment):
    problems = find_problems(environment)
    assert not [p for p in problems if "torchrec nightly" not in p], problems


def test_numbers():
    assert numbers("2.13.0+cpu") == (2, 13)
    assert numbers("13.3.73") == (13, 3)
    assert numbers("main") is None
    assert numbers(None) is None


def test_another_combination_is_not_called_tested():
    assert compatibility.tested_as(changed(CPU, torch="2.13.1")) is None
    assert compatibility.tested_as(changed(CPU, "torchrec")) is None


def test_the_report_names_what_is_installed_here(capsys):
    import torch

    code = env.main()
    text = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in text.splitlines()[:12])
    assert rows["python"] == sys.version.split()[0]
    assert rows["torch"].startswith(torch.__version__)
    assert rows["triton"] == "fbtriton 3.7.4 with TLX"
    assert rows["ptxas"].startswith("13.3.73 (")
    assert code == ("Does not fit together" in text), text


def test_the_report_names_the_backend_that_attention_takes():
    import torch

    from gem.attention import backends

    report = env.report()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    call = backends.Call("jagged", "forward", device, dtype, 2, 2, 64)
    chosen = backends.select("auto", call).__name__.rpartition(".")[2].strip("_")
    assert report.backend.split()[0] == chosen


def broken_fbgemm(folder, code, **variables):
    """`python -m gem.env` where `import fbgemm_gpu` runs `code`."""
    (folder / "fbgemm_gpu").mkdir()
    (folder / "fbgemm_gpu" / "__init__.py").write_text(code + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "gem.env"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), **variables},
        timeout=120,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_broken_fbgemm_is_a_sentence_with_its_cause(tmp_path):
    code, lines = broken_fbgemm(
        tmp_path,
        "try:\n    raise OSError('x.so: undefined symbol: _ZN2at')\n"
        "except OSError as cause:\n    raise OSError('Could not load this library') from cause",
    )
    assert code == 1
    assert (
        "- fbgemm_gpu is installed but does not import, since its library was built against "
        "another torch: Could not load this library: x.so: undefined symbol: _ZN2at."
    ) in lines


def test_an_error_without_a_text_and_a_wrong_ptxas_are_sentences(tmp_path):
    missing = str(tmp_path / "none")
    code, lines = broken_fbgemm(tmp_path, "raise RuntimeError", TRITON_PTXAS_PATH=missing)
    assert code == 1
    assert "- fbgemm_gpu is installed but does not import: RuntimeError." in lines
    assert any(
        line.startswith(f"- {missing}, from TRITON_PTXAS_PATH, does not work as a ptxas")
        for line in lines
    )


def test_importing_gem_points_triton_at_the_installed_ptxas(monkeypatch):
    for name in ptxas.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ptxas.use_installed_ptxas()
    path = os.environ[ptxas.VARIABLES[0]]
    assert os.environ[ptxas.VARIABLES[1]] == path
    assert numbers(ptxas.ptxas_version(path)) >= (13, 3)
    monkeypatch.setenv(ptxas.VARIABLES[0], "mine")
    monkeypatch.delenv(ptxas.VARIABLES[1])
    ptxas.use_installed_ptxas()
    assert [os.environ[name] for name in ptxas.VARIABLES] == ["mine", path]


def test_triton_calls_the_ptxas_that_gem_names():
    code = "import gem, triton.knobs as k; print(k.nvidia.ptxas.path, k.nvidia.ptxas.version)"
    variables = {k: v for k, v in os.environ.items() if k not in ptxas.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=variables
    )
    assert done.stdout.split() == [str(ptxas.installed_ptxas()), "13.3"], done.stderr


def test_nvidia_smi_tells_driver_and_gpus(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '580.65.06, 9.0, 143771, NVIDIA H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver, (gpu,) = env._nvidia_smi()
    assert driver == "580.65.06"
    assert str(gpu) == "NVIDIA H200 (sm_90, 140 GiB)"
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert env._nvidia_smi() == (None, ())


def test_short_report_is_one_line_and_a_second_for_problems():
    report = env.Report(GPU, "tlx", "the first choice on this machine", [])
    assert report.short() == (
        "torch 2.11.0, fbgemm-gpu 1.6.0, torchrec 1.6.1, fbtriton 3.7.4 with TLX, ptxas 13.3.73, "
        "NVIDIA H200, attention on tlx"
    )
    lines = replace(report, problems=["A.", "B."]).short().splitlines()
    assert lines[1:] == ["does not fit together: A. B."]

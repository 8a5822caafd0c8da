"""The set-up: pins, the one Triton, the choice of torch's build, the wheel."""

import importlib.metadata as metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gem.compatibility import TESTED

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "install.py"
STOCK_TRITON = "triton==3.6.0"  # the one that the wheel of torch 2.11.0 names


def load_script():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load_script()


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def pip_calls(monkeypatch):
    """What the script would have pip do, without doing it."""
    calls = []
    monkeypatch.setattr(install, "pip", lambda *arguments: calls.append(arguments))
    return calls


def fake_installed(monkeypatch, versions):
    monkeypatch.setattr(install, "installed", lambda name: versions.get(name))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_set_follows_the_abi_rule_and_the_tested_table(name):
    pins = install.read_pins("common", name)
    fbgemm = "fbgemm-gpu-cpu" if name == "cpu" else "fbgemm-gpu"
    minor = {package: int(pins[package].split(".")[1]) for package in ("torch", fbgemm, "torchrec")}
    assert minor["torch"] == minor[fbgemm] + 5
    assert minor["torchrec"] == minor[fbgemm]
    assert TESTED[f"{name.upper()} set"] == {p: pins[p] for p in ("torch", fbgemm, "torchrec")}


def test_pyproject_repeats_the_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = {
        "cpu": extras["cpu"],
        "gpu": extras["gpu"],
        "test": extras["test"],
        "common": project["dependencies"],
    }
    for name, requirements in stated.items():
        pins = install.read_pins(*{"common", name})
        for requirement in requirements:
            package, _, version = requirement.partition("==")
            assert pins[install.canonical(package)] == version, requirement


def test_readme_names_the_tested_sets():
    readme = (ROOT / "README.md").read_text()
    for name in ("cpu", "gpu"):
        pins = install.read_pins("common", name)
        row = next(line for line in readme.splitlines() if line.startswith(f"| {name.upper()} |"))
        for package in (
            "torch",
            "torchrec",
            "fbtriton",
            "nvidia-cuda-nvcc",
            "tensordict",
            "hydra-core",
        ):
            assert pins[package] in row, f"{package} in {row}"


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("line", ["numpy>=2.0", "numpy", "torch==2.13.0+cpu", "numpy==2.*"])
def test_a_loose_or_local_pin_is_refused(line, monkeypatch, tmp_path):
    (tmp_path / "x.txt").write_text(f"# comment\n{line}\n")
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path)
    with pytest.raises(install.InstallError, match=re.escape(line)):
        install.read_pins("x")


def test_this_environment_misses_nothing_that_its_packages_name():
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120
    )
    pinned = {*install.read_pins("common", "cpu", "gpu", "test"), "gem-ads"}
    # What the script leaves out on purpose.
    left_out = {
        ("torchrec", "fbgemm-gpu"),  # fbgemm-gpu-cpu serves
        ("torchrec", "iopath"),  # for its own data sets alone
        ("torch", "triton"),  # fbtriton serves
        ("nvidia-cuda-nvcc", "nvidia-nvvm"),  # for nvcc; ptxas stands alone
        ("nvidia-cuda-nvcc", "nvidia-cuda-crt"),
        ("nvidia-cuda-nvcc", "nvidia-cuda-runtime"),
    }
    complaints = re.findall(
        r"^(\S+) \S+ (?:requires (\S+?),|has requirement ([A-Za-z0-9._-]+))", done.stdout, re.M
    )
    found = {(install.canonical(who), install.canonical(a or b)) for who, a, b in complaints}
    assert done.returncode == 0 or found, done.stdout + done.stderr
    assert {pair for pair in found if pair[0] in pinned} <= left_out


PINS = {"torch": "2.13.0", "filelock": "3.0", "sympy": "1.14.0"}


def test_an_installed_torch_of_the_pinned_version_stays(monkeypatch, pip_calls):
    fake_installed(monkeypatch, {"torch": "2.13.0"})
    install.install_torch(PINS, None)
    assert pip_calls == []


@pytest.mark.parametrize("present", [{}, {"torch": "2.12.1"}])
def test_a_missing_or_other_torch_is_replaced_without_its_dependencies(
    present, monkeypatch, pip_calls
):
    versions = dict(present)
    fake_installed(monkeypatch, versions)
    monkeypatch.setattr(
        install, "pip", lambda *a: (pip_calls.append(a), versions.update(torch="2.13.0"))
    )
    install.install_torch(PINS, None)
    (call,) = pip_calls
    assert call[-1] == "torch==2.13.0"
    assert "--no-deps" in call


def test_a_torch_of_the_users_choice_must_have_the_pinned_version(monkeypatch, pip_calls):
    fake_installed(monkeypatch, {"torch": "2.12.1"})
    with pytest.raises(
        install.InstallError, match=r"torch 2\.12\.1 is installed.*built against torch 2\.13\.0"
    ):
        install.install_torch(PINS, "wheels/torch-2.12.1.whl --pre")
    assert pip_calls[0][-2:] == ("wheels/torch-2.12.1.whl", "--pre")


@pytest.mark.parametrize("name, rival", [("cpu", "fbgemm-gpu"), ("gpu", "fbgemm-gpu-cpu")])
def test_a_change_of_set_leaves_one_fbgemm(name, rival, monkeypatch, pip_calls):
    pins = install.read_pins(name)
    (package,) = {"fbgemm-gpu", "fbgemm-gpu-cpu"} - {rival}
    versions = {package: pins[package], rival: "1.0.0"}
    fake_installed(monkeypatch, versions)
    # The rival's removal takes files of the package with it, until it is installed anew.
    monkeypatch.setattr(install, "is_intact", lambda _: len(pip_calls) != 1)
    monkeypatch.setattr(install.shutil, "rmtree", lambda *_, **__: None)
    install.install_fbgemm(pins)
    assert [call[0] for call in pip_calls] == ["uninstall", "uninstall", "install"]
    assert pip_calls[0][-1] == rival
    assert pip_calls[2][-1] == f"{package}=={pins[package]}"


def test_stock_triton_alone_is_removed_before_fbtriton_comes(monkeypatch, pip_calls):
    fake_installed(monkeypatch, {"triton": "3.6.0"})
    monkeypatch.setattr(install, "is_intact", lambda _: True)
    monkeypatch.setattr(install.shutil, "rmtree", lambda *_, **__: None)
    install.install_triton("3.7.4")
    assert [(call[0], call[-1]) for call in pip_calls] == [
        ("uninstall", "triton"),
        ("install", "fbtriton==3.7.4"),
    ]


def test_leftovers_of_a_stopped_pip_are_deleted(monkeypatch, tmp_path):
    for name in ("~orch", "~orch-2.11.0.dist-info", "torch"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(install.sysconfig, "get_path", lambda _: str(tmp_path))
    install.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_libraries_of_a_cuda_build_come_without_stock_triton():
    names = [
        "filelock",
        'optree>=0.13.0; extra == "optree"',
        'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        'triton==3.6.0; platform_system == "Linux"',
    ]
    assert install.torch_libraries(names, PINS) == [names[2]]
    assert install.torch_libraries(["filelock", "sympy>=1.13.3"], PINS) == []


def test_installed_ignores_the_local_tag(tmp_path, monkeypatch):
    folder = tmp_path / "torch_like-2.13.0+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-like\nVersion: 2.13.0+cpu\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert install.installed("torch-like") == "2.13.0"
    assert install.installed("no-such-package") is None


def without_make():
    """The environment without what an outer `make test` hands down."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def make(folder, *arguments):
    """What `make` would run, with every stamp missing."""
    return run("make", "-C", str(folder), "-n", "-B", *arguments, env=without_make())


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def test_make_train_passes_overrides_and_names_the_model_once(checkout):
    assert "train.py model=gem_small trainer.max_steps=2" in make(
        checkout, "train", "ARGS=trainer.max_steps=2"
    )
    assert "train.py  model=gem_base" in make(checkout, "train", "ARGS=model=gem_base")
    assert "model=" not in make(checkout, "train", "ARGS=experiment=x").split("train.py")[1]


def test_make_installs_movielens_only_where_it_is_asked_for(checkout):
    assert "install.py movielens" not in make(checkout, "train")
    assert "install.py movielens" in make(
        checkout, "train", "ARGS=data=movielens trainer.max_steps=2"
    )


def test_make_picks_the_gpu_set_where_a_driver_answers(checkout, tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for answer, chosen in (
        ("echo 'GPU 0: NVIDIA H200'", "gpu"),
        ("echo 'No devices were found'; exit 6", "cpu"),
    ):
        smi.write_text(f"#!/bin/sh\n{answer}\n")
        smi.chmod(0o755)
        assert f"scripts/install.py {chosen}" in make(checkout, "venv")
    assert "scripts/install.py gpu" in make(checkout, "venv", "SET=gpu")


def test_make_hands_torch_over_and_sets_up_again_for_it(checkout):
    plain, chosen = (
        make(checkout, "venv", "SET=cpu"),
        make(checkout, "venv", "SET=cpu", "TORCH=a/torch.whl"),
    )
    assert "--torch" not in plain
    assert "install.py cpu --torch 'a/torch.whl'" in chosen
    stamp = re.compile(r"touch (\S+)")
    assert stamp.search(plain)[1] != stamp.search(chosen)[1]


@pytest.fixture
def fake_python(checkout):
    """Put a shell script in the place of .venv's Python."""

    def write(script):
        for name in ("python", "pip"):
            path = checkout / ".venv" / "bin" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    return write


def test_make_sets_up_again_when_a_pin_changes_and_only_then(checkout, fake_python):
    fake_python('echo ran "$@"')

    def venv(*arguments):
        done = run("make", "-C", str(checkout), "venv", *arguments, env=without_make())
        return "ran scripts/install.py" in done

    assert venv("SET=cpu")
    assert not venv("SET=cpu")
    os.utime(checkout / "requirements/cpu.txt")
    assert not venv("SET=cpu")
    pins = checkout / "requirements/common.txt"
    pins.write_text(pins.read_text().replace("numpy==", "numpy==9."))
    assert venv("SET=cpu")
    assert venv("SET=gpu")
    assert venv("SET=cpu")


def test_a_set_up_that_failed_half_way_runs_again(checkout, fake_python):
    def venv(*arguments, exit_code=0):
        fake_python(f"echo ran; exit {exit_code}")
        command = ("make", "-C", str(checkout), "venv", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, env=without_make())
        return "ran" in done.stdout, done.returncode == 0

    assert venv("SET=gpu") == (True, True)
    assert venv("SET=cpu", exit_code=1) == (True, False)
    # What was there before the failure is no longer the GPU set.
    assert venv("SET=gpu") == (True, True)
    assert venv("SET=gpu") == (False, True)


def other_python(folder):
    """A Python of its own in `folder`, and what asks it about Triton."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    here = Path(metadata.distribution("pip").locate_file(""))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    for part in (here / "pip", *here.glob("pip-*.dist-info")):  # ensurepip takes seconds
        shutil.copytree(part, Path(site, part.name))
    question = (
        "import base64, hashlib, importlib.metadata as m, pathlib\n"
        "print(sorted(d.name for d in m.distributions() if 'triton' in d.name))\n"
        "wrong = []\n"
        "for f in m.distribution('fbtriton').files:\n"
        "    data = pathlib.Path(f.locate()).read_bytes() if f.hash else b''\n"
        "    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()\n"
        "    wrong += [str(f)] if f.hash and f.hash.value != digest.rstrip('=') else []\n"
        "print(wrong)\n"
        "import triton, triton.language.extra.tlx as tlx\n"
        "print(triton.__version__.partition('+')[0], hasattr(tlx, 'async_dot'))\n"
    )
    return python, lambda: run(python, "-c", question).splitlines()


@pytest.mark.install
def test_stock_triton_gives_way_to_fbtriton(tmp_path):
    python, ask = other_python(tmp_path / "venv")
    version = install.read_pins("common")["fbtriton"]
    pip = (python, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile")
    # Stock Triton as torch brings it, and fbtriton on top, as its own instructions say: two
    # packages in one folder, of which removing one breaks the other.
    run(*pip, STOCK_TRITON)
    run(*pip, f"fbtriton=={version}")
    assert "removing triton" in run(python, str(SCRIPT), "triton")
    assert ask() == ["['fbtriton']", "[]", f"{version} True"]
    assert run(python, str(SCRIPT), "triton") == ""


def test_the_wheel_holds_the_package_and_its_licence(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "gem", tmp_path / "gem", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__")
    )
    wheels = tmp_path / "wheels"
    pip = (sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", str(wheels), str(tmp_path))
    (wheel,) = wheels.glob("gem_ads-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(p.relative_to(tmp_path)) for p in (tmp_path / "gem").rglob("*.py")}
    assert sources <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "conf/")) for name in names)


def test_gem_is_installed_from_this_checkout():
    assert Path(importlib.util.find_spec("gem.env").origin).is_relative_to(ROOT)
    assert metadata.version("gem-ads")

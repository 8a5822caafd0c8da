"""Install the pinned packages of `requirements/` for the Python that runs this file.

    python scripts/install.py cpu                       # or gpu; `make` runs it in .venv
    python scripts/install.py cpu --torch PATH_OR_SPEC  # a build of torch of your own choice
    python scripts/install.py triton                    # only: leave fbtriton as the one Triton
    python scripts/install.py movielens                 # only: recbole, for its data file

Standard library and pip alone. Each step looks first at what is installed, so that a second run
changes nothing.

A plain `pip install -r` cannot express these sets: torchrec names fbgemm-gpu even where
fbgemm-gpu-cpu serves, and CUDA builds of torch name stock Triton, which lives in the same folder
as fbtriton. So every package is pinned, and installed without pip's resolver.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata as metadata
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ((3, 11), (3, 14))
STOCK_TRITON = ("triton", "pytorch-triton")
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
# Quiet but for errors. --no-compile: Python compiles what is imported, a small part of torch.
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-qq")
INSTALL = ("install", "--no-compile", "--no-warn-conflicts", "--progress-bar", "off")


class InstallError(RuntimeError):
    """A set-up that cannot go on; the message is one sentence for the user."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    return canonical(re.match(r"[A-Za-z0-9._-]+", requirement).group())


def read_pins(*names: str) -> dict[str, str]:
    """`{canonical package: version}` of requirements/NAME.txt, which holds exact pins alone."""
    pins = {}
    for name in names:
        for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
            line = line.partition("#")[0].strip()
            if not line:
                continue
            package, equals, version = line.partition("==")
            if not equals or not re.fullmatch(r"[0-9][A-Za-z0-9.]*", version):
                raise InstallError(
                    f"requirements/{name}.txt: {line!r} is not of the form package==version"
                )
            pins[canonical(package)] = version
    return pins


def installed(package: str) -> str | None:
    """The installed version without its local tag (2.13.0 for 2.13.0+cpu), or None."""
    importlib.invalidate_caches()
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def pip(*arguments: str) -> None:
    command = [*PIP, *arguments]
    if subprocess.run(command, check=False).returncode:
        raise InstallError(f"this command failed, its error is above: {shlex.join(command)}")


def pip_install(*arguments: str) -> None:
    """Exactly what is named, built where need be with the setuptools installed here."""
    pip(*INSTALL, "--no-deps", "--no-build-isolation", "--use-pep517", *arguments)


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def install_missing(pins: dict[str, str], label: str) -> None:
    wrong = [f"{name}=={version}" for name, version in pins.items() if installed(name) != version]
    if wrong:
        say(f"{label}: {', '.join(wrong) if len(wrong) < 4 else f'{len(wrong)} packages'}")
        pip_install(*wrong)


def install_torch(pins: dict[str, str], spec: str | None) -> None:
    """Install `spec` (what pip takes), or the pinned version unless some build of it is there."""
    version = pins["torch"]
    if spec is not None or installed("torch") != version:
        say(f"torch {version}" + (f" from {spec}" if spec else ""))
        pip_install(*(shlex.split(spec) if spec else [f"torch=={version}"]))
    found = installed("torch")
    if found != version:
        raise InstallError(
            f"torch {found} is installed, but this set is built against torch {version}: "
            f"give TORCH a wheel or requirement of version {version}"
        )


def torch_libraries(requires: list[str], pins: dict[str, str]) -> list[str]:
    """What torch names beyond the pins: NVIDIA's libraries for a CUDA build, else nothing.

    Stock Triton is left out, since fbtriton takes its place.
    """
    plain = [r for r in requires if "extra ==" not in r]
    return [r for r in plain if requirement_name(r) not in {*pins, *STOCK_TRITON}]


def install_torch_libraries(pins: dict[str, str]) -> None:
    libraries = torch_libraries(metadata.requires("torch") or [], pins)
    if not libraries:
        return
    say(f"what this CUDA build of torch needs: {len(libraries)} packages and their own")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        every = {**pins, **read_pins("cuda")}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in every.items()))
        pip(*INSTALL, "-c", str(constraints), *libraries)


def is_intact(package: str) -> bool:
    """Whether every file that the package's RECORD lists is there with the listed size."""
    for file in metadata.distribution(package).files or []:
        if file.size is not None:
            path = Path(file.locate())
            if not path.is_file() or path.stat().st_size != file.size:
                return False
    return True


def install_alone(package: str, version: str, rivals: tuple[str, ...], folder: str) -> None:
    """Leave `package` as the only one of it and its rivals, which write the same `folder`.

    Removing a rival takes files of the package with it, and installing one overwrites them, so
    the package is put back whenever its files are not the ones that its wheel lists.
    """
    present = [name for name in rivals if installed(name) is not None]
    if present:
        say(f"removing {', '.join(present)}, which shares its folder with {package}")
        pip("uninstall", "-y", *present)
    if installed(package) == version and is_intact(package):
        return
    if installed(package) is not None:
        pip("uninstall", "-y", package)
    shutil.rmtree(Path(sysconfig.get_path("platlib"), folder), ignore_errors=True)
    say(f"{package} {version}")
    pip_install(f"{package}=={version}")
    if not is_intact(package):
        raise InstallError(f"files of {package} are missing: remove .venv and run make again")


def install_triton(version: str) -> None:
    install_alone("fbtriton", version, STOCK_TRITON, "triton")


def install_fbgemm(pins: dict[str, str]) -> None:
    (package,) = (name for name in FBGEMM if name in pins)
    rivals = tuple(name for name in FBGEMM if name != package)
    install_alone(package, pins[package], rivals, "fbgemm_gpu")


def sweep() -> None:
    """Delete what pip leaves when it is stopped while replacing a package (folders like ~orch)."""
    for leftover in Path(sysconfig.get_path("platlib")).glob("~*"):
        shutil.rmtree(leftover, ignore_errors=True)


def install_set(name: str, torch_spec: str | None) -> None:
    start = time.monotonic()
    sweep()
    pins = read_pins("common", name, "test")
    install_missing({"setuptools": pins["setuptools"]}, "build tool")
    install_torch(pins, torch_spec)
    apart = ("torch", "fbtriton", *FBGEMM)
    install_missing({n: v for n, v in pins.items() if n not in apart}, "pinned packages")
    install_torch_libraries(pins)
    install_fbgemm(pins)
    install_triton(pins["fbtriton"])
    pip_install("--editable", str(ROOT))
    say(f"the {name.upper()} set is in place ({time.monotonic() - start:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["cpu", "gpu", "triton", "movielens"])
    parser.add_argument(
        "--torch", metavar="PATH_OR_SPEC", help="what pip shall install as torch (cpu, gpu)"
    )
    arguments = parser.parse_args()
    first, last = PYTHONS
    try:
        if not first <= sys.version_info[:2] <= last:
            raise InstallError(
                f"this is Python {sys.version.split()[0]}, but the pinned packages are published "
                f"for {'.'.join(map(str, first))} to {'.'.join(map(str, last))}: remove .venv and "
                "choose one with make PYTHON=..."
            )
        if arguments.what == "triton":
            install_triton(read_pins("common")["fbtriton"])
        elif arguments.what == "movielens":
            install_missing(read_pins("movielens"), "MovieLens-100K")
        else:
            install_set(arguments.what, arguments.torch)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

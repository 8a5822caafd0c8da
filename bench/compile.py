"""Compiles the attention kernels ahead of time, without a GPU, and prints what the assembler says.

    python -m bench.compile                          # every kernel of every backend, for cuda:90
    python -m bench.compile '*backward*' --target cuda:100 --strict

A backend module takes part by a function `compile_cases()` that yields

    (name, kernel, signature, constexprs, options)

where `kernel` is a `@triton.jit` function, `signature` maps its arguments to Triton's types
("*bf16", "i32", "fp32"; "*bf16:16" and "i32:16" state that it is divisible by 16), `constexprs`
holds the compile-time arguments and `options` what a launch would pass (num_warps, num_stages).
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gem.ptxas import VARIABLES, ptxas_version, use_installed_ptxas

ALLOCATION = "--regAllocOptLevel"  # of Triton's call of ptxas
_NOTICE = re.compile(r"\(C\d+\)|\bwarning\b|serialized", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the assembler says of one kernel.

    Attributes:
        name: of the case.
        registers: per thread (with `setmaxnreg`, of the launch).
        spill_stores, spill_loads, stack: bytes per thread.
        shared: bytes of shared memory per block, static and dynamic.
        notices: warnings and notices, such as those of a serialized wgmma (C7510 to C7519).
        asm: the stages by name ("ttgir", "ptx", ...).
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    notices: tuple[str, ...]
    asm: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)

    @property
    def clean(self) -> bool:
        """No spills and no notices."""
        return not (self.spill_stores or self.spill_loads or self.notices)


def report(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    target: str = "cuda:90",
) -> CompileReport:
    """Compiles one kernel for `target` ("cuda:90") and assembles it with the pinned ptxas.

    Raises:
        ValueError: if an argument of the kernel is in neither `signature` nor `constexprs`.
        RuntimeError: if ptxas fails.
        triton.CompilationError: if the kernel does not compile.
    """
    use_installed_ptxas()
    import triton
    from triton.backends.compiler import GPUTarget

    system, capability = target.split(":")
    constexprs, types, attrs = dict(constexprs or {}), {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constexprs:
            types[argument] = "constexpr"
        elif argument in signature:
            types[argument], _, divisor = signature[argument].partition(":")
            if divisor:
                attrs[(place,)] = [["tt.divisibility", int(divisor)]]
        else:
            raise ValueError(f"{name}: argument {argument!r} has neither a type nor a value")
    source = triton.compiler.ASTSource(kernel, types, constexprs, attrs)
    compiled = triton.compile(
        source, target=GPUTarget(system, int(capability), 32), options=dict(options or {})
    )
    flags = (compiled.metadata.ptx_options or "").split()
    if not any(flag.startswith(ALLOCATION) for flag in flags):  # the last one counts
        flags.append(f"{ALLOCATION}=2")
    output = assemble(compiled.asm["ptx"], int(capability), flags)
    return parse(name, output, int(compiled.metadata.shared), compiled.asm)


def assembler(capability: int) -> str:
    """The ptxas that Triton would call for a target."""
    use_installed_ptxas()
    named = os.environ.get(VARIABLES[1 if capability >= 100 else 0])
    if named:
        return named
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    return tool.path


def assemble(ptx: str, capability: int, flags: Sequence[str] = ()) -> str:
    """What `ptxas -v` prints for a module."""
    found = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    architecture = found.group(1) if found else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler(capability), "-v", *flags, f"--gpu-name={architecture}", source]
        done = subprocess.run(
            [*command, "-o", Path(folder) / "kernel.cubin"], capture_output=True, text=True
        )
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"ptxas failed: {output.strip()[-2000:]}")
    return output


def parse(
    name: str, output: str, dynamic_shared: int = 0, asm: dict[str, Any] | None = None
) -> CompileReport:
    """Reads the output of `ptxas -v` of a module with one kernel; the worst where it has more."""

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, output)), default=0)

    return CompileReport(
        name,
        registers=largest(r"Used (\d+) registers"),
        spill_stores=largest(r"(\d+) bytes spill stores"),
        spill_loads=largest(r"(\d+) bytes spill loads"),
        stack=largest(r"(\d+) bytes stack frame"),
        shared=dynamic_shared + largest(r"(\d+) bytes smem"),
        notices=tuple(line.strip() for line in output.splitlines() if _NOTICE.search(line)),
        asm=dict(asm or {}),
    )


def cases(pattern: str = "*") -> Iterator[tuple]:
    """The cases of all backend modules whose names match."""
    import gem.attention.backends as package

    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        found = getattr(importlib.import_module(module.name), "compile_cases", None)
        if found is not None:
            yield from (case for case in found() if fnmatch.fnmatchcase(case[0], pattern))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.compile", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("pattern", nargs="?", default="*", help="names of kernels (all)")
    parser.add_argument("--target", default="cuda:90")
    parser.add_argument("--strict", action="store_true", help="fail on spills and notices")
    args = parser.parse_args(argv)
    path = assembler(int(args.target.split(":")[1]))
    print(f"{args.target}, ptxas {ptxas_version(path)}")
    heads = ("registers", "spill stores", "spill loads", "stack", "shared")
    print(f"{'kernel':<56}" + "".join(f"{head:>13}" for head in heads))
    failed = found = 0
    for case in cases(args.pattern):
        found += 1
        try:
            r = report(*case, target=args.target)
        except Exception as error:  # noqa: BLE001 - one kernel's failure is a line, others go on
            print(f"{case[0]:<56}  {type(error).__name__}: {str(error).strip()[-300:]}")
            failed += 1
            continue
        figures = (r.registers, r.spill_stores, r.spill_loads, r.stack, r.shared)
        print(f"{r.name:<56}" + "".join(f"{n:>13}" for n in figures), flush=True)
        for notice in r.notices:
            print(f"    {notice[:200]}")
        failed += args.strict and not r.clean
    if not found:
        print(f"no kernel is named {args.pattern!r}")
    return int(bool(failed) or not found)


if __name__ == "__main__":
    sys.exit(main())

"""Runs somebody's own TLX kernel: `python -m gem.attention.simulator FILE:FUNCTION`."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from pathlib import Path

import torch

from gem.attention.simulator import SimulationError, Trace, simulated
from gem.attention.simulator.driver import stand_in
from gem.attention.simulator.targets import TARGETS

EXAMPLE = """\
FUNCTION is a Python function that makes CPU tensors and launches kernels as it would on a GPU:

    # mine.py
    def check():
        x, out = torch.randn(4096), torch.empty(4096)
        my_kernel[(8,)](x, out, BLOCK=512, num_warps=4)
        torch.testing.assert_close(out, x.exp())

    python -m gem.attention.simulator mine.py:check --seeds 20

It is called once per seed. Seed 0 makes asynchronous operations take effect as late as possible,
seed 1 at once, the others at random times (what TMA stores have read may be written later still).
If it takes a parameter `seed`, it is given that. The exit code is 1 if a fault is reported or the
function raises AssertionError. docs/simulator.md says what is checked and how to read a report.
"""


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, runs, prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m gem.attention.simulator",
        description="Runs TLX kernels on a CPU and reports deadlocks, races and wrong numbers.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="FILE:FUNCTION", help="the function that launches kernels")
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (default: 10)")
    parser.add_argument("--seed", type=int, help="one seed alone, as a report names it")
    parser.add_argument("--target", default="sm_90", choices=list(TARGETS))
    parser.add_argument("--processors", type=int, default=2, help="of the simulated GPU")
    parser.add_argument(
        "--compiler-fences",
        action="store_true",
        help="async_descriptor_store needs no fence before it: Triton's compiler puts one there",
    )
    parser.add_argument("--trace", metavar="JSON", help="write a trace for Perfetto")
    options = parser.parse_args(arguments)
    file, _, name = options.what.rpartition(":")
    if not file or not Path(file).is_file():
        parser.error(f"{options.what!r} is not FILE:FUNCTION, or there is no such file")
    stand_in(options.target)
    function = getattr(_module(Path(file)), name, None)
    if not callable(function):
        parser.error(f"{file} has no function {name!r}")
    trace = Trace() if options.trace else None
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, but is {options.seeds}")
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    failed = launched = 0
    for seed in seeds:
        torch.manual_seed(seed)
        given = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
        settings = {"processors": options.processors, "compiler_fences": options.compiler_fences}
        with simulated(options.target, seed, trace=trace, **settings) as counts:
            try:
                function(**given)
                launched += counts.programs
                print(f"seed {seed}: {counts}")
            except (SimulationError, AssertionError) as e:
                failed += 1
                print(f"seed {seed}: {e if isinstance(e, SimulationError) else f'wrong: {e}'}")
    if not failed and not launched:
        print(f"{name}() launched no kernel, so that nothing was checked")
        return 2
    if trace is not None:
        trace.save(options.trace)
    print(f"{failed} of {len(seeds)} seeds failed" if failed else "no fault found")
    return 1 if failed else 0


def _module(path: Path):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())

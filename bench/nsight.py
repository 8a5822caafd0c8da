"""One contender on one row under Nsight Compute."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from bench.inputs import fresh_seed, make_problems
from bench.peers import contenders as all_contenders
from bench.peers.base import Unavailable

METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe, %",
    "sm__inst_executed_pipe_tensor_op_hmma.sum": "tensor instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM throughput, %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM throughput, %",
    "dram__bytes.sum": "DRAM traffic",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "local loads",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "local stores",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared memory per block",
    "launch__occupancy_limit_shared_mem": "blocks that shared memory allows",
    "smsp__cycles_active.avg": "active cycles",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel launch: its name and "value unit" by metric."""

    name: str
    values: dict[str, str]


def profile_row(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Serves `--profile ROW`: runs itself under ncu, or, inside, the one call."""
    if len(args.contenders) != 1 or len(args.passes) != 1:
        print("--profile wants one --contenders and one --pass")
        return 2
    if args.under_ncu:
        return _one_call(args)
    if not torch.cuda.is_available():
        print("--profile needs a CUDA device, and torch sees none")
        return 2
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        print("--profile needs Nsight Compute, and there is no ncu on the PATH")
        return 2
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--page", "raw"]
    command += ["--target-processes", "all", sys.executable, "-m", "bench.attention", *argv]
    done = subprocess.run([*command, "--under-ncu"], stdout=subprocess.PIPE, text=True)
    kernels = parse(done.stdout)
    if not kernels:
        reasons = [line for line in done.stdout.splitlines() if "ERR" in line or "==" in line]
        print("\n".join(["ncu measured no kernel:", *(reasons or done.stdout.splitlines())[-10:]]))
        return 1
    show(kernels)
    return 0


def parse(output: str) -> list[Kernel]:
    """Kernels from `ncu --csv --page raw`: a line of names, one of units, then one per launch."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        return []
    names, units, launches = rows[0], rows[1], rows[2:]
    return [
        Kernel(
            line[names.index("Kernel Name")],
            {
                name: f"{line[i]} {units[i]}".strip()
                for i, name in enumerate(names)
                if name in METRICS and i < len(line) and line[i]
            },
        )
        for line in launches
    ]


def show(kernels: Iterable[Kernel]) -> None:
    """A table with a column per kernel launch."""
    kernels = list(kernels)
    table = Table(pad_edge=False)
    table.add_column("")
    for kernel in kernels:
        table.add_column(kernel.name[:40], justify="right")
    for metric, text in METRICS.items():
        if any(metric in kernel.values for kernel in kernels):
            table.add_row(text, *(kernel.values.get(metric, "-") for kernel in kernels))
    Console(width=max(80, 30 + 24 * len(kernels)), highlight=False).print(table)


def _one_call(args: argparse.Namespace) -> int:
    """Sets up the call, runs it twice, then once between the marks that ncu waits for."""
    rows = [row for row in args.rows if row.name == args.profile]
    if not rows:
        print(f"--profile: no row is named {args.profile!r}", file=sys.stderr)
        return 2
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    problems = make_problems(rows[0], dtype, device, fresh_seed(), 0)
    contender = all_contenders(args.deterministic)[args.contenders[0]]
    try:
        builders = contender.routes(problems)
        if args.route is not None and args.route not in builders:
            raise Unavailable(f"routes are {list(builders)}, not {args.route!r}")
        route = builders[args.route or next(iter(builders))]()[0]
    except Unavailable as reason:
        print(f"{contender.name}: {reason}", file=sys.stderr)
        return 1
    if args.passes == ["backward"]:
        route.prepare_backward()
    call = getattr(route, args.passes[0])
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    return 0

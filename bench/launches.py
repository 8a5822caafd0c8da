"""Launch shapes of our kernels against each other on rows of shapes.yaml, in rounds.

    python -m bench.launches --rows self_k256_s0.5 --shapes 2x128.2.2.240p 2x64.4.2.240pw
    python -m bench.launches --rows '*k4096*' --keys 64 128        # every switch of two consumers
    python -m bench.launches --pass backward --rows 'self*' --out bench/results/launches.json

A shape is CONSUMERSxKEYS.STAGES.Q_STAGES.REGISTERS with the letters p (ping-pong), w (probabilities
carried in float32), k (keeps its queries) and c (counter), as in `tlx_.Shape`; `chosen` is what the
backend takes by itself. A backward has forms instead (`tlx_backward.Form`), of which `keys split`
is that of `deterministic=True` where not all samples can be whole; Triton's stands beside them.

A GPU's clock falls as it gets hot, and whoever is measured first has an advantage. So all graphs
are captured first and then replayed in turns; the figure is the median over the rounds' medians.
Every result is held against float64 (`gem.attention.testing`); one that is off gets no time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from bench import machine
from bench.inputs import fresh_seed, make_problems
from bench.row import GRADIENTS
from bench.shapes import Row, choose, load
from bench.timing import in_rounds, short_reason, side_stream
from gem.attention.backends import tlx_, tlx_backward, triton_
from gem.attention.backends.tlx_backward import Form, form_of
from gem.attention.testing import Judge, Problem, call_of

SWITCHES = {"p": "ping_pong", "w": "p_wide", "k": "keep_q", "c": "counter"}
_SHAPE = re.compile(r"(\d)x(\d+)\.(\d)\.(\d)\.(\d+)([pwkc]*)")


def shape_from(text: str) -> tlx_.Shape:
    """A launch shape from its short name.

    Raises:
        ValueError: if the text is none.
    """
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"no launch shape: {text!r}; one is like 2x128.2.2.240p")
    *numbers, letters = found.groups()
    switches = {SWITCHES[letter]: True for letter in letters}
    return tlx_.Shape(*map(int, numbers), **switches)


def name_of(shape: tlx_.Shape) -> str:
    """The short name that `shape_from` reads."""
    letters = "".join(c for c, switch in SWITCHES.items() if getattr(shape, switch))
    numbers = shape.keys, shape.stages, shape.q_stages, shape.registers
    return f"{shape.consumers}x{'.'.join(map(str, numbers))}{letters}"


def with_every_switch(shape: tlx_.Shape) -> list[tlx_.Shape]:
    """The shape with each choice of ping-pong, carried probabilities and counter."""
    return [
        dataclasses.replace(shape, ping_pong=p, p_wide=w, counter=c)
        for p, w, c in itertools.product((False, True), repeat=3)
    ]


def forwards(problem: Problem, shapes: Sequence[tlx_.Shape]) -> dict[str, Callable[[], dict]]:
    """By name, the forward of each shape and of the chosen one."""
    call = dataclasses.replace(call_of(problem), direction="forward")

    def forward(shape: tlx_.Shape) -> dict[str, Tensor]:
        out, lse = tlx_.launch(call, problem.q, problem.k, problem.v, shape)
        return {"out": out, "lse": lse}

    chosen = tlx_.shape_of(call, problem.q)
    found = {f"chosen ({name_of(chosen)})": partial(forward, chosen)}
    return found | {name_of(shape): partial(forward, shape) for shape in shapes if shape != chosen}


def backwards(problem: Problem) -> dict[str, Callable[[], dict]]:
    """By name, the backward in the chosen form, in the others that can serve, and by Triton."""
    inputs = problem.q, problem.k, problem.v
    forward = dataclasses.replace(call_of(problem), direction="forward")
    call = dataclasses.replace(forward, direction="backward")
    given = (call, problem.dout, None, *inputs, *tlx_.forward(forward, *inputs))

    def backward(function: Callable, *form: Form) -> dict[str, Tensor]:
        return dict(zip(GRADIENTS, function(*given, *form), strict=True))

    forms = [form_of(call, problem.q), Form("keys"), Form("keys", split=True)]
    if call.form == "jagged" and call.left is None and call.right is None:
        forms.append(Form("keys", whole=True))
    found = {}
    for form in dict.fromkeys(forms):
        words = (form.kept, "split" * form.split, "whole" * form.whole)
        name = " ".join(filter(None, words))
        name = f"chosen ({name})" if form == forms[0] else name
        found[name] = partial(backward, tlx_backward.backward, form)
    return found | {"triton": partial(backward, triton_.backward)}


def measure(
    row: Row, direction: str, shapes: Sequence[tlx_.Shape], args: argparse.Namespace
) -> dict:
    """One row's entry: by name milliseconds and the error over what is allowed, or what failed."""
    device, seed = torch.device(args.device), fresh_seed()
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    problems = make_problems(row, torch.bfloat16, device, seed, l2)
    judge = Judge(problems[0], gradients=direction == "backward")
    make = partial(forwards, shapes=shapes) if direction == "forward" else backwards
    calls: dict[str, list[Callable]] = {}
    with torch.no_grad():
        for problem in problems:
            for name, call in make(problem).items():
                calls.setdefault(name, []).append(call)
        errors, failed = {}, {}
        for name, (first, *_) in calls.items():
            try:
                errors[name] = max(c.ratio for c in judge.compare(first()).values())
            except Exception as error:  # noqa: BLE001 - a shape may not fit, others go on
                failed[name] = short_reason(error)
        right = {name: calls[name] for name, error in errors.items() if error <= 1}
        ms = in_rounds(right, device, args.rounds, args.min_ms)
    flops = row.flops(direction)
    return {
        "name": row.name,
        "pass": direction,
        "seed": seed,
        "ms": ms,
        "tflops": {name: flops / x / 1e9 for name, x in ms.items()},
        "errors": errors,
        "failed": failed,
    }


def show(entries: Sequence[Mapping], console: Console) -> None:
    for entry in entries:
        heads = "ms", "TFLOP/s", "over the fastest", "error over what is allowed"
        table = Table(Column("launch", no_wrap=True), *heads, title=entry["name"])
        best = min(entry["ms"].values(), default=0.0)
        for name in sorted(entry["errors"], key=lambda name: entry["ms"].get(name, math.inf)):
            if name in entry["ms"]:
                ms = entry["ms"][name]
                figures = f"{ms:.4f}", f"{entry['tflops'][name]:.0f}", f"{ms / best:.3f}"
            else:
                figures = ("-", "-", "broken")
            table.add_row(name, *figures, f"{entry['errors'][name]:.2f}")
        for name, reason in entry["failed"].items():
            table.add_row(name, "-", "-", reason, "-")
        console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.launches", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--rows", nargs="+", required=True, metavar="NAME", help="row names or patterns")
    add("--pass", default="forward", choices=("forward", "backward"), dest="direction")
    add("--shapes", nargs="+", default=[], metavar="SHAPE", help="like 2x128.2.2.240p")
    add("--keys", nargs="+", type=int, default=[], choices=(64, 128), help="all switches of these")
    add("--rounds", type=int, default=5)
    add("--min-ms", type=float, default=12.0, help="of each launch in each round")
    add("--device", default="cuda")
    add("--out", type=Path, metavar="FILE.json", help="JSON to write")
    args = parser.parse_args(argv)
    try:
        args.rows = choose(load(), [], args.rows)
        args.shapes = [shape_from(text) for text in args.shapes]
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    device, entries = torch.device(args.device), []
    if device.type != "cuda" or not torch.cuda.is_available():
        print("bench.launches measures GPU kernels, and torch sees no CUDA device")
        return 2
    with side_stream(device):
        for row in args.rows:
            stages = {64: 4, 128: 2} if row.dim > 64 else {64: 6, 128: 4}
            swept = [
                shape
                for keys in args.keys
                for shape in with_every_switch(tlx_.Shape(2, keys, stages[keys], 2, 240))
            ]
            entries.append(measure(row, args.direction, [*args.shapes, *swept], args))
            show(entries[-1:], Console())
    if args.out is not None:
        command = f"python -m bench.launches {shlex.join(argv)}"
        facts = {"machine": machine.describe(device), "command": command}
        facts |= {"date": date.today().isoformat(), "rounds": args.rounds, "rows": entries}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The attention benchmark: every backend and every peer on the rows of shapes.yaml.

    python -m bench.attention                                   # all rows, both passes
    python -m bench.attention --sets broadcast --rows '*d64*' --pass forward --deadline 500
    python -m bench.attention --table FILE.json --sets self     # print the tables again
    python -m bench.attention --plot FILE.json                  # FILE.png
    python -m bench.attention --docs FILE.json                  # rewrite docs/benchmarks.md
    python -m bench.attention --profile ROW --pass backward --contenders triton

Rows that the results file already has from this boot of the machine are not measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from bench import machine, report
from bench.inputs import fresh_seed
from bench.lost import DeviceLost
from bench.peers import contenders as all_contenders
from bench.results_file import ResultsFile, read
from bench.roofline import measure_ceilings
from bench.row import PASSES, Measured, Outcome, measure_row, summarise
from bench.shapes import SHAPES, Row, choose, load
from bench.timing import short_reason, side_stream

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "benchmarks.md"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.attention", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--sets", nargs="+", default=[], metavar="SET", help="sets of the shapes file (all)")
    add("--rows", nargs="+", default=[], metavar="NAME", help="row names or patterns (all)")
    add("--pass", nargs="+", default=list(PASSES), choices=PASSES, dest="passes")
    add("--contenders", nargs="+", default=[], metavar="NAME", help="peers and backends (all)")
    add("--without", nargs="+", default=[], metavar="NAME", help="contenders left out")
    add("--out", type=Path, default=ROOT / "results" / "attention.json", help="JSON to add to")
    add("--shapes", type=Path, default=SHAPES, help="another file of rows")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--deterministic", action="store_true", help="ask our backends for the same bits")
    add("--min-ms", type=float, default=50.0, help="at least so much of repeats per contender")
    add("--deadline", type=float, metavar="SECONDS", help="start no row that would end later")
    add("--again", action="store_true", help="measure rows anew that are done")
    add("--replace", action="store_true", help="drop the file's rows of another machine or boot")
    add("--seed", type=int, help="of the data (default: fresh for every row, recorded)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--brief", action="store_true", help="no tables at the end")
    add("--list", action="store_true", help="print rows and contenders, measure nothing")
    for name, text in (
        ("table", "print the tables of results"),
        ("markdown", "print results as Markdown"),
        ("docs", "rewrite the results in docs/benchmarks.md"),
        ("plot", "draw results as a PNG beside them"),
    ):
        add(f"--{name}", type=Path, metavar="FILE.json", help=text)
    add("--profile", metavar="ROW", help="one row under Nsight Compute")
    add("--route", help="for --profile: which of a contender's routes, such as cudnn")
    add("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.some = bool(args.sets or args.rows)
    try:
        args.rows = choose(load(args.shapes), args.sets, args.rows)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    known = all_contenders(args.deterministic)
    if unknown := [n for n in [*args.contenders, *args.without] if n not in known]:
        parser.error(f"contenders must be among {list(known)}, but got {unknown}")
    args.contenders = [
        n for n in known if (not args.contenders or n in args.contenders) and n not in args.without
    ]
    return args


def show(args: argparse.Namespace) -> bool:
    """Serves the options that measure nothing; False where there is none."""
    names = {row.name for row in args.rows} if args.some else None

    def chosen(path: Path) -> dict:
        data = read(path)
        rows = [r for r in data["rows"] if r["pass"] in args.passes]
        return {**data, "rows": [r for r in rows if names is None or r["name"] in names]}

    if args.table:
        report.print_tables(chosen(args.table))
    elif args.markdown:
        print(report.markdown(chosen(args.markdown)))
    elif args.docs:
        report.rewrite(PAGE, read(args.docs))
    elif args.plot:
        from bench.plot import plot

        plot(chosen(args.plot), args.plot.with_suffix(".png"))
        print(args.plot.with_suffix(".png"))
    elif args.list:
        for row in args.rows:
            print(f"{row.set:<10} {row.name}")
        print("contenders:", *args.contenders)
    else:
        return False
    return True


def run(args: argparse.Namespace, command: str) -> int:
    """Measures the rows; 0, or 3 where a contender took the GPU with it."""
    began = time.monotonic()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    facts = machine.describe(device)
    results = ResultsFile(args.out, facts["boot"], load(args.shapes))
    if results.is_of_another_boot() and not args.replace:
        print(
            f"{args.out} has rows of another machine or of this one before it was started anew "
            f"({results.describe()}): name another --out, or drop them by --replace"
        )
        return 2
    known = all_contenders(args.deterministic)
    chosen = [known[name] for name in args.contenders]

    def passes_left(row: Row) -> list[str]:
        key = (args.dtype, args.deterministic, args.contenders)
        return [p for p in args.passes if args.again or not results.is_done(row.name, p, *key)]

    todo = [row for row in args.rows if passes_left(row)]
    print(
        f"{facts['gpu'] or 'CPU'}, boot {facts['boot']}: {len(todo)} of {len(args.rows)} rows to "
        f"measure with {' '.join(args.contenders)}",
        flush=True,
    )
    left, took = list(todo), []
    with side_stream(device):
        ceilings = results.ceilings(args.dtype)
        if ceilings is None:
            ceilings = {**measure_ceilings(dtype, device), "dtype": args.dtype}
        results.start(facts, command, date.today().isoformat(), ceilings)
        print(
            f"ceilings: {ceilings['matmul_tflops']:.0f} TFLOP/s, {ceilings['copy_tb_s']:.2f} TB/s",
            flush=True,
        )
        for i, row in enumerate(todo):
            elapsed = time.monotonic() - began
            # Early rows compile more than later ones.
            expected = 1.2 * max(took[-4:], default=0.0)
            if args.deadline is not None and elapsed + expected > args.deadline:
                break
            passes = passes_left(row)
            seed = fresh_seed() if args.seed is None else args.seed
            try:
                measured = measure_row(
                    row,
                    chosen,
                    passes,
                    dtype=dtype,
                    device=device,
                    seed=seed,
                    min_ms=args.min_ms,
                    faults=results.faults(row.name),
                )
            except DeviceLost as lost:
                results.add_fault(row.name, lost.direction, lost.contender, lost.reason)
                print(f"{row.name}: {lost}; run the same command again, it leaves this out")
                return 3
            except Exception as error:  # noqa: BLE001 - the other rows go on
                print(f"{row.name}: failed before any contender: {short_reason(error)}", flush=True)
                error.__traceback__ = None
                gc.collect()
                continue
            ours = [c.name for c in chosen if c.ours]
            entries = [
                summarise(
                    row,
                    p,
                    measured.outcomes[p],
                    measured.yardstick,
                    ceilings,
                    ours,
                    dtype,
                    measured.matmul[p],
                )
                | {
                    "deterministic": args.deterministic,
                    "contenders": args.contenders,
                    "seed": seed,
                    "input_sets": measured.input_sets,
                    "judge_s": round(measured.judge_s / len(passes), 4),
                }
                for p in passes
            ]
            results.put(entries)
            left.remove(row)
            now = time.monotonic() - began
            took.append(now - elapsed)
            print(f"[{i + 1}/{len(todo)}] {row.name} ({took[-1]:.0f} s, at {now:.0f} s)")
            for p, entry in zip(passes, entries, strict=True):
                print(f"  {progress(p, measured.outcomes[p], entry['ratio'])}")
            print(f"  {costs(measured)}", flush=True)
    if left:
        print(f"{len(left)} rows left: {' '.join(row.name for row in left)}")
    print(f"{args.out.name}: {'complete' if results.complete else 'not complete'}")
    if not args.brief:
        report.print_tables(results.data)
    return 0


def progress(direction: str, outcomes: dict[str, Outcome], ratio: float | None) -> str:
    """One short line: milliseconds by contender, or what became of it, and the ratio."""
    parts = []
    for name, outcome in outcomes.items():
        if outcome.timing is not None:
            mark = {"profiler": "~", "events": "<"}.get(outcome.timing.timer, "")
            parts.append(f"{name} {mark}{outcome.timing.ms:.3f}")
        elif outcome.compared is not None:
            parts.append(f"{name} BROKEN")
    line = f"{direction[:3]} ms: {' '.join(parts)}"
    if ratio is not None:
        line += f" x{ratio:.2f}"
    skipped = [n for n, o in outcomes.items() if o.skipped is not None]
    return f"{line} | no {','.join(skipped)}" if skipped else line


def costs(measured: Measured) -> str:
    """One short line: wall seconds of the judge and of each contender, both passes together."""
    total = {"judge": measured.judge_s}
    for outcomes in measured.outcomes.values():
        for name, outcome in outcomes.items():
            if outcome.cost_s:
                total[name] = total.get(name, 0.0) + outcome.cost_s
    return "cost s: " + " ".join(f"{name} {seconds:.1f}" for name, seconds in total.items())


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    # A folder of this machine says nothing elsewhere.
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    command = shlex.join(["python", "-m", "bench.attention", *words])
    try:
        if show(args):
            return 0
    except (OSError, json.JSONDecodeError) as error:
        print(f"the results file cannot be read: {error}")
        return 2
    if args.profile:
        from bench.nsight import profile_row

        return profile_row(args, argv)
    try:
        return run(args, command)
    except json.JSONDecodeError as error:
        print(f"{args.out} is not a results file: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""What the schedules of a batch cost the host: milliseconds to build each from the lengths.

    python -m bench.schedule                                     # a few rows of shapes.yaml
    python -m bench.schedule --rows '*' --out bench/results/schedule_cpu.json

A schedule is built once per batch and shared by all layers. Lengths are fresh at every build, from
the distribution of the row, and the table stays in host memory: its copy is not part of the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Column, Table

from bench.quality import versions
from bench.shapes import Row, choose, load
from gem.attention import dealing, schedule
from gem.attention.backends import tlx_, tlx_backward

ROWS = (
    "b1024_q192_h3_d128_k1000_s0.5",
    "b512_q256_h4_d128_k4096_s0.5",
    "b1024_q64_h4_d128_k512_s0.5",
    "self_k512_s0.5",
    "self_k2048_s0.5",
    "window_256",
    "window_causal_512",
    "gqa_8_2",
)
PROCESSORS = 132  # of an H200
CPU = torch.device("cpu")


def builders(row: Row) -> dict[str, Callable[[torch.Tensor], object]]:
    """By kind of schedule, what builds it from lengths as the TLX backend would for the row."""
    left, right = row.sides
    block_d = 64 if row.dim <= 64 else 128
    mean = row.density * row.max_keys
    means = (row.queries if row.broadcast else mean), mean
    shape = tlx_.forward_shape(block_d, row.broadcast, *means, left is not None)
    block_q = tlx_backward.step_rows(block_d)

    def queries(lengths: torch.Tensor) -> torch.Tensor | int:
        return row.queries if row.broadcast else lengths

    def dealt_tiles(x: torch.Tensor) -> dealing.DealtTiles:
        blocks = 64 * shape.consumers, shape.keys
        shared = row.queries if row.broadcast else None
        keep_q, team, ctas = tlx_.team_of(shape, row.heads, shared, x, PROCESSORS)
        return dealing.dealt_tiles(
            x, queries(x), left, right, row.heads, *blocks, CPU, ctas, team,
            not shape.counter, not keep_q,
        )  # fmt: skip

    def whole(x: torch.Tensor) -> bool:
        if row.broadcast or left is not None or right is not None:
            return False
        return tlx_backward.whole_pays(x, x, row.kv_heads, PROCESSORS)

    def dealt_keys(x: torch.Tensor) -> dealing.KeyTiles:
        blocks = tlx_backward.BLOCK_K, block_q
        return dealing.dealt_keys(
            x, queries(x), left, right, row.kv_heads, *blocks, CPU, PROCESSORS, whole(x)
        )

    def statistic_tiles(x: torch.Tensor) -> torch.Tensor:
        block_k = tlx_backward.BLOCK_K if whole(x) else 0
        return dealing.statistic_tiles(x, queries(x), block_q, CPU, block_k)

    found = {"dealt_tiles": dealt_tiles}
    kept = row.broadcast and tlx_backward.keeps_queries(row.queries, row.heads, row.kv_heads)
    if kept:
        workers = PROCESSORS // row.heads
        return found | {"key_segments": lambda x: schedule.key_segments(x, workers, CPU)}
    return found | {"dealt_keys": dealt_keys, "statistic_tiles": statistic_tiles}


def milliseconds(row: Row, build: Callable[[torch.Tensor], object], builds: int) -> float:
    """The median over builds, each from lengths of its own."""
    taken = []
    for number in range(builds + 1):  # the first, which also warms up, does not count
        fresh = dataclasses.replace(row, name=f"{row.name} {number}")
        lengths = torch.from_numpy(fresh.lengths())
        began = time.perf_counter()
        build(lengths)
        taken.append((time.perf_counter() - began) * 1e3)
    return round(median(taken[1:]), 3)


def measure(rows: Sequence[Row], builds: int) -> list[dict]:
    """One entry per row: its name, the tiles of the TLX forward, and milliseconds by kind."""
    entries = []
    for row in rows:
        kinds = builders(row)
        tiles = kinds["dealt_tiles"](torch.from_numpy(row.lengths())).table.shape[0]
        taken = {kind: milliseconds(row, build, builds) for kind, build in kinds.items()}
        entries.append({"name": row.name, "tiles": tiles, "ms": taken})
    return entries


def show(entries: Sequence[dict], console: Console) -> None:
    kinds = ("dealt_tiles", "dealt_keys", "key_segments", "statistic_tiles")
    table = Table(Column("row", no_wrap=True), "tiles", *(k.replace("_", " ") for k in kinds))
    for entry in entries:
        figures = [f"{entry['ms'][kind]:.2f}" if kind in entry["ms"] else "-" for kind in kinds]
        table.add_row(entry["name"], str(entry["tiles"]), *figures)
    table.title = "milliseconds to build"
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.schedule", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rows", nargs="+", default=ROWS, help="names or patterns of rows")
    parser.add_argument("--builds", type=int, default=50, help="per row and kind")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    entries = measure(choose(load(), [], args.rows), args.builds)
    show(entries, Console())
    if args.out is not None:
        command = " ".join(["python -m bench.schedule", *(sys.argv[1:] if argv is None else argv)])
        facts = {"machine": versions(), "command": command, "date": date.today().isoformat()}
        facts |= {"threads": args.threads, "builds": args.builds, "rows": entries}
        args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()

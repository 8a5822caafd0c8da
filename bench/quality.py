"""Does the model learn? Seeds with and without sequences, beside the oracle or simple baselines.

    python -m bench.quality synthetic --out bench/results/quality_synthetic.json
    python -m bench.quality movielens --out bench/results/quality_movielens.json

Each run is an ordinary `python train.py data=...`; figures come from its `result.json`.
"""

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

VARIANTS = {"sequences": [], "no sequences": ["model.use_sequences=false"]}
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "fbtriton", "hydra-core")


def train(data: str, seed: int, overrides: list[str], folder: Path) -> dict:
    """Runs `train.py` and returns its result.json; an existing result is not made again."""
    result = folder / "result.json"
    if not result.exists():
        command = [sys.executable, "train.py", f"data={data}", f"seed={seed}", *overrides]
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True)
    return json.loads(result.read_text())


def rows_of(data: str, seeds: list[int], overrides: list[str], folder: Path) -> list[dict]:
    """One row per variant, seed and task."""
    rows = []
    for variant, own in VARIANTS.items():
        for seed in seeds:
            name = f"{data}-{variant.replace(' ', '_')}-{seed}"
            result = train(data, seed, [*own, *overrides], folder / name)
            for task, metrics in result["test"].items():
                row = {"variant": variant, "seed": seed, "task": task, **metrics}
                row |= {key: result[key] for key in ("steps", "seconds", "examples_per_s")}
                rows.append(row)
    return rows


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except ModuleNotFoundError:
            continue
    return found


def show(rows: list[dict], console: Console) -> None:
    table = Table("variant", "task", "seed", "NE", "AUC", "GAUC", "calibration", "of oracle's gain")
    for row in rows:
        share = "-"
        if "oracle_ne" in row:
            share = f"{(1 - row['ne']) / (1 - row['oracle_ne']):.1%}"
        figures = [f"{row[key]:.4f}" for key in ("ne", "auc", "gauc", "calibration")]
        table.add_row(row["variant"], row["task"], str(row["seed"]), *figures, share)
    console.print(table)
    for variant, task in dict.fromkeys((row["variant"], row["task"]) for row in rows):
        chosen = [r for r in rows if (r["variant"], r["task"]) == (variant, task)]
        ne, auc = mean(r["ne"] for r in chosen), mean(r["auc"] for r in chosen)
        console.print(f"{task}, {variant}: mean NE {ne:.4f}, mean AUC {auc:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a config of conf/data, such as synthetic or movielens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="run directories (default outputs/quality)")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("overrides", nargs="*", help="passed to train.py, such as optim.lr=1e-3")
    arguments = parser.parse_intermixed_args()
    folder = arguments.runs or Path("outputs/quality")
    rows = rows_of(arguments.data, arguments.seeds, arguments.overrides, folder)
    console = Console(width=120)
    show(rows, console)
    report = {
        "machine": versions(),
        "command": " ".join(["python -m bench.quality", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "rows": rows,
    }
    if arguments.data == "movielens":
        from bench.baselines import movielens_baselines

        report["baselines"] = movielens_baselines()
        for name, metrics in report["baselines"].items():
            console.print(f"{name}: NE {metrics['ne']:.4f}, AUC {metrics['auc']:.4f}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What a run leaves behind: the table at the end, result.json, curves.png."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gem.train.progress import figure, plain, read_rows

_TEST = ("ne", "auc", "gauc", "calibration", "rows", "base_rate", "oracle_ne", "oracle_auc")


def write_result(
    path: Path, steps: int, seconds: float, examples_per_s: float, test: dict[str, dict[str, Any]]
) -> None:
    """Writes `result.json`.

    `{"steps", "seconds", "examples_per_s", "test": {task: {"ne", "auc", "gauc", "calibration",
    "rows", "base_rate", "oracle_ne", "oracle_auc"}}}`; the oracle's only where the data has true
    probabilities, null where a metric is undefined.
    """
    result = {
        "steps": steps,
        "seconds": seconds,
        "examples_per_s": examples_per_s,
        "test": test_metrics(test),
    }
    path.write_text(json.dumps(plain(result), indent=2) + "\n")


def test_metrics(test: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each task, the metrics that go into a result."""
    return {
        task: {name: metrics[name] for name in _TEST if name in metrics}
        for task, metrics in test.items()
    }


def show_metrics(console: Console, title: str, metrics: dict[str, dict[str, Any]]) -> None:
    """Prints a table with a row per task, the oracle's figures beside the model's."""
    oracle = any("oracle_ne" in m for m in metrics.values())
    table = Table(title=title, title_justify="left")
    table.add_column("task")
    heads = ["rows", "base rate", "NE", "AUC", "GAUC", "calibration"]
    if oracle:
        heads += ["oracle NE", "oracle AUC", "NE gain of oracle's"]
    for head in heads:
        table.add_column(head, justify="right")
    for task, m in metrics.items():
        cells = [f"{m['rows']:,}", figure(m["base_rate"])]
        cells += [figure(m[name]) for name in ("ne", "auc", "gauc")]
        cells.append(figure(m["calibration"], 3))
        if oracle:
            best = m.get("oracle_ne", float("nan"))
            share = (1 - m["ne"]) / (1 - best) if best < 1 else float("nan")
            cells += [figure(best), figure(m.get("oracle_auc", float("nan")))]
            cells.append(f"{share:.1%}" if share == share else "-")
        table.add_row(task, *cells)
    console.print(table)


def draw_curves(metrics: Path, path: Path) -> None:
    """Draws loss and each task's NE over steps, training and validation, from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_rows(metrics) if metrics.exists() else []
    if not rows:
        return
    tasks = list(rows[-1]["ne"])
    figure_, axes = plt.subplots(1, 1 + len(tasks), figsize=(5 * (1 + len(tasks)), 4))
    for axis, task in zip(axes, [None, *tasks], strict=True):
        for split, style in (("train", "-"), ("valid", "o-")):
            chosen = [row for row in rows if row["split"] == split]
            values = [row["loss"] if task is None else row["ne"][task] for row in chosen]
            values = [float("nan") if value is None else value for value in values]
            axis.plot([row["step"] for row in chosen], values, style, label=split, markersize=3)
        axis.set_xlabel("step")
        axis.set_ylabel("loss" if task is None else f"NE, {task}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure_.tight_layout()
    figure_.savefig(path, dpi=120)
    plt.close(figure_)

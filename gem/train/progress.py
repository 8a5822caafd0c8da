"""Reports of a run: a line and a progress bar on the terminal, JSONL, TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gem.config import LoggerConfig


def make_console(quiet: bool = False) -> Console:
    """A console whose lines and tables are not folded when the output is no terminal."""
    console = Console(soft_wrap=True, highlight=False, quiet=quiet)
    if not console.is_terminal:
        console.width = 160
    return console


class Reporter:
    """Writes a row per interval; silent on all ranks but the first.

    Args:
        config: which reports.
        directory: of the run; `metrics.jsonl` is appended to.
        active: False makes every method do nothing.
        console: where lines go.
    """

    def __init__(
        self,
        config: LoggerConfig,
        directory: Path,
        active: bool,
        console: Console | None = None,
    ) -> None:
        self.config = config
        self.active = active
        self.path = directory / "metrics.jsonl"
        self.directory = directory
        self.total_steps = 0
        self.console = console or make_console()
        self._writer: Any = None
        self._bar: Progress | None = None

    def start(self, step: int, total_steps: int) -> None:
        """Opens the reports at a step of so many; later rows, of a run cut short, are dropped."""
        self.total_steps = total_steps
        if not self.active:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [row for row in read_rows(self.path) if row["step"] <= step]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        if self.config.tensorboard:
            # Takes a second to import, and is wanted here alone.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1)
        if self.config.progress and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total_steps, completed=step)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        """Reports one interval of training (`split` train) or one validation."""
        if not self.active:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(plain(row)) + "\n")
        self.say(train_line(row, self.total_steps) if row["split"] == "train" else valid_line(row))
        if self._writer is not None:
            for name, value in _scalars(row):
                self._writer.add_scalar(name, value, row["step"])

    def say(self, text: str) -> None:
        if self.active:
            self.console.print(text, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plain(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def train_line(row: dict[str, Any], total_steps: int) -> str:
    width = len(str(total_steps))
    parts = [
        f"step {row['step']:>{width}}/{total_steps}",
        f"loss {row['loss']:.4f}",
        _tasks(row),
        f"grad {row['grad_norm']:.3g}",
        f"{short(row['examples_per_s'])} ex/s",
        f"{short(row['tokens_per_s'])} tok/s",
    ]
    if math.isfinite(row["tflops"]):
        mfu = f" (MFU {row['mfu']:.1%})" if math.isfinite(row["mfu"]) else ""
        parts.append(f"{row['tflops']:.3g} TFLOP/s{mfu}")
    parts += [f"{row['memory_gib']:.2f} GiB", f"data {row['data_wait']:.0%}"]
    return "  ".join(parts)


def valid_line(row: dict[str, Any]) -> str:
    mark = "  *best" if row.get("best") else ""
    return f"valid at {row['step']}  loss {row['loss']:.4f}  {_tasks(row)}{mark}"


def short(value: float) -> str:
    """1234 as 1.23k; three digits."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:.3g}{unit}"
    return f"{value:.3g}"


def figure(value: float, digits: int = 4) -> str:
    """A metric for people; undefined is a dash."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _tasks(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{task} NE {figure(row['ne'][task])} AUC {figure(row['auc'][task])}" for task in row["ne"]
    )


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    split, values = row["split"], []
    for key, value in row.items():
        if key in ("split", "step"):
            continue
        items = value.items() if isinstance(value, dict) else [("", value)]
        for name, item in items:
            if isinstance(item, int | float) and math.isfinite(item):
                values.append((f"{key}/{split}" + (f"/{name}" if name else ""), float(item)))
    return values

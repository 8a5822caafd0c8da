"""Reports: one file per kind, a bar on a terminal only, nothing from other ranks."""

import io
import json
import math

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gem.config import LoggerConfig
from gem.train.progress import Reporter, make_console, read_rows


def row(step, split="train"):
    numbers = {"loss": 0.5, "ne": {"click": 0.9}, "auc": {"click": math.nan}}
    if split == "valid":
        return {"split": split, "step": step, **numbers, "best": True}
    rates = dict.fromkeys(("grad_norm", "examples_per_s", "tokens_per_s", "tflops"), 1.0)
    return {"split": split, "step": step, **numbers, **rates} | {
        "mfu": math.nan,
        "memory_gib": 1.0,
        "data_wait": 0.0,
    }


def screen(terminal):
    out = io.StringIO()
    return out, Console(file=out, force_terminal=terminal, width=200, highlight=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_only(tmp_path, terminal):
    out, console = screen(terminal)
    reporter = Reporter(LoggerConfig(tensorboard=False), tmp_path, True, console)
    reporter.start(0, 20)
    reporter.advance(7)
    reporter.row(row(10))
    reporter.close()
    assert ("training" in out.getvalue()) == terminal
    assert out.getvalue().count("loss 0.5000") == 1


def test_numbers_reach_tensorboard_and_jsonl(tmp_path):
    _, console = screen(False)
    reporter = Reporter(LoggerConfig(), tmp_path, True, console)
    reporter.start(0, 20)
    reporter.row(row(10))
    reporter.row(row(10, "valid"))
    reporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"loss/train", "loss/valid", "ne/train/click"} <= set(events.Tags()["scalars"])
    assert "auc/train/click" not in events.Tags()["scalars"], "NaN is no point of a curve"
    (point,) = events.Scalars("ne/valid/click")
    assert (point.step, point.value) == (10, pytest.approx(0.9))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["auc"] == {"click": None}
    assert [json.loads(line)["split"] for line in lines] == ["train", "valid"]


def test_a_resumed_report_drops_what_comes_later_and_a_torn_line(tmp_path):
    _, console = screen(False)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 4, "lo')
    reporter = Reporter(LoggerConfig(tensorboard=False), tmp_path, True, console)
    reporter.start(2, 20)
    reporter.row(row(3))
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3]


def test_other_ranks_write_nothing(tmp_path):
    reporter = Reporter(LoggerConfig(), tmp_path / "run", False, make_console(quiet=True))
    reporter.start(0, 20)
    reporter.advance(1)
    reporter.row(row(1))
    reporter.say("hello")
    reporter.close()
    assert not (tmp_path / "run").exists()

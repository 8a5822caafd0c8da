"""What is made of measurements: entries, ratios, the roofline, and the file that resumes."""

import json
import math

import pytest
import torch

from bench.report import BEGIN, END, geometric_mean, markdown, print_tables, rewrite
from bench.results_file import ResultsFile, read
from bench.roofline import roofline_ms
from bench.row import Outcome, best, summarise
from bench.shapes import Row
from bench.timing import Timing
from bench.turns import HotMatmul
from gem.attention.testing import Comparison

ROW = Row("broadcast", "a", 2, 4, 8, 3, 2, queries=5, equal=True)
OTHER = Row("broadcast", "b", 2, 4, 8, 3, 2, queries=5, equal=True)
CEILINGS = {"matmul_tflops": 100.0, "copy_tb_s": 1.0}
YARDSTICK = {"out": (1e-3, 1e-3), "dq": (1e-3, 1e-3), "dk": (1e-3, 1e-3), "dv": (1e-3, 1e-3)}


def outcome(ms, error=1e-3, route="", timer="graph"):
    compared = {"out": Comparison((error, error), (1e-3, 1e-3), 1e-3)}
    timing = Timing(ms, timer, 5.0) if compared["out"].ratio <= 1 else None
    return Outcome(None, compared, timing, 0.5, route)


def entry(row=ROW, direction="forward", **outcomes):
    known = outcomes or {"fa3": outcome(3.0), "triton": outcome(2.0)}
    return summarise(row, direction, known, YARDSTICK, CEILINGS, ["triton", "torch"])


def test_the_ratio_takes_the_best_peer_and_our_best_and_leaves_out_what_is_broken():
    made = entry(
        fa3=outcome(3.0),
        fa4=outcome(4.0),
        flex=outcome(0.1, error=0.5),
        triton=outcome(2.0),
        torch=outcome(9.0),
        tlx=Outcome(skipped="not here"),
    )
    assert (made["ours"], made["best_peer"], made["ratio"]) == ("triton", "fa3", 1.5)
    assert set(made["ms"]) == {"fa3", "fa4", "triton", "torch"}
    assert made["broken"] == {"flex": pytest.approx(500)}
    assert made["skipped"] == {"tlx": "not here"}
    assert made["tflops"]["triton"] == pytest.approx(ROW.flops("forward") / 2e-3 / 1e12)
    assert made["all_errors"]["flex"] == {"out": [0.5, 0.5]}


def test_ours_broken_or_no_peer_gives_no_ratio():
    made = entry(fa3=outcome(3.0), triton=outcome(1.0, error=1.0))
    assert made["ours"] is made["ratio"] is made["roofline_share"] is made["error_ratio"] is None
    made = entry(triton=outcome(1.0))
    assert made["best_peer"] is made["ratio"] is None and made["ours"] == "triton"


def test_roofline_takes_the_longer_of_compute_and_memory():
    compute = ROW.flops("forward") / 100e12 * 1e3
    memory = ROW.bytes("forward") / 1e12 * 1e3
    assert memory > compute
    assert roofline_ms(ROW, "forward", CEILINGS) == pytest.approx(memory)
    slow = {"matmul_tflops": 1e-3, "copy_tb_s": 1.0}
    assert roofline_ms(ROW, "forward", slow) == pytest.approx(compute * 1e5)
    made = entry()
    assert made["roofline_share"] == pytest.approx(memory / 2.0)
    assert made["roofline_us"] == pytest.approx(memory * 1e3)


def test_the_hot_share_takes_the_rate_of_the_matmul_in_the_same_turns():
    ceilings = {"matmul_tflops": 1e-3, "copy_tb_s": 1.0}
    compute = ROW.flops("forward") / 1e-3 / 1e9
    memory = ROW.bytes("forward") / 1e12 * 1e3

    def share(timer, matmul):
        known = {"fa3": outcome(3.0, timer="turns"), "triton": outcome(2.0, timer=timer)}
        return summarise(
            ROW, "forward", known, YARDSTICK, ceilings, ["triton"], torch.bfloat16, matmul
        )

    made = share("turns", HotMatmul(0.8e-3))
    assert made["matmul_tflops"] == 0.8e-3 and made["notes"] == {}
    assert made["roofline_share"] == pytest.approx(compute / 2.0)
    assert made["hot_share"] == pytest.approx(compute / 0.8 / 2.0)
    # The copy keeps its rate.
    assert share("turns", HotMatmul(1e3))["hot_share"] == pytest.approx(memory / 2.0)
    made = share("graph", HotMatmul(0.8e-3))
    assert made["matmul_tflops"] == 0.8e-3 and made["hot_share"] is None
    made = share("turns", HotMatmul(None, "no memory"))
    assert made["matmul_tflops"] is made["hot_share"] is None
    assert made["notes"] == {"matmul": "no memory"}
    made = share("turns", None)
    assert made["matmul_tflops"] is made["hot_share"] is None


def test_the_best_route_is_the_fastest_that_holds_the_rule():
    right, wrong = outcome(2.0, route="b"), outcome(1.0, error=1.0, route="a")
    assert best([wrong, right, outcome(3.0, route="c")]) is right
    assert best([Outcome(skipped="x"), wrong]) is wrong
    assert best([Outcome(skipped="x"), Outcome(skipped="y")]).skipped == "x; y"


def test_geometric_mean():
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


def both(row):
    return [
        {**entry(row, p), "deterministic": False, "contenders": ["fa3", "triton"]}
        for p in ("forward", "backward")
    ]


def done(results, row=ROW, direction="forward", contenders=("triton",), deterministic=False):
    return results.is_done(row.name, direction, "bfloat16", deterministic, contenders)


def test_rows_of_this_boot_are_done_and_those_of_another_are_replaced(tmp_path):
    path = tmp_path / "results.json"
    first = ResultsFile(path, "boot1", [ROW, OTHER])
    first.start({"boot": "boot1"}, "c", "today", {**CEILINGS, "dtype": "bfloat16"})
    first.put(both(OTHER))
    first.put(both(ROW))
    assert [r["name"] for r in read(path)["rows"]] == ["a", "a", "b", "b"]
    assert first.complete and read(path)["complete"] is True
    again = ResultsFile(path, "boot1", [ROW, OTHER])
    assert done(again) and done(again, OTHER, "backward")
    assert not done(again, contenders=["triton", "tlx"]) and not done(again, deterministic=True)
    assert again.ceilings("bfloat16")["copy_tb_s"] == 1.0 and again.ceilings("float16") is None
    second = ResultsFile(path, "boot2", [ROW, OTHER])
    assert not done(second) and second.ceilings("bfloat16") is None
    assert second.is_of_another_boot() and not again.is_of_another_boot()
    assert second.describe() == "a CPU, today"
    # One header for all rows: those of another boot may not stand under this one's.
    second.start({"boot": "boot2"}, "c", "tomorrow", {**CEILINGS, "dtype": "bfloat16"})
    second.put(both(ROW))
    assert [(r["name"], r["boot"]) for r in read(path)["rows"]] == [("a", "boot2")] * 2
    assert not second.complete and read(path)["complete"] is False
    second.put(both(OTHER))
    assert second.complete


def test_a_file_is_complete_only_with_the_same_contenders_in_both_passes(tmp_path):
    results = ResultsFile(tmp_path / "r.json", "boot", [ROW, OTHER])
    results.put(both(ROW))
    results.put(both(OTHER)[:1])
    assert not results.complete
    results.put([{**both(OTHER)[1], "contenders": ["triton"]}])
    assert not results.complete
    results.put(both(OTHER))
    assert results.complete


def test_writing_is_atomic_and_never_leaves_nan(tmp_path, monkeypatch):
    results = ResultsFile(tmp_path / "r.json", "boot", [ROW])
    results.put([{**both(ROW)[0], "error_ratio": math.inf}])
    before = (tmp_path / "r.json").read_text()
    assert json.loads(before)["rows"][0]["error_ratio"] is None

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.put(both(ROW))
    assert (tmp_path / "r.json").read_text() == before


def test_a_contender_that_ended_a_run_is_remembered_for_this_boot(tmp_path):
    ResultsFile(tmp_path / "r.json", "boot", [ROW]).add_fault("a", "backward", "fa3", "lost")
    assert ResultsFile(tmp_path / "r.json", "boot", [ROW]).faults("a") == {
        ("fa3", "backward"): "lost"
    }
    assert ResultsFile(tmp_path / "r.json", "other", [ROW]).faults("a") == {}
    assert ResultsFile(tmp_path / "r.json", "boot", [ROW]).faults("b") == {}


def test_tables_and_pages_show_speed_breaks_and_means(tmp_path, capsys):
    made = entry(
        fa3=outcome(3.0),
        flex=outcome(0.1, error=0.5),
        torch=outcome(900.0, timer="events"),
        triton=outcome(2.0),
    )
    data = {"machine": {"gpu": "G"}, "rows": [made], "ceilings": CEILINGS, "complete": True}
    text = markdown(data)
    assert "| a | **3.000/0** | broken (500.0) | <900.000/0 | **2.000/0** | 1.50 |" in text
    assert "Geometric mean of the ratio: 1.50." in text
    assert "ratio | roofline | hot | error |" in text
    hot = {**data, "rows": [made | {"roofline_share": 0.5, "hot_share": 0.625}]}
    assert "| 1.50 | 50% | 62% | 1.00 |" in markdown(hot)
    older = {n: v for n, v in made.items() if n not in ("hot_share", "matmul_tflops")}
    assert markdown({**data, "rows": [older]}) == text and "% | - | 1.00 |" in text
    print_tables({**data, "rows": [older]})
    print_tables(data)
    shown = capsys.readouterr().out
    assert "broken (500.0)" in shown and "geometric mean of ratio 1.500" in shown
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rewrite(page, data)
    rewrite(page, data)
    assert page.read_text() == f"before\n{BEGIN}\n{text}{END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must have one"):
        rewrite(page, data)


def test_half_precision_bytes_are_those_of_the_dtype():
    half = summarise(ROW, "forward", {}, YARDSTICK, CEILINGS, [], dtype=torch.float32)[
        "roofline_us"
    ]
    assert half > entry()["roofline_us"]

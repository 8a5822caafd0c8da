"""The benchmark itself on a CPU: every route that runs there obeys the rule, and a run resumes."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from bench import attention
from bench.inputs import make_problems
from bench.lost import DeviceLost
from bench.peers import contenders
from bench.peers.base import AutogradRoute, Contender, Unavailable
from bench.peers.flex import FlexRoute, block_mask, find_blocks
from bench.peers.ours import BackendRoute
from bench.peers.padded import PaddedRoute
from bench.results_file import read
from bench.row import measure_row
from bench.shapes import load
from gem.attention.reference import visible
from gem.attention.testing import Judge
from tests.bench.problems import PROBLEMS, problem_of, results_of

TINY = Path(__file__).with_name("tiny.yaml")
ROWS = load(TINY)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ["math", "efficient"])
def test_the_padded_route_is_right(name, dtype, kernel):
    """The efficient kernel has no CPU form; its copies of grouped heads are what differs."""
    problem = problem_of(name, dtype)
    route = PaddedRoute(problem, kernel)
    if kernel == "efficient":
        route.kernel = PaddedRoute(problem, "math").kernel
    for tensor, compared in Judge(problem).compare(results_of(route)).items():
        assert compared.ratio <= 1, (tensor, compared)


@pytest.mark.parametrize("name", PROBLEMS)
def test_our_route_is_right(name):
    problem = problem_of(name)
    compared = Judge(problem).compare(results_of(BackendRoute(problem, "torch")))
    assert max(c.ratio for c in compared.values()) <= 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_flex_route_is_right_forward(name):
    """Eagerly: on a CPU flex_attention has no backward, and its mask alone decides."""
    problem = problem_of(name)
    out = FlexRoute(problem, flex_attention).forward()
    assert Judge(problem).compare({"out": out})["out"].ratio <= 1


def test_padded_copies_of_foreign_rows_never_reach_a_result():
    problem = problem_of("broadcast")
    clean = results_of(PaddedRoute(problem, "math"))
    scaled = dataclasses.replace(problem, k=problem.k.clone(), v=problem.v.clone())
    # Sample 3 is the padding of sample 2's neighbours; what it holds must not matter to them.
    scaled.k[35:] *= 50
    scaled.v[35:] *= 50
    changed = results_of(PaddedRoute(scaled, "math"))
    assert torch.equal(clean["out"][:3], changed["out"][:3])
    assert torch.equal(clean["dk"][:35], changed["dk"][:35])
    assert (clean["out"][1] == 0).all()


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (9, 4), (0, 0), (20, None)])
def test_block_lists_hold_every_visible_pair(left, right):
    lengths, block = np.array([5, 0, 40, 16, 3, 64, 1]), 8
    blocks = find_blocks(lengths, lengths, left, right, block)
    _check_blocks(blocks, lengths, lengths, left, right, block)


@pytest.mark.parametrize("queries", [5, 8, 24])
def test_block_lists_of_a_shared_query_set(queries):
    k_lengths, block = np.array([5, 0, 40, 16, 3, 64, 8]), 8
    q_lengths = np.full(7, queries)
    blocks = find_blocks(q_lengths, k_lengths, None, None, block)
    _check_blocks(blocks, q_lengths, k_lengths, None, None, block)


def _check_blocks(blocks, q_lengths, k_lengths, left, right, block):
    mask = np.zeros((q_lengths.sum(), k_lengths.sum()), bool)
    q, k = 0, 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        mask[q : q + n, k : k + m] = visible(n, m, left, right, "cpu").numpy()
        q, k = q + n, k + m
    listed = np.zeros_like(mask)
    for row, column, full in zip(blocks.rows, blocks.columns, blocks.full, strict=True):
        part = np.s_[row * block : (row + 1) * block, column * block : (column + 1) * block]
        assert not listed[part].any()
        listed[part] = True
        assert not full or (mask[part].all() and mask[part].shape == (block, block))
    assert listed[mask].all()
    made = block_mask(blocks, mask.shape, lambda b, h, i, j: i == j, CPU, block)
    assert int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum()) == len(blocks.rows)
    for part, prefix in ((~blocks.full, ""), (blocks.full, "full_")):
        pairs = set(zip(blocks.rows[part], blocks.columns[part], strict=True))
        assert _walk(made, prefix, "kv") == pairs
        assert {(row, column) for column, row in _walk(made, prefix, "q")} == pairs


def _walk(made, prefix, side):
    """The pairs of a table as a kernel reads them: by the strides of the table without prefix."""
    step = getattr(made, f"{side}_indices").stride(2)
    flat = getattr(made, f"{prefix}{side}_indices").flatten()
    counts = getattr(made, f"{prefix}{side}_num_blocks")[0, 0].tolist()
    assert len(flat) == step * len(counts)
    return {(i, int(j)) for i, n in enumerate(counts) for j in flat[i * step : i * step + n]}


class Wrong(AutogradRoute):
    def attend(self, q, k, v):
        return PaddedRoute(self.problem, "math").attend(q, k, v) * 1.1


class Failing(AutogradRoute):
    def attend(self, q, k, v):
        raise RuntimeError("first line\nsecond line")


class Made(Contender):
    def __init__(self, name, routes):
        self.name, self.made = name, routes

    def routes(self, problems):
        return {n: (lambda r=r: [r(p) for p in problems]) for n, r in self.made.items()}


class Missing(Contender):
    name = "missing"

    def routes(self, problems):
        raise Unavailable("not installed")


def math_route(problem):
    return PaddedRoute(problem, "math")


def test_a_contender_that_is_wrong_fails_or_is_missing_does_not_stop_the_row():
    chosen = [
        Made("wrong", {"": Wrong}),
        Made("failing", {"": Failing}),
        Missing(),
        Made("mixed", {"bad": Failing, "wrong": Wrong, "good": math_route}),
    ]
    measured = measure_row(
        ROWS[0],
        chosen,
        ["forward", "backward"],
        dtype=torch.bfloat16,
        device=CPU,
        seed=1,
        min_ms=0.1,
        faults={("mixed", "backward"): "it took the GPU with it"},
    )
    forward, backward = measured.outcomes["forward"], measured.outcomes["backward"]
    assert measured.input_sets == 1 and measured.judge_s > 0
    assert set(measured.yardstick) == {"out", "lse", "dq", "dk", "dv"}
    assert not forward["wrong"].holds and forward["wrong"].timing is None
    assert forward["wrong"].error_ratio > 2 and not backward["wrong"].holds
    assert forward["failing"].skipped == backward["failing"].skipped == "RuntimeError: first line"
    assert forward["missing"].skipped == "not installed"
    assert forward["mixed"].route == "good" and forward["mixed"].timing.timer == "wall"
    assert backward["mixed"].skipped == "it took the GPU with it"
    assert forward["mixed"].cost_s > forward["mixed"].timing.ms * 1e-3
    assert forward["failing"].cost_s > 0


def test_input_sets_differ_and_fill_twice_the_cache():
    problems = make_problems(ROWS[0], torch.bfloat16, CPU, 3, l2_bytes=16 * 1024)
    read_bytes = 2 * problems[0].k.numel() * 2
    assert len(problems) == -(-2 * 16 * 1024 // read_bytes) > 1
    assert not torch.equal(problems[0].k, problems[1].k)
    assert problems[0].k_layout is problems[1].k_layout
    again = make_problems(ROWS[0], torch.bfloat16, CPU, 3, l2_bytes=0)
    assert len(again) == 1 and torch.equal(again[0].dout, problems[0].dout)
    other = make_problems(ROWS[0], torch.bfloat16, CPU, 4, l2_bytes=0)
    assert not torch.equal(again[0].q, other[0].q)


def run(tmp_path, *more):
    out = tmp_path / "results.json"
    # Long enough that whatever is measured costs 0.01 s on the fastest machine.
    options = ["--shapes", str(TINY), "--out", str(out), "--min-ms", "12", "--device", "cpu"]
    code = attention.main([*options, "--contenders", "torch", "sdpa_padded", "fa3", *more])
    return code, read(out) if out.exists() else None


def test_a_run_measures_every_row_and_resumes(tmp_path, capsys, monkeypatch):
    code, data = run(tmp_path, "--rows", "tiny_[bs]*", "--pass", "forward")
    assert code == 0 and not data["complete"]
    assert [(r["name"], r["pass"]) for r in data["rows"]] == [
        ("tiny_broadcast", "forward"),
        ("tiny_self", "forward"),
    ]
    code, data = run(tmp_path)
    assert code == 0 and data["complete"] and len(data["rows"]) == 10
    for r in data["rows"]:
        assert set(r["ms"]) == {"torch", "sdpa_padded"} and not r["broken"]
        assert r["ours"] == "torch" and r["best_peer"] == "sdpa_padded"
        assert r["ratio"] == pytest.approx(r["ms"]["sdpa_padded"] / r["ms"]["torch"])
        assert r["skipped"]["fa3"] == "needs a CUDA device"
        assert set(r["timer"].values()) == {"wall"} and r["error_ratio"] < 2.1
        assert r["matmul_tflops"] is r["hot_share"] is None  # no turns on a CPU
        assert set(r["errors"]) == ({"out"} if r["pass"] == "forward" else {"dq", "dk", "dv"})
        assert set(r["cost_s"]) == {"torch", "sdpa_padded"} and r["judge_s"] > 0
        assert r["cost_s"]["torch"] >= 0.01
    assert data["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "dense, backward" in printed
    assert re.search(r"\n  cost s: judge \d+\.\d sdpa_padded \d+\.\d torch \d+\.\d\n", printed)
    # The data are fresh, unless a seed is given.
    assert len({r["seed"] for r in data["rows"]}) > 1

    measured = []

    def record(row, *args, **kwargs):
        measured.append(row.name)
        raise RuntimeError("only the names count here")

    monkeypatch.setattr(attention, "measure_row", record)
    run(tmp_path, "--brief")
    assert measured == []
    run(tmp_path, "--brief", "--again")
    assert measured == [row.name for row in ROWS]


def test_a_deadline_stops_before_a_row_and_names_what_is_left(tmp_path, capsys):
    code, data = run(tmp_path, "--deadline", "0", "--brief")
    assert code == 0 and data is None
    printed = capsys.readouterr().out
    assert "5 rows left: tiny_broadcast tiny_self tiny_window" in printed


def test_a_row_that_fails_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    def judge(problem, gradients):
        if problem.window is not None:
            raise torch.OutOfMemoryError("no memory\nmore")
        return Judge(problem, gradients)

    monkeypatch.setattr("bench.row.Judge", judge)
    code, data = run(tmp_path, "--brief")
    assert code == 0 and len(data["rows"]) == 8 and not data["complete"]
    printed = capsys.readouterr().out
    assert "tiny_window: failed before any contender: OutOfMemoryError: no memory" in printed
    assert "1 rows left: tiny_window" in printed


def test_a_contender_that_takes_the_gpu_with_it_is_left_out_of_the_next_run(
    tmp_path, capsys, monkeypatch
):
    def lose(row, *args, faults, **kwargs):
        if ("fa3", "forward") not in faults:
            raise DeviceLost("fa3", "forward", "illegal address")
        return measure_row(row, *args, faults=faults, **kwargs)

    monkeypatch.setattr(attention, "measure_row", lose)
    rows = ("--rows", "tiny_self", "--brief")
    assert run(tmp_path, *rows)[0] == 3
    assert "fa3 (forward) left the GPU unusable: illegal address" in capsys.readouterr().out
    code, data = run(tmp_path, *rows)
    assert code == 0 and len(data["rows"]) == 2


def test_options_that_name_nothing_are_refused(capsys):
    for options, text in (
        (["--contenders", "nope"], "contenders must be among"),
        (["--rows", "nope"], "--rows 'nope' matches no row"),
    ):
        with pytest.raises(SystemExit):
            attention.parse(options)
        assert text in capsys.readouterr().err


def test_results_are_drawn(tmp_path):
    run(tmp_path, "--rows", "tiny_self", "--brief")
    attention.main(["--plot", str(tmp_path / "results.json")])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_every_backend_and_peer_is_a_contender():
    names = list(contenders())
    assert names[:6] == ["fa4", "fa4_view", "fa3", "varlen_attn", "sdpa_padded", "flex"]
    assert "torch" in names and not {"auto", "reference"} & set(names)

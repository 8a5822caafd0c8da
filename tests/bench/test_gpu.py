"""The benchmark on a GPU: timers, captures that fail, and each contender on small rows."""

import dataclasses
import importlib

import pytest
import torch

from bench import turns
from bench.peers import contenders
from bench.peers.base import Contender
from bench.rivals import RIVALS
from bench.row import measure_row
from bench.shapes import Row
from bench.timing import _profiled, measure, side_stream, with_peak
from gem.attention.backends import torch_
from gem.attention.testing import (
    assert_close_to_reference,
    call_of,
    compare,
    random_problem,
    reference_in_chunks,
    yardstick,
)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)

ROWS = [
    Row("broadcast", "broadcast", 9, 4, 128, 300, 4, queries=192, density=0.5),
    Row("broadcast", "few_queries", 9, 4, 64, 300, 4, queries=32, density=0.1),
    Row("self", "self", 7, 4, 128, 300, 4, density=0.5),
    Row("window", "window", 5, 2, 128, 500, 2, density=0.5, window=(64, 32)),
    Row("window", "window_causal", 5, 2, 128, 500, 2, density=0.9, window=(100, 0)),
    Row("gqa", "gqa", 5, 8, 128, 300, 2, density=0.5),
    Row("gqa", "gqa_broadcast", 5, 8, 128, 300, 2, queries=128, density=0.5),
    Row("dense", "dense", 4, 4, 128, 512, 4, equal=True),
    Row("dense", "causal", 4, 4, 128, 512, 4, equal=True, causal=True),
]


@pytest.mark.parametrize("name", [n for n in contenders() if n != "flex"] + ["flex"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_contender_obeys_the_rule(name, row):
    with side_stream(GPU):
        measured = measure_row(
            row,
            [contenders()[name]],
            ["forward", "backward"],
            dtype=torch.bfloat16,
            device=GPU,
            seed=torch.Generator().seed() % 2**48,
            min_ms=0.5,
        )
    found = {direction: by_name[name] for direction, by_name in measured.outcomes.items()}
    if reasons := {d: o.skipped for d, o in found.items() if o.skipped}:
        pytest.skip(str(reasons))
    for direction, outcome in found.items():
        assert outcome.holds, (direction, outcome.compared)
        assert outcome.timing.ms > 0 and outcome.timing.host_us > 0


def test_flex_serves_rows_of_other_lengths_one_after_the_other():
    """Where its first row made a later one fail, the test above would skip it."""
    rows = [Row("self", str(n), 5, 2, 64, n, 2, density=0.5) for n in (300, 400, 700)]
    with side_stream(GPU):
        for row in rows:
            measured = measure_row(
                row,
                [contenders()["flex"]],
                ["forward", "backward"],
                dtype=torch.bfloat16,
                device=GPU,
                seed=1,
                min_ms=0.5,
            )
            for outcomes in measured.outcomes.values():
                assert outcomes["flex"].holds, outcomes["flex"].skipped


@pytest.mark.parametrize("name", ["triton", "sdpa_padded", "flex"])
def test_twins_take_turns_and_nothing_is_compiled_again(name, monkeypatch):
    def retime(*args):
        with torch.compiler.set_stance("fail_on_recompile"):
            return turns.retime(*args)

    monkeypatch.setattr("bench.row.retime", retime)
    monkeypatch.setattr("bench.turns.NEAR", 10)
    one, two = Renamed(contenders()[name], "one"), Renamed(contenders()[name], "two")
    with side_stream(GPU):
        measured = measure_row(
            ROWS[2],
            [one, two],
            ["forward", "backward"],
            dtype=torch.bfloat16,
            device=GPU,
            seed=1,
            min_ms=4,
        )
    for outcomes in measured.outcomes.values():
        for outcome in outcomes.values():
            assert outcome.timing.timer == "turns", outcome
            assert outcome.timing.ms > 0 and outcome.timing.note is None
    for matmul in measured.matmul.values():
        assert matmul.tflops > 0 and matmul.note is None


class Renamed(Contender):
    def __init__(self, contender, name):
        self.name, self.routes = name, contender.routes
        self.last_resorts = contender.last_resorts


def test_a_graph_the_profiler_and_events_agree(monkeypatch):
    a = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)
    with side_stream(GPU):
        timing = measure([lambda: a @ a], GPU)
        profiled = _profiled([lambda: a @ a], 20, GPU)
        product, peak, first = with_peak(lambda: a @ a, GPU)
        # Only a first call that is given, and slow, is the measurement: here any is.
        monkeypatch.setattr("bench.timing.ONE_SET", 0.0)
        monkeypatch.setattr("bench.timing.ONE_CALL", 0.0)
        once = measure([lambda: a @ a], GPU, first=first)
    assert timing.timer == "graph" and timing.ms == pytest.approx(profiled, rel=0.2)
    assert once.timer == "events" and 0.8 * profiled < once.ms < 20 * profiled
    assert torch.equal(product, a @ a) and peak == pytest.approx(a.numel() * 2 / 2**30, rel=0.1)


def test_a_short_call_is_not_timed_with_its_launch():
    x = torch.zeros(1024, device=GPU)
    with side_stream(GPU):
        timing = measure([lambda: x.add_(1)], GPU)
    assert timing.timer == "graph" and timing.ms < 0.01 and timing.host_us > 1


def test_a_call_that_waits_for_the_device_goes_to_the_profiler_and_leaves_the_stream_well():
    x = torch.ones(2**24, device=GPU)
    with side_stream(GPU):
        timing = measure([lambda: x.sum().item()], GPU)
        assert timing.timer == "profiler" and timing.ms > 0 and timing.note
        torch.randn(4, device=GPU)
        torch.nn.functional.dropout(x, 0.5)
        assert measure([lambda: x * 2], GPU).timer == "graph"
    assert float(x.sum()) == 2**24


def test_backward_of_autograd_is_captured():
    x = torch.randn(512, 512, device=GPU, requires_grad=True)
    with side_stream(GPU):
        y = (x @ x).relu()
        timing = measure(
            [lambda: torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)], GPU
        )
    assert timing.timer == "graph"


def test_the_rule_in_chunks_agrees_between_gpu_and_cpu():
    problem = random_problem([30, 0, 70], dtype=torch.bfloat16, window=(9, 4))
    layout = problem.k_layout.to(GPU)
    tensors = {n: getattr(problem, n).to(GPU) for n in ("q", "k", "v", "dout")}
    moved = dataclasses.replace(problem, **tensors, k_layout=layout, q_layout=layout)
    for name, x in reference_in_chunks(moved).items():
        torch.testing.assert_close(
            x.cpu(), reference_in_chunks(problem)[name], rtol=1e-11, atol=1e-11
        )
    for compared in compare(yardstick(moved), moved).values():
        assert compared.ratio < 1
    # True float32: TF32 would be a thousand times off.
    lse = yardstick(moved)["lse"].cpu() - yardstick(problem)["lse"]
    assert lse.nan_to_num().abs().max() < 1e-4


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("form", ["pooling", "few_queries", "window"])
@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_as_a_backend_obeys_the_rule(name, form, dim):
    lengths = [300, 0, 5, 129, 700]
    given, options = {
        "pooling": ((64, lengths), {}),
        "few_queries": (([4] * 5, lengths), {}),
        "window": ((lengths,), {"window": (128, 0)}),
    }[form]
    problem = random_problem(*given, dim=dim, dtype=torch.bfloat16, device=GPU, **options)
    rival, call = importlib.import_module(RIVALS[name]), call_of(problem)
    if reason := rival.unsupported(call):
        pytest.skip(reason)
    inputs = (problem.q, problem.k, problem.v)
    out, lse = rival.forward(call, *inputs)
    right = torch_.forward(call, *inputs)
    torch.testing.assert_close(lse, right[1], atol=1e-3, rtol=1e-4)
    grads = rival.backward(call, problem.dout, None, *inputs, out, lse)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    assert_close_to_reference(results, problem)

    dlse = torch.randn_like(right[1])
    found = rival.backward(call, problem.dout, dlse, *inputs, *rival.forward(call, *inputs))
    for grad, truth in zip(
        found, torch_.backward(call, problem.dout, dlse, *inputs, *right), strict=True
    ):
        off = (grad - truth).float().norm() / truth.float().norm()
        assert off < 0.02, (name, form, off)

"""The rule on big problems: chunks of samples give what one sample at a time gives."""

import pytest
import torch

from gem.attention import testing
from gem.attention.testing import Judge, attend, compare, random_problem, reference, yardstick

LENGTHS = [9, 0, 40, 1, 23, 40, 8]
FORMS = {
    "broadcast": ((5, LENGTHS), {"heads": 4, "kv_heads": 2}),
    "self": ((LENGTHS,), {"heads": 4, "kv_heads": 2}),
    "cross": (([3, 4, 50, 0, 2, 7, 9], LENGTHS), {}),
    "causal": (([3, 4, 50, 0, 2, 7, 9], LENGTHS), {"causal": True}),
    "window": ((LENGTHS,), {"window": (4, 2), "scale": 0.3}),
    "no keys": ((3, [0, 0]), {}),
}


@pytest.fixture(params=FORMS)
def problem(request):
    lengths, options = FORMS[request.param]
    return random_problem(*lengths, spare=3, **options)


@pytest.mark.parametrize("limit", [1, 2000, 2**40])
def test_chunks_of_any_size_agree_with_the_loops(problem, limit):
    exact, chunked = reference(problem), testing.reference_in_chunks(problem, limit)
    for name, x in exact.items():
        assert chunked[name].dtype == x.dtype and chunked[name].shape == x.shape
        torch.testing.assert_close(chunked[name], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_yardstick_rounds_the_same_in_chunks_of_any_size(dtype):
    problem = random_problem(5, LENGTHS, heads=4, kv_heads=2, dtype=dtype)
    single, together = yardstick(problem, 1), yardstick(problem, 2**40)
    for name in ("out", "lse", "dk", "dv", "dq"):
        # Sums in another order, and with them now and then another rounding.
        near = 1e-5 if name == "lse" else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(single[name], together[name], rtol=near, atol=near)
        same = (single[name] == together[name]).double().mean()
        assert name == "lse" or same > 0.95


def test_big_problems_leave_the_loops(monkeypatch):
    problem = random_problem([9, 0, 40], dtype=torch.bfloat16)
    results = attend(problem)
    before = compare(results, problem)
    monkeypatch.setattr(testing, "LOOP_LIMIT", 0)
    monkeypatch.setattr(testing, "jagged_attention_reference", None)
    judge = Judge(problem)
    for name, compared in judge.compare(results).items():
        assert compared.errors == pytest.approx(before[name].errors, rel=1e-6)
        assert compared.ratio <= 1
    results["dv"] = results["dv"] * 1.02
    assert judge.compare(results)["dv"].ratio > 1


def test_without_gradients_the_output_is_judged_alike(problem):
    whole, half = (
        testing.reference_in_chunks(problem, 500),
        testing.reference_in_chunks(problem, 500, gradients=False),
    )
    assert set(half) == {"out", "lse"}
    assert all(torch.equal(half[name], whole[name]) for name in half)
    rough = yardstick(problem, gradients=False)
    assert set(rough) == {"out", "lse"} and torch.equal(rough["out"], yardstick(problem)["out"])
    out = attend(problem)["out"]
    judge = Judge(problem, gradients=False)
    assert judge.compare({"out": out})["out"] == compare({"out": out}, problem)["out"]


def test_errors_of_long_tensors_are_taken_in_parts(monkeypatch):
    """The maximum and the mean of the whole, wherever the errors lie."""
    monkeypatch.setattr(testing, "ERROR_PART", 70)
    exact = torch.randn(100, 10, dtype=torch.float64)
    result = exact.clone()
    result[7, 5] += 3.0
    result[95] += 0.1
    worst, mean = testing._errors(result, exact)
    assert worst == pytest.approx(3.0 / float(exact.abs().max()))
    error = ((result - exact).square().mean() / exact.square().mean()).sqrt()
    assert mean == pytest.approx(float(error))

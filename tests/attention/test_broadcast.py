"""Broadcast attention: shared queries, their gradient summed over the batch."""

import random

import pytest
import torch

from gem.attention import JaggedLayout, broadcast_attention
from gem.attention.testing import (
    Problem,
    assert_close_to_reference,
    attend,
    compare,
    random_problem,
    reference,
)

BACKENDS = ["torch", "reference"]


def lens(lengths):
    return "lens" + "-".join(map(str, lengths))


@pytest.mark.parametrize("queries", [1, 4, 16, 65])
@pytest.mark.parametrize(
    "lengths",
    [[3, 0, 5], [1], [12, 9, 300, 15, 0, 11], [2000, 1], [0], [0, 0, 0], [], [64, 65, 63]],
    ids=lens,
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)], ids=["mha", "gqa2"])
def test_against_the_reference(queries, lengths, heads, kv_heads):
    problem = random_problem(queries, lengths, heads=heads, kv_heads=kv_heads, dim=8, spare=2)
    results = attend(problem)
    assert results["out"].shape == (len(lengths), queries, heads, 8)
    assert results["lse"].shape == (len(lengths), queries, heads)
    assert results["dq"].shape == problem.q.shape
    assert_close_to_reference(results, problem)


def test_dq_of_few_queries_does_not_lose_to_a_long_sum():
    # One product of one row adds 2048 keys in a chain; the yardstick has such a product.
    errors = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        problem = random_problem(1, [2048], dim=8, generator=generator)
        compared = compare(attend(problem, "torch"), problem)["dq"]
        errors.append((compared.errors[1], compared.yardstick[1]))
    ours, yardstick = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert ours < 0.7 * yardstick


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [8, 40, 64, 128, 256])
def test_dtypes_and_head_dims(dtype, dim):
    problem = random_problem(5, [3, 0, 90, 17], heads=4, kv_heads=2, dim=dim, dtype=dtype)
    results = attend(problem)
    assert all(results[name].dtype == dtype for name in ("out", "dq", "dk", "dv"))
    assert_close_to_reference(results, problem)


@pytest.mark.parametrize("seed", range(15))
def test_random_layouts(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, rng.randint(0, 200)]) for _ in range(rng.randint(1, 40))]
    kv_heads = rng.randint(1, 3)
    problem = random_problem(
        rng.randint(1, 20),
        lengths,
        heads=kv_heads * rng.choice([1, 2]),
        kv_heads=kv_heads,
        dim=rng.choice([8, 16, 33]),
        scale=rng.choice([None, 0.3]),
        spare=rng.choice([0, 3]),
        generator=torch.Generator().manual_seed(seed),
    )
    assert_close_to_reference(attend(problem), problem)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_sample_has_no_part(backend):
    problem = random_problem(4, [3, 0, 5], dim=64, dtype=torch.float64)
    results = attend(problem, backend)
    assert not results["out"][1].any() and (results["lse"][1] == -torch.inf).all()
    assert all(x.isfinite().all() for name, x in results.items() if name != "lse")
    layout = JaggedLayout.from_lengths([3, 5])
    without = Problem(problem.q, problem.k, problem.v, problem.dout[[0, 2]], layout)
    torch.testing.assert_close(results["dq"], reference(without)["dq"], rtol=1e-12, atol=1e-12)


def test_bad_neighbours_leave_a_sample_bitwise_unchanged():
    problem = random_problem(4, [3, 0, 5], dim=64, spare=2)
    clean = attend(problem)
    for x in (problem.k, problem.v):
        x[3:] = torch.nan
    problem.dout[1:] = torch.nan
    results = attend(problem)
    for name, rows in (("out", 1), ("lse", 1), ("dk", 3), ("dv", 3)):
        assert torch.equal(results[name][:rows], clean[name][:rows]), name
    assert results["out"][2].isnan().all() and results["dq"].isnan().all()
    assert torch.equal(results["dk"][-2:], torch.zeros(2, 2, 64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries(backend):
    problem = random_problem(0, [3, 0, 5])
    results = attend(problem, backend)
    assert results["out"].shape == (3, 0, 2, 16) and results["lse"].shape == (3, 0, 2)
    assert torch.equal(results["dk"], torch.zeros(8, 2, 16))
    assert torch.equal(results["dv"], torch.zeros(8, 2, 16))


def test_permuting_the_batch():
    lengths = [90, 3, 0, 300, 64, 65, 17, 3, 90]
    problem = random_problem(6, lengths)
    results = attend(problem)
    order = torch.tensor([3, 0, 8, 6, 2, 1, 5, 7, 4])
    bounds = problem.k_layout.offsets.tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    permuted = Problem(
        problem.q,
        problem.k[rows],
        problem.v[rows],
        problem.dout[order],
        JaggedLayout.from_lengths([lengths[i] for i in order]),
    )
    again = attend(permuted)
    for name, place in (("out", order), ("lse", order), ("dk", rows), ("dv", rows)):
        assert torch.equal(again[name], results[name][place]), name
    torch.testing.assert_close(again["dq"], results["dq"], rtol=1e-5, atol=1e-5)


def test_deterministic_runs_give_the_same_bits():
    problem = random_problem(6, [5, 33, 0, 700, 129] * 10, heads=4, kv_heads=2)
    first, second = (attend(problem, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_half_precision_sums_the_gradient_of_q_in_float32():
    """2000 equal contributions of 1: in bfloat16 a running sum stops growing at 256."""
    batch = 2000
    q = torch.zeros(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(2 * batch, 1, 8, dtype=torch.bfloat16)
    k[::2] = 1.0
    v = k.clone()
    layout = JaggedLayout.from_lengths([2] * batch)
    out = broadcast_attention(q, k, v, layout, scale=1.0)
    out.backward(torch.ones_like(out))
    # Equal weights of 1/2, so that ds = +-(1/2)(8 - 4) and dq = 2 per sample.
    assert torch.equal(q.grad, torch.full_like(q, 2.0 * batch))


def test_queries_that_are_expanded_or_views():
    problem = random_problem(4, [3, 0, 50], heads=2)
    expected = attend(problem)
    wide = torch.randn(4, 6, 16)
    wide[:, 2:4] = problem.q
    views = Problem(**{**vars(problem), "q": wide[:, 2:4]})
    assert all(torch.equal(x, expected[name]) for name, x in attend(views).items())
    parameter = torch.nn.Parameter(torch.randn(4, 1, 16))
    out = broadcast_attention(parameter.expand(4, 2, 16), problem.k, problem.v, problem.k_layout)
    out.sum().backward()
    assert parameter.grad.shape == parameter.shape

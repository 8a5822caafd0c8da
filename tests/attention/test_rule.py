"""The rule itself: it passes what is right and fails what is not."""

import pytest
import torch

from gem.attention.testing import (
    Problem,
    assert_close_to_reference,
    attend,
    compare,
    random_problem,
    reference,
    yardstick,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("q_lengths", [5, [9, 0, 40]], ids=["shared", "jagged"])
def test_the_yardstick_obeys_its_own_rule(dtype, q_lengths):
    problem = random_problem(q_lengths, [9, 0, 40], heads=4, kv_heads=2, dtype=dtype)
    compared = assert_close_to_reference(yardstick(problem), problem)
    assert set(compared) == {"out", "lse", "dq", "dk", "dv"}
    for c in compared.values():
        assert c.errors == c.yardstick and c.ratio < 1


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_wrong_number_fails(name, dtype):
    problem = random_problem([9, 0, 40], dtype=dtype)
    results = attend(problem)
    for wrong in (results[name].abs().max() * 0.05, torch.nan, torch.inf):
        changed = results[name].clone()
        changed.view(-1)[7] += wrong
        with pytest.raises(AssertionError, match=f"{name}: error"):
            assert_close_to_reference({**results, name: changed}, problem)


def test_a_small_error_everywhere_fails():
    """Three times the yardstick's rounding, which no single maximum shows."""
    problem = random_problem([90, 40], dtype=torch.bfloat16)
    exact, rough = reference(problem)["dk"], yardstick(problem)["dk"].double()
    spread = (rough - exact).square().mean().sqrt()
    noise = torch.randn_like(exact).clamp(-1, 1)
    noisy = exact + 6 * spread * noise / noise.square().mean().sqrt()
    with pytest.raises(AssertionError, match="dk"):
        assert_close_to_reference({"dk": noisy}, problem)


def test_a_missing_infinity_and_a_wrong_shape_fail():
    problem = random_problem([4], [2], causal=True)
    results = attend(problem)
    lse = results["lse"].nan_to_num(neginf=-1e4)
    with pytest.raises(AssertionError, match="lse"):
        assert_close_to_reference({"lse": lse}, problem)
    with pytest.raises(AssertionError, match=r"dq has shape \[1, 4, 2, 16\], not \[4, 2, 16\]"):
        assert_close_to_reference({"dq": results["dq"][None]}, problem)


def test_zeros_must_be_exact():
    problem = random_problem([0, 3], [4, 5])
    keys = Problem(**{**vars(problem), "dout": torch.zeros_like(problem.dout)})
    results = attend(keys)
    assert compare(results, keys)["dk"].ratio == 0
    results["dk"][0] += 1e-5
    assert compare(results, keys)["dk"].ratio > 1


def test_inputs_are_fresh_at_every_call():
    a, b = (random_problem([4]) for _ in range(2))
    assert not torch.equal(a.q, b.q)
    a, b = (random_problem([4], generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a.q, b.q)


def test_the_reference_agrees_with_dense_attention():
    problem = random_problem([9, 4], heads=4, kv_heads=2, dtype=torch.float64, causal=True)
    exact = reference(problem)
    for rows in (slice(0, 9), slice(9, 13)):
        q, k, v = (x[rows].transpose(0, 1)[None] for x in (problem.q, problem.k, problem.v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(exact["out"][rows], out[0].transpose(0, 1))

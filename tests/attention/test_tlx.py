"""What is particular to the TLX kernels; `test_kernels` holds them against the reference."""

import math
import random

import pytest
import torch

from gem.attention.backends import tlx_, tlx_forward_merge, triton_
from gem.attention.backends.launching import recorded
from gem.attention.testing import assert_close_to_reference, call_of, random_problem
from tests.attention.simulator.helpers import RISING, rising_problem

pytestmark = pytest.mark.gpu

Shape = tlx_.Shape
SHAPES = {
    64: [
        Shape(1, 64, 4, 2, 232),
        Shape(2, 64, 6, 2, 240),
        Shape(2, 64, 3, 1, 240, ping_pong=True),
        Shape(3, 64, 6, 2, 160),
        Shape(4, 64, 6, 1, 112),
        Shape(2, 128, 4, 2, 240),
        Shape(3, 64, 6, 1, 160, keep_q=True),
        Shape(2, 128, 4, 2, 240, counter=True),
        Shape(3, 64, 6, 1, 160, keep_q=True, counter=True),
        Shape(2, 128, 4, 2, 240, ping_pong=True, lazy=True),
        Shape(3, 64, 6, 1, 160, keep_q=True, counter=True, lazy=True),
    ],
    128: [
        Shape(1, 64, 5, 2, 232),
        Shape(2, 64, 4, 2, 240),
        Shape(2, 64, 2, 1, 240, ping_pong=True),
        Shape(2, 128, 2, 2, 240),
        Shape(2, 128, 2, 1, 240, ping_pong=True),
        Shape(3, 64, 4, 1, 160),
        Shape(3, 64, 4, 1, 160, keep_q=True),
        Shape(2, 128, 2, 1, 240, keep_q=True),
        Shape(2, 64, 4, 1, 240, p_wide=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True, counter=True),
        Shape(3, 64, 4, 1, 160, p_wide=True, counter=True),
        Shape(1, 64, 5, 2, 232, p_wide=True, lazy=True),
        Shape(2, 64, 4, 2, 240, ping_pong=True, p_wide=True, lazy=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True, lazy=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True, counter=True, lazy=True),
        Shape(3, 64, 4, 1, 160, p_wide=True, keep_q=True, lazy=True),
    ],
}
ALL_SHAPES = [(dim, shape) for dim, shapes in SHAPES.items() for shape in shapes]


def launch(problem, shape, **options):
    return tlx_.launch(call_of(problem), problem.q, problem.k, problem.v, shape, **options)


@pytest.mark.parametrize(("dim", "shape"), ALL_SHAPES, ids=str)
def test_every_shape_agrees_with_triton(dim, shape):
    rng = random.Random(str(shape))
    for trial in range(12):
        lengths = [rng.choice([0, 1, rng.randint(0, 700)]) for _ in range(rng.randint(1, 300))]
        options = {"heads": 4, "kv_heads": rng.choice([1, 2, 4]), "dim": dim, "device": "cuda"}
        options |= {"dtype": rng.choice([torch.float16, torch.bfloat16])}
        if trial % 3 == 0:
            problem = random_problem(rng.randint(1, 300), lengths, **options)
        else:
            window = rng.choice([None, (rng.randint(0, 300), 0), (rng.randint(0, 90), 40)])
            problem = random_problem(lengths, window=window, **options)
        out, lse = launch(problem, shape)
        again, again_lse = launch(problem, shape)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
        call = call_of(problem)
        expected, expected_lse = triton_.forward(call, problem.q, problem.k, problem.v)
        # Both round; they differ by the order of sums.
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
        error = (out.double() - expected.double()).norm()
        assert error <= 4e-3 * expected.double().norm()


@pytest.mark.parametrize(("dim", "shape"), ALL_SHAPES, ids=str)
@pytest.mark.parametrize("p_shared", [False, True], ids=["registers", "shared"])
def test_integers_are_exact_at_every_launch(dim, shape, p_shared):
    """Scores are small integers in base 2 and so are values: nothing is rounded but the result.

    A left operand whose registers are overwritten while it is read gives other integers.
    """
    if p_shared:
        # Room for the probabilities.
        shape = Shape(shape.consumers, shape.keys, 2 if shape.keys == 64 else 1, 1, shape.registers)
    problem = random_problem(
        [130] * 64, [257, 64, 500, 1] * 16, heads=4, dim=dim, dtype=torch.bfloat16, device="cuda"
    )
    q = torch.zeros_like(problem.q)
    q[..., 0] = 1
    k = torch.randint(-2, 1, problem.k.shape, device="cuda").to(torch.bfloat16)
    v = torch.randint(-8, 9, problem.v.shape, device="cuda").to(torch.bfloat16)
    problem = type(problem)(
        **{**vars(problem), "q": q, "k": k, "v": v, "scale": math.log(2.0)},
    )
    weights = torch.exp2(k[..., :1].double())  # of the keys [rows, heads, 1]
    samples = torch.repeat_interleave(problem.k_layout.lengths.cuda())
    zeros = torch.zeros(64, 4, dim, dtype=torch.float64, device="cuda")
    above = zeros.index_add(0, samples, weights * v.double())
    below = zeros[..., :1].index_add(0, samples, weights)
    exact = (above / below).repeat_interleave(130, 0)
    first, lse = launch(problem, shape, p_shared=p_shared)
    assert ((first.double() - exact).abs() <= exact.abs() * 2**-8).all()
    torch.testing.assert_close(
        lse, below[..., 0].log().repeat_interleave(130, 0).float(), rtol=1e-6, atol=1e-6
    )
    for _ in range(50):
        out, _ = launch(problem, shape, p_shared=p_shared)
        assert torch.equal(out, first)


@pytest.mark.parametrize(("dim", "shape"), ALL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_that_outgrow_all_before(dtype, dim, shape):
    for options in RISING:
        options = {"heads": 4, "dim": dim, "device": "cuda", "dtype": dtype} | options
        problem = rising_problem([600, 3, 131, 700] * 40, **options)
        out, lse = launch(problem, shape)
        assert_close_to_reference({"out": out, "lse": lse}, problem)


@pytest.mark.parametrize(("dim", "shape"), ALL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tiles_in_parts_agree_with_the_reference(dtype, dim, shape):
    lengths = [40_000, 500, 0, 3000, 7]
    for queries in (1, 190, 300, [700, 64, 3, 0, 130]):
        problem = random_problem(
            queries, lengths, heads=2, kv_heads=1, dim=dim, dtype=dtype, device="cuda"
        )
        with recorded() as launches:
            launch(problem, shape)
        assert any(kernel is tlx_forward_merge.merge_kernel for kernel, _, _ in launches)
        out, lse = launch(problem, shape)
        again, again_lse = launch(problem, shape)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
        assert_close_to_reference({"out": out, "lse": lse}, problem)


def test_probabilities_in_registers_and_in_shared_memory_give_the_same_bits():
    problem = random_problem(
        [300, 0, 77, 64] * 20, [511, 3, 0, 64] * 20, heads=4, dim=128, device="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip
    for shape in (Shape(2, 64, 3, 1, 240), Shape(2, 128, 1, 1, 240), Shape(1, 64, 3, 2, 232)):
        a, b = (launch(problem, shape, p_shared=p) for p in (False, True))
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

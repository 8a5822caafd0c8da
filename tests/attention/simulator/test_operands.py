"""Left operands in registers: made anew before or after the product has read the last."""

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.backends import tlx_
from gem.attention.simulator import errors, simulate
from gem.attention.testing import random_problem
from tests.attention.simulator import operand_kernels as kernels
from tests.attention.simulator.helpers import launched
from tests.attention.simulator.mutation import imported_kernel, replaced
from tests.attention.simulator.mutation_cases import FORWARD

SEEDS = range(4)


def powers(how, seed, turns=4, static=0):
    x, b = torch.randn(64, 64).half().float(), torch.randn(64, 64).half()
    out = torch.zeros(64, 64)
    args = [TensorDescriptor.from_tensor(b, [64, 64]), x, out, turns]
    simulate(kernels.powers_kernel, (1,), args, HOW=how, STATIC=static, seeds=[seed])
    parts = torch.stack([(x * 0.5**t).half().float() for t in range(turns + static)])
    torch.testing.assert_close(out, parts.sum(0) @ b.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["float32 carried", "carried after the wait"])
def test_operands_made_after_the_wait(how, seed):
    powers(how, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_unrolled_turns_have_registers_of_their_own(seed):
    powers("float32 carried", seed, turns=0, static=3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["carried before the wait", "made before the wait"])
def test_operands_made_too_early_are_reported(how, seed):
    with pytest.raises(errors.OverwrittenOperand) as caught:
        powers(how, seed)
    with open(kernels.__file__) as f:
        lines = f.read().splitlines()
    branch = next(i for i, line in enumerate(lines) if f'HOW == "{how}"' in line)
    made = next(i for i in range(branch, len(lines)) if "p = x.to" in lines[i]) + 1
    assert f"was made (at line {made}) while the product" in str(caught.value)
    assert lines[caught.value.where[0][1] - 1].strip() == "acc = tlx.async_dot(p, b[0], acc)"


@pytest.mark.parametrize(
    ("dim", "shape"),
    [
        (64, tlx_.Shape(2, 64, 2, 1, 240)),
        (64, tlx_.Shape(2, 64, 2, 1, 240, p_wide=True)),
        (128, tlx_.Shape(2, 64, 2, 1, 240, p_wide=True)),
        (128, tlx_.Shape(2, 64, 2, 1, 240)),
    ],
    ids=["64", "64 wide", "128 wide", "128 in pairs"],
)
def test_our_forward_converts_after_the_wait(dim, shape, tmp_path, monkeypatch):
    """Its probabilities may not be rounded before the product of the last ones is complete."""
    wait = "    out0 = tlx.async_dot_wait(0, out0)\n    if OPTIONS.PIECES == 2:\n"
    release = "        out1 = tlx.async_dot_wait(0, out1)\n    tlx.barrier_arrive(v_empty)"
    convert = "    weights = _carried(weights, OPTIONS)\n"
    if shape.p_wide:
        early = "    weights = weights.to(OPTIONS.DTYPE)\n" + wait + release
        changed = replaced(FORWARD.sources, wait + release, early)
    else:
        before = wait + release + "\n" + convert
        changed = replaced(FORWARD.sources, before, convert + wait + release + "\n")
    module = imported_kernel(changed, tmp_path, "converts_early")
    generator = torch.Generator().manual_seed(1)
    problem = random_problem([300], dim=dim, dtype=torch.bfloat16, generator=generator)
    launched(problem, shape, 0)
    monkeypatch.setattr(tlx_, "hopper_forward_kernel", module.hopper_forward_kernel)
    with pytest.raises(errors.OverwrittenOperand):
        launched(problem, shape, 0)

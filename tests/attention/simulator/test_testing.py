"""`under_seeds`: one launch under many seeds."""

import itertools

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import SimulationError
from gem.attention.simulator.testing import under_seeds
from tests.attention.simulator import kernels


def product(fault=""):
    a, b = torch.ones(64, 128).half(), torch.ones(128, 64).half()
    c = torch.full((64, 64), torch.nan)
    args = [TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b, c)]
    kernels.product_kernel[(1,)](*args, 2, STAGES=2, FAULT=fault)
    return c


def test_results_and_counts():
    c, counts = under_seeds(product, 6)
    assert (c == 128).all()
    assert (counts.launches, counts.programs, counts.products) == (6, 6, 12)
    assert counts.products_per_second > 0


def test_the_first_fault_is_raised_with_its_seed():
    with pytest.raises(SimulationError, match="MissingFence.* seed 3:"):
        under_seeds(lambda: product("no fence"), [3, 4])


def test_results_that_differ_are_reported():
    number = itertools.count()

    def launch():
        return [product(), product() + next(number)]

    with pytest.raises(AssertionError, match="result 1 differs between seeds 0 and 1"):
        under_seeds(launch, 2)
    under_seeds(launch, 2, same=False)

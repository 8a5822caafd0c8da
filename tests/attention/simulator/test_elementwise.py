"""Functions of single numbers over tensors, functions that call themselves, methods of tensors."""

import torch

from gem.attention.simulator import simulate
from tests.attention.simulator.elementwise_kernels import mapped_kernel


def test_functions_of_single_numbers():
    n, parts = 32, 4
    x, out = torch.randn(n), torch.zeros(4, n)
    x.view(parts, -1)[:, 0] = torch.tensor([2.5, 3.0, 7.9, 5.1])
    simulate(mapped_kernel, (1,), [x, out], N=n, PARTS=parts)
    high = torch.arange(n) / n
    torch.testing.assert_close(out[0], torch.minimum(x.clamp(min=-1.0), high))
    torch.testing.assert_close(out[1], torch.where(x > 0, x, 0.25 * x))
    torch.testing.assert_close(out[2], x.abs())
    torch.testing.assert_close(out[3, :parts], x.view(parts, -1).sum(1))
    assert torch.equal(out[3, parts : 2 * parts], torch.tensor([4.0, 8.0, 128.0, 32.0]))

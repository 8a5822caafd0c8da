"""Shared memory: views, aliases, and copies without a descriptor."""

import pytest
import torch

from gem.attention.simulator import errors, simulate
from tests.attention.simulator import memory_kernels as kernels


def bulk(seed, size=256, fault=""):
    x, out = torch.randn(128), torch.zeros(64)
    simulate(kernels.bulk_kernel, (1,), [x, out, size], seeds=[seed], FAULT=fault)
    return x, out


@pytest.mark.parametrize("seed", range(4))
def test_bulk_copies(seed):
    x, out = bulk(seed)
    assert torch.equal(out, 2 * x[64:])
    for fault, kind in (
        ("no wait", errors.AsyncConflict),
        ("no fence", errors.MissingFence),
        ("no store wait", errors.AsyncConflict),
    ):
        with pytest.raises(kind):
            bulk(seed, fault=fault)
    with pytest.raises(errors.WrongBytes, match=r"full\[0\] still expects 128 bytes"):
        bulk(seed, 128)
    with pytest.raises(errors.OutOfBounds, match="multiples of 16"):
        bulk(seed, 120)


@pytest.mark.parametrize("seed", range(4))
def test_a_fence_counts_on_either_side_of_the_barrier(seed):
    for fence in ("by the writer", "by the reader"):
        out = torch.zeros(64)
        simulate(kernels.handed_kernel, (1,), [out], seeds=[seed], FENCE=fence)
        assert (out == 3).all()
    for fence in ("nowhere", "too early"):
        with pytest.raises(errors.MissingFence):
            simulate(kernels.handed_kernel, (1,), [out], seeds=[seed], FENCE=fence)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_groups_of_copies(seed, stages):
    x, out = torch.randn(5, 32), torch.zeros(5, 32)
    options = {"seeds": [seed], "STAGES": stages}
    simulate(kernels.group_kernel, (1,), [x, out, 5], **options)
    expected = x.clone()
    expected[: stages - 1, 30:] = 7.0
    assert torch.equal(out, expected)
    with pytest.raises(errors.AsyncConflict, match="may still be writing"):
        simulate(kernels.group_kernel, (1,), [x, out, 5], FAULT="one too many", **options)


def test_aliases_share_bytes():
    out = torch.zeros(128)
    # All begin at the start: c[1] lies over a[1], b[3] over its last half.
    simulate(kernels.alias_kernel, (1,), [out], SIZE=None, KIND="shared")
    assert (out[:96] == 2).all() and (out[96:] == 0).all()
    # c lies behind b; an index of a shares the region of both.
    simulate(kernels.alias_kernel, (1,), [out], SIZE=None, KIND="distinct")
    assert (out[:96] == 1).all() and (out[96:] == 0).all()
    simulate(kernels.alias_kernel, (1,), [out], SIZE=1024, KIND="distinct")
    with pytest.raises(errors.ResourceError, match="a, b, c need 1024 bytes of .* for 768"):
        simulate(kernels.alias_kernel, (1,), [out], SIZE=768, KIND="distinct")


def test_views():
    x, out = torch.randn(32, 32), torch.zeros(3584)
    simulate(kernels.view_kernel, (1,), [x, out])
    x[8:24, 16:] += 1
    assert torch.equal(out[:1024].view(32, 32), x.T)
    assert torch.equal(out[1024:2048].view(32, 32), x)
    assert torch.equal(out[2048:3072].view(32, 32), x)
    assert torch.equal(out[3072:].view(16, 32), x[16:])

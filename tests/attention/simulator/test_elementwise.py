"""Functions of single numbers over tensors, functions that call themselves, methods of tensors,
and the conversion of pairs by inline assembly."""

import re

import pytest
import torch

from gem.attention.simulator import errors, simulate
from tests.attention.simulator.elementwise_kernels import (
    mapped_kernel,
    pairs_kernel,
    pinned_kernel,
)


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


def pairs(x, y, assembly, types="=r,f,f", pack=1):
    """What assembly makes of pairs, `[N, 2]` numbers of 16 bits, the lower half first."""
    out = torch.zeros(len(x), dtype=torch.int32)
    simulate(pairs_kernel, (1,), [x, y, out], N=len(x), ASSEMBLY=assembly, TYPES=types, PACK=pack)
    return out.view(torch.int16).view(-1, 2)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_pairs_are_rounded_as_by_torch(kind, dtype):
    """Among them are ties, numbers on both sides of one, subnormals, the largest and infinities."""
    eps, most, least = (getattr(torch.finfo(dtype), x) for x in ("eps", "max", "smallest_normal"))
    ties = 1 + eps * torch.tensor([0.5, 1.5, 0.5 + 2**-10, 0.5 - 2**-10])
    far = torch.tensor([most, most * (1 + eps / 8), most * (1 + eps / 3), torch.inf, 0.0])
    near = least * torch.tensor([0.7, eps, eps / 2, eps / 4, eps * 1.5])
    x = torch.cat([ties, far, near, torch.randn(2)])
    x = torch.cat([x, -x, torch.randn(32) * 100])
    y = x.flip(0)
    found = pairs(x, y, f"cvt.rn.{kind}.f32 $0, $2, $1;")
    assert torch.equal(found, torch.stack([x, y], 1).to(dtype).view(torch.int16))


@pytest.mark.parametrize(
    ("assembly", "types", "pack"),
    [
        ("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", 1),
        ("cvt.rz.bf16x2.f32 $0, $2, $1;", "=r,f,f", 1),
        ("cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", 1),
        ("cvt.rn.e4m3x2.f32 $0, $2, $1;", "=r,f,f", 1),
        ("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", 1),
        ("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", 2),
    ],
)
def test_other_conversions_are_reported(assembly, types, pack):
    x = torch.randn(32)
    with pytest.raises(errors.UnsupportedOperation, match=re.escape(assembly)):
        pairs(x, x, assembly, types, pack)


def test_pairs_of_other_types_are_reported():
    x = torch.arange(32, dtype=torch.int32)
    with pytest.raises(errors.UnsupportedOperation, match="of these types"):
        pairs(x, x, "cvt.rn.bf16x2.f32 $0, $2, $1;")


def test_a_pinned_layout_changes_no_number_but_has_to_have_room_for_all():
    out = torch.zeros(256, dtype=torch.int32)
    simulate(pinned_kernel, (1,), [out], VALUES=2)
    assert torch.equal(out, torch.arange(256, dtype=torch.int32))
    with pytest.raises(errors.UnsupportedOperation, match=r"128 places, not those of \[256\]"):
        simulate(pinned_kernel, (1,), [out], VALUES=1)

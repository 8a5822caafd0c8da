"""Every block against its equation, written out sample by sample."""

import pytest
import torch
from torch.nn import functional as F

from gem.attention import JaggedLayout
from gem.model.jagged import Appended, Blocks
from gem.model.layers import Gate
from gem.model.pooling import HSP, PMA, SumKronLinear
from gem.model.sequence import GDPA
from gem.model.wukong import FactorizationMachineBlock, WukongLayer

LENGTHS = [0, 3, 1, 0, 70, 64, 5, 0]


def layout_of(lengths: list[int]) -> JaggedLayout:
    return JaggedLayout.from_lengths(torch.tensor(lengths, dtype=torch.int64), "cpu")


def test_fm_block_is_the_projected_matrix_of_dot_products():
    torch.manual_seed(0)
    block = FactorizationMachineBlock(tokens=6, width=4, out=3, rank=2, hidden=[8]).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    dots = torch.einsum("bnd,bmd->bnm", x, x)
    expected = block.mlp(block.norm((dots @ block.projection).flatten(1))).view(5, 3, 4)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("tokens", [5, 9], ids=["same_tokens", "compressed_residual"])
def test_wukong_layer_adds_its_residual(tokens):
    torch.manual_seed(0)
    layer = WukongLayer(tokens, width=4, fmb=3, lcb=2, rank=2, hidden=[8])
    x = torch.randn(7, tokens, 4)
    parts = torch.cat([layer.fmb(x), torch.einsum("mn,bnd->bmd", layer.lcb.weight, x)], dim=1)
    residual = x if tokens == 5 else torch.einsum("mn,bnd->bmd", layer.residual.weight, x)
    torch.testing.assert_close(layer(x), F.layer_norm(parts + residual, (4,)))


def test_sum_kron_linear_is_a_sum_of_kronecker_products():
    torch.manual_seed(0)
    module = SumKronLinear(tokens=6, out=3, width=4, rank=2).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    full = sum(
        torch.kron(z.contiguous(), w.T.contiguous())
        for z, w in zip(module.token_weights, module.width_weights, strict=True)
    )
    expected = (x.flatten(1) @ full.T).view(5, 3, 4)
    torch.testing.assert_close(module(x), expected)


def gdpa_by_sample(module: GDPA, s, summary, layout):
    """`S' = S + RMSNorm(act(scale q K^T) V + q)` one sample and one head at a time."""
    width, heads = s.shape[1], module.heads
    out = []
    for i in range(layout.batch_size):
        rows = s[layout.offsets[i] : layout.offsets[i + 1]]
        q = F.layer_norm(rows, (width,))
        k, v = module.weights(module.tokens(summary[i : i + 1]))[0].chunk(2, dim=-1)
        k, v = k + module.key_bias, v + module.value_bias
        parts = []
        for h in range(heads):
            d = slice(h * width // heads, (h + 1) * width // heads)
            parts.append(F.silu(module.scale * q[:, d] @ k[:, d].T) @ v[:, d])
        out.append(rows + F.rms_norm(torch.cat(parts, dim=1) + q, (width,)))
    return torch.cat(out)


def test_gdpa_matches_the_loop_with_every_gradient():
    torch.manual_seed(0)
    layout = layout_of(LENGTHS)
    module = GDPA(8, 2, 3, 5, block=16).double()
    inputs = [
        torch.randn(layout.rows, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(len(LENGTHS), 3, 8, dtype=torch.float64, requires_grad=True),
    ]
    weights = torch.randn(layout.rows, 8, dtype=torch.float64)
    wanted = gdpa_by_sample(module, *inputs, layout)
    got = module(*inputs, Blocks(layout, 16))
    torch.testing.assert_close(got, wanted)
    leaves = [*inputs, *module.parameters()]
    got_grads = torch.autograd.grad((got * weights).sum(), leaves)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), leaves)
    for got_grad, wanted_grad in zip(got_grads, wanted_grads, strict=True):
        torch.testing.assert_close(got_grad, wanted_grad)


@pytest.mark.parametrize("make", [
    lambda: PMA(8, 2, 3),
    lambda: HSP(8, 2, 6, 3, 2),
], ids=["pma", "hsp"])
def test_pooling_sees_its_own_sample_alone(make):
    """A batch of samples gives what each gives alone; an empty one depends on weights only."""
    torch.manual_seed(0)
    module = make().double()
    layout = layout_of(LENGTHS)
    s = torch.randn(layout.rows, 8, dtype=torch.float64)
    together = module(s, layout)
    assert together.shape == (len(LENGTHS), 3, 8)
    for i, n in enumerate(LENGTHS):
        rows = s[layout.offsets[i] : layout.offsets[i + 1]]
        torch.testing.assert_close(together[i : i + 1], module(rows, layout_of([n])))
    assert torch.isfinite(together).all()


def test_gate_starts_open():
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(Gate(8)(x), x)


def test_appended_rows_follow_their_sample():
    layout = layout_of([2, 0, 1])
    place = Appended(layout, 2)
    events = torch.tensor([[1.0], [2.0], [3.0]])
    extra = -torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).unsqueeze(-1)
    joined = place.join(events, extra)
    assert joined.flatten().tolist() == [1, 2, -1, -2, -3, -4, 3, -5, -6]
    assert place.layout.lengths.tolist() == [4, 2, 3]
    assert place.position.tolist() == [3, 2, 1, 0, 1, 0, 2, 1, 0]
    last = place.last(joined, 3).squeeze(-1)
    assert last.tolist() == [[-2, -1, 2], [-4, -3, 0], [-6, -5, 3]]


def test_join_has_the_gradient_of_a_permutation():
    place = Appended(layout_of([2, 0, 3]), 2)
    inputs = (
        torch.randn(5, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(place.join, inputs)


@pytest.mark.parametrize("heads", [1, 3])
def test_blocks_round_trip_with_poisoned_padding(heads):
    layout = layout_of(LENGTHS)
    blocks = Blocks(layout, 16)
    x = torch.randn(layout.rows, 6, requires_grad=True)
    packed = blocks.pack(x, heads)
    assert packed.shape == (sum(-(-n // 16) for n in LENGTHS), heads, 16, 6 // heads)
    poisoned = torch.where(blocks.valid[:, None, :, None], packed, torch.nan)
    back = blocks.unpack(poisoned)
    torch.testing.assert_close(back, x)
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    torch.testing.assert_close(grad, 2 * x)


def test_blocks_of_nothing():
    blocks = Blocks(layout_of([0, 0]), 16)
    x = torch.randn(0, 4, requires_grad=True)
    out = blocks.unpack(blocks.pack(x, 2))
    assert out.shape == (0, 4)
    out.sum().backward()

"""Every block against its equation, written out sample by sample."""

import pytest
import torch
from torch.nn import functional as F

from gem.attention import JaggedLayout
from gem.model.jagged import Blocks, LastRows, distance_from_end
from gem.model.layers import Gate
from gem.model.pooling import HSP, PMA, SumKronLinear
from gem.model.sequence import GDPA, SequenceAttention, SequenceState
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


def state_of(lengths: list[int], width: int, cls: int, rotary=None) -> SequenceState:
    layout = layout_of(lengths)
    make = {"dtype": torch.float64, "requires_grad": True}
    return SequenceState(
        s=torch.randn(layout.rows, width, **make),
        cls=torch.randn(len(lengths), cls, width, **make),
        layout=layout,
        cls_layout=layout_of([cls] * len(lengths)),
        blocks=Blocks(layout, 16),
        recent=LastRows(layout, 2),
        rotary=rotary,
    )


def rows_of(state: SequenceState, i: int) -> torch.Tensor:
    return state.s[state.layout.offsets[i] : state.layout.offsets[i + 1]]


def gdpa_of_sample(module: GDPA, rows, summary):
    """`S' = S + RMSNorm(act(scale q K^T) V + q)`, head by head."""
    width = rows.shape[1]
    q = F.layer_norm(rows, (width,))
    k, v = module.weights(module.tokens.weight @ summary).chunk(2, dim=-1)
    k, v = k + module.key_bias, v + module.value_bias
    parts = []
    for h in range(module.heads):
        d = slice(h * width // module.heads, (h + 1) * width // module.heads)
        parts.append(F.silu(module.scale * q[:, d] @ k[:, d].T) @ v[:, d])
    return rows + F.rms_norm(torch.cat(parts, dim=1) + q, (width,))


@pytest.mark.parametrize("cls", [0, 2])
def test_gdpa_matches_the_loop_with_every_gradient(cls):
    torch.manual_seed(0)
    state = state_of(LENGTHS, width=8, cls=cls)
    module = GDPA(8, 2, 3, 5).double()
    summary = torch.randn(len(LENGTHS), 3, 8, dtype=torch.float64, requires_grad=True)
    after = module(state, summary)
    samples = range(len(LENGTHS))
    wanted = [
        torch.cat([gdpa_of_sample(module, rows_of(state, i), summary[i]) for i in samples]),
        torch.stack([gdpa_of_sample(module, state.cls[i], summary[i]) for i in samples]),
    ]
    compare_with_gradients(
        [after.s, after.cls], wanted, [state.s, state.cls, summary, *module.parameters()]
    )


def compare_with_gradients(got, wanted, leaves):
    torch.testing.assert_close(got, wanted)
    weights = [torch.randn_like(x) for x in wanted]
    gradients = [
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)),
            leaves,
            allow_unused=True,
        )
        for outputs in (got, wanted)
    ]
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None) or a is None and not b.any() or b is None and not a.any()
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_sides"])
def test_sequence_attention_matches_the_loop(causal):
    """Events see a window, CLS tokens everything and a sink."""
    torch.manual_seed(0)
    lengths, width, heads = [0, 3, 1, 20], 8, 2
    state = state_of(lengths, width, cls=2)
    module = SequenceAttention(width, heads, window=4, causal=causal).double()
    torch.nn.init.normal_(module.sink)
    torch.nn.init.normal_(module.k_proj.weight)
    after = module(state)
    events, cls = [], []
    for i in range(len(lengths)):
        rows = rows_of(state, i)
        x, c = module.norm(rows), module.norm(state.cls[i])
        n = torch.arange(len(rows))
        delta = n[None, :] - n[:, None]
        hidden = (delta < -4) | (delta > (0 if causal else 4))
        k, v = module.k_proj(x), module.v_proj(x)
        parts, seen = [], []
        for h in range(heads):
            d = slice(4 * h, 4 * h + 4)
            scores = (module.q_proj(x)[:, d] @ k[:, d].T) / 2
            parts.append(scores.masked_fill(hidden, -torch.inf).softmax(1) @ v[:, d])
            scores = (module.q_proj(c)[:, d] @ k[:, d].T) / 2
            weights = scores.exp() / (module.sink[h].exp() + scores.exp().sum(1, keepdim=True))
            seen.append(weights @ v[:, d])
        events.append(rows + module.gamma * module.out_proj(torch.cat(parts, dim=1)))
        cls.append(state.cls[i] + module.out_proj(torch.cat(seen, dim=1)))
    compare_with_gradients(
        [after.s, after.cls],
        [torch.cat(events), torch.stack(cls)],
        [state.s, state.cls, *module.parameters()],
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: PMA(8, 2, 3),
        lambda: HSP(8, 2, 6, 3, 2),
    ],
    ids=["pma", "hsp"],
)
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


def test_last_rows_and_distances():
    layout = layout_of([2, 0, 1, 3])
    x = torch.arange(1.0, 7.0).unsqueeze(1)
    assert distance_from_end(layout).tolist() == [2, 1, 1, 3, 2, 1]
    last = LastRows(layout, 2).take(x).squeeze(-1)
    assert last.tolist() == [[2, 1], [0, 0], [3, 0], [6, 5]]


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

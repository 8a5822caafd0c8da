"""The modules, used alone, and rotary embedding."""

import math

import pytest
import torch
from torch.nn import functional as F

from gem.attention import (
    BroadcastAttention,
    JaggedAttention,
    JaggedLayout,
    apply_rotary,
    apply_sink,
    jagged_attention,
    rotary_angles,
)

LENGTHS = [5, 0, 1, 12]


def padded_attention(module, x, kv, mask=None):
    """The module's result for one sample by PyTorch's dense attention."""

    def heads(y, n):
        return y.unflatten(-1, (n, module.head_dim)).transpose(0, 1)[None]

    q = heads(module.q_proj(x), module.num_heads)
    k, v = (heads(p(kv), module.num_kv_heads) for p in (module.k_proj, module.v_proj))
    if module.qk_norm:
        q = F.rms_norm(q, q.shape[-1:], eps=1e-6) * module.q_scale
        k = F.rms_norm(k, k.shape[-1:], eps=1e-6) * module.k_scale
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return module.out_proj(out[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "qk_norm": True, "bias": True},
        {"head_dim": 24, "window": (2, 1)},
        {"causal": True},
    ],
    ids=str,
)
def test_self_attention_equals_dense_attention_of_each_sample(options):
    module = JaggedAttention(32, 4, **options, dtype=torch.float64)
    if module.qk_norm:
        torch.nn.init.uniform_(module.q_scale, 0.5, 2.0)
    layout = JaggedLayout.from_lengths(LENGTHS)
    x = torch.randn(layout.rows, 32, dtype=torch.float64, requires_grad=True)
    out = module(x, layout)
    expected = []
    for rows in x.split(LENGTHS):
        distance = torch.arange(len(rows)) - torch.arange(len(rows))[:, None]
        mask = torch.ones_like(distance, dtype=torch.bool)
        if module.causal:
            mask = distance <= 0
        if module.window:
            mask = (distance >= -module.window[0]) & (distance <= module.window[1])
        expected.append(padded_attention(module, rows, rows, mask) if len(rows) else rows)
    expected = torch.cat(expected)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    inputs = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_cross_attention_equals_dense_attention_of_each_sample():
    module = JaggedAttention(32, 4, num_kv_heads=2, dtype=torch.float64)
    layout, kv_layout = JaggedLayout.from_lengths(LENGTHS), JaggedLayout.from_lengths([3, 4, 2, 7])
    x = torch.randn(layout.rows, 32, dtype=torch.float64)
    kv = torch.randn(kv_layout.rows, 32, dtype=torch.float64)
    out = module(x, layout, kv, kv_layout)
    parts = zip(x.split(LENGTHS), kv.split([3, 4, 2, 7]), strict=True)
    expected = torch.cat([padded_attention(module, a, b) for a, b in parts])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("explicit", [False, True], ids=["learned", "given"])
def test_broadcast_attention_equals_dense_attention_of_each_sample(explicit):
    module = BroadcastAttention(32, 4, 3, qk_norm=True, dtype=torch.float64)
    layout = JaggedLayout.from_lengths([5, 2, 1, 12])
    x = torch.randn(layout.rows, 32, dtype=torch.float64)
    queries = torch.randn(6, 32, dtype=torch.float64) if explicit else None
    out = module(x, layout, queries)
    used = queries if explicit else module.queries
    expected = [padded_attention(module, used, rows) for rows in x.split([5, 2, 1, 12])]
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_an_empty_sample_gives_the_bias_of_the_output_projection():
    module = BroadcastAttention(16, 2, 3, bias=True)
    torch.nn.init.normal_(module.out_proj.bias)
    out = module(torch.randn(4, 16), JaggedLayout.from_lengths([4, 0]))
    torch.testing.assert_close(out[1], module.out_proj.bias.expand(3, 16))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_every_parameter_learns():
    torch.manual_seed(0)
    layout = JaggedLayout.from_lengths(LENGTHS)
    x = torch.randn(layout.rows, 16)
    modules = [
        JaggedAttention(16, 2, bias=True, qk_norm=True),
        BroadcastAttention(16, 2, 3, bias=True, qk_norm=True),
    ]
    for module in modules:
        (module(x, layout) ** 2).sum().backward()
        for name, p in module.named_parameters():
            if name != "k_proj.bias" or module.qk_norm:  # softmax does not feel a shift of keys
                assert p.grad.abs().sum() > 0, name


def test_initial_outputs_are_of_the_size_of_the_inputs():
    torch.manual_seed(0)
    layout = JaggedLayout.from_lengths([1] * 512)
    x = torch.randn(512, 64)
    assert 0.7 < JaggedAttention(64, 4)(x, layout).std() < 1.4


def test_modules_move_build_on_meta_and_load():
    with torch.device("meta"):
        meta = BroadcastAttention(16, 2, 3, qk_norm=True)
    assert all(p.device.type == "meta" for p in meta.parameters())
    a, b = (JaggedAttention(16, 2, qk_norm=True, bias=True) for _ in range(2))
    b.load_state_dict(a.state_dict())
    layout, x = JaggedLayout.from_lengths(LENGTHS), torch.randn(18, 16)
    assert torch.equal(a(x, layout), b(x, layout))
    half = a.to(torch.bfloat16)(x.bfloat16(), layout, rotary=rotary_angles(torch.arange(18), 8))
    assert half.dtype == torch.bfloat16
    assert "num_heads=2" in repr(a) and "num_queries=3" in repr(meta)


def test_autocast():
    module = JaggedAttention(16, 2, qk_norm=True)
    layout, x = JaggedLayout.from_lengths(LENGTHS), torch.randn(18, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, layout, rotary=rotary_angles(torch.arange(18), 8))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(),
        module(x, layout, rotary=rotary_angles(torch.arange(18), 8)),
        rtol=0.1,
        atol=0.1,
    )
    out.sum().backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JaggedAttention(10, 4), "multiple of num_heads .* 10 and 4"),
        (lambda: JaggedAttention(16, 4, num_kv_heads=3), "multiple of num_kv_heads.* 4 and 3"),
        (lambda: JaggedAttention(16, 0), "num_heads must be at least 1, but is 0"),
        (lambda: JaggedAttention(16, 2, head_dim=512), "head_dim must be 1 to 256, but is 512"),
        (lambda: JaggedAttention(16, 2, causal=True, window=(3, 3)), "right window of 0"),
        (lambda: JaggedAttention(16, 2, window=(-1, 0)), "ints of at least 0"),
        (lambda: JaggedAttention(16, 2, backend="fast"), "backend must be one of"),
        (lambda: BroadcastAttention(16, 2, 0), "num_queries must be at least 1 or None"),
    ],
)
def test_arguments_that_do_not_fit_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_inputs_that_do_not_fit_raise():
    layout, x = JaggedLayout.from_lengths(LENGTHS), torch.randn(18, 16)
    module, pool = JaggedAttention(16, 2), BroadcastAttention(16, 2, None)
    with pytest.raises(ValueError, match=r"x must have shape \[rows, 16\], but has \[18, 8\]"):
        module(x[:, :8], layout)
    with pytest.raises(ValueError, match="kv and kv_layout must be given together"):
        module(x, layout, kv=x)
    with pytest.raises(ValueError, match="there is no kv"):
        module(x, layout, kv_rotary=rotary_angles(torch.arange(18), 8))
    with pytest.raises(ValueError, match="queries must be given"):
        pool(x, layout)
    with pytest.raises(ValueError, match=r"queries must have shape \[rows, 16\]"):
        pool(x, layout, torch.randn(3, 8))
    assert pool(x, layout, torch.randn(3, 16)).shape == (4, 3, 16)


def test_rotary_angles():
    cos, sin = rotary_angles(torch.tensor([0, 3]), 4, base=100.0)
    assert cos.shape == sin.shape == (2, 2) and cos.dtype == torch.float32
    expected = torch.tensor([[0.0, 0.0], [3.0, 0.3]])
    torch.testing.assert_close(cos, expected.cos())
    torch.testing.assert_close(sin, expected.sin())
    times = torch.tensor([1e5, 2.5e-3], dtype=torch.float64)
    assert rotary_angles(times, 4)[0].dtype == torch.float64


def test_rotary_turns_pairs_of_neighbours():
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    cos, sin = rotary_angles(torch.rand(5, dtype=torch.float64) * 9, 6)
    a, b = x[..., ::2], x[..., 1::2]
    cos_, sin_ = cos[:, None], sin[:, None]
    expected = torch.stack([a * cos_ - b * sin_, a * sin_ + b * cos_], dim=-1).flatten(-2)
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected)
    shifted = torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)
    for same in (shifted, x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(apply_rotary(same, cos, sin), expected)
    inputs = x.requires_grad_()
    assert torch.autograd.gradcheck(lambda y: apply_rotary(y, cos, sin), inputs)
    half = apply_rotary(x.detach().bfloat16(), cos.float(), sin.float())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0.02, atol=0.02)


def test_rotary_makes_attention_depend_on_differences_of_position():
    module = JaggedAttention(16, 2, dtype=torch.float64)
    layout = JaggedLayout.from_lengths([6, 4])
    x = torch.randn(10, 16, dtype=torch.float64)
    positions = torch.cat([torch.arange(6), torch.arange(4)]).double()
    here = module(x, layout, rotary=rotary_angles(positions, 8))
    there = module(x, layout, rotary=rotary_angles(positions + 1000.0, 8))
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(here, module(x, layout), atol=1e-3)


def test_rotary_of_cross_attention_turns_queries_and_keys_apart():
    module = JaggedAttention(16, 2, dtype=torch.float64)
    layout, x = JaggedLayout.from_lengths([6, 4]), torch.randn(10, 16, dtype=torch.float64)
    rotary = rotary_angles(torch.arange(10).double(), 8)
    expected = module(x, layout, rotary=rotary)
    out = module(x, layout, x, layout, rotary=rotary, kv_rotary=rotary)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(module(x, layout, x, layout, rotary=rotary), expected, atol=1e-3)


def test_rotary_arguments_that_do_not_fit_raise():
    x, (cos, sin) = torch.randn(5, 2, 8), rotary_angles(torch.arange(5), 8)
    with pytest.raises(ValueError, match=r"cos must have shape \[5, 4\], but has \[4, 4\]"):
        apply_rotary(x, cos[:4], sin)
    with pytest.raises(ValueError, match=r"sin must have shape \[5, 4\], but has \[5, 3\]"):
        apply_rotary(x, cos, sin[:, :3])
    with pytest.raises(ValueError, match="even dim"):
        apply_rotary(torch.randn(5, 2, 7), cos, sin)
    with pytest.raises(ValueError, match="head_dim must be even and at least 2, but is 7"):
        rotary_angles(torch.arange(5), 7)
    with pytest.raises(ValueError, match=r"shape \[rows\], but have \[5, 1\]"):
        rotary_angles(torch.zeros(5, 1), 8)
    with pytest.raises(ValueError, match="base must be positive"):
        rotary_angles(torch.arange(5), 8, base=0.0)


def test_scores_are_scaled_by_the_head_dim():
    """One query, two keys: the weight of the first is a sigmoid of the scaled difference."""
    module = JaggedAttention(4, 1)
    for p in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        torch.nn.init.eye_(p.weight)
    x = torch.tensor([[2.0, 0, 0, 0], [0, 1.0, 0, 0]])
    out = module(x[:1], JaggedLayout.from_lengths([1]), x, JaggedLayout.from_lengths([2]))
    weight = 1 / (1 + math.exp(-4 / math.sqrt(4)))
    torch.testing.assert_close(out[0, :2], torch.tensor([2 * weight, 1 - weight]))


def test_autocast_rounds_projections_and_not_the_sums_inside():
    """Same result as attention on the rounded projections without autocast."""
    torch.manual_seed(0)
    layout = JaggedLayout.from_lengths([5, 0, 300])
    q, k, v = torch.randn(3, layout.rows, 2, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = jagged_attention(q, k, v, layout, layout, window=(4, 0))
    outside = jagged_attention(q, k, v, layout, layout, window=(4, 0))
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, outside)


def test_a_sink_is_one_more_key_with_the_value_zero():
    torch.manual_seed(0)
    layout = JaggedLayout.from_lengths(LENGTHS)
    module = BroadcastAttention(8, 2, 3, sink=True, dtype=torch.float64)
    torch.nn.init.normal_(module.sink)
    x = torch.randn(layout.rows, 8, dtype=torch.float64)
    pooled = module(x, layout)
    for i in range(len(LENGTHS)):
        rows = x[layout.offsets[i] : layout.offsets[i + 1]]
        q, k, v = module.q_proj(module.queries), module.k_proj(rows), module.v_proj(rows)
        parts = []
        for h in range(2):
            d = slice(4 * h, 4 * h + 4)
            scores = torch.cat([q[:, d] @ k[:, d].T / 2, module.sink[h].expand(3, 1)], dim=1)
            values = torch.cat([v[:, d], v.new_zeros(1, 4)])
            parts.append(scores.softmax(1) @ values)
        torch.testing.assert_close(pooled[i], module.out_proj(torch.cat(parts, dim=1)))


def test_sink_of_an_empty_sample_has_finite_gradients():
    lse = torch.tensor([[-torch.inf], [0.5]], requires_grad=True)
    out = torch.tensor([[[0.0]], [[2.0]]], requires_grad=True)
    sink = torch.zeros(1, requires_grad=True)
    apply_sink(out, lse, sink).sum().backward()
    for x in (lse, out, sink):
        assert torch.isfinite(x.grad).all()

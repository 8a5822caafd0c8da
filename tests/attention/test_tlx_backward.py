"""What is particular to the TLX backward; `test_kernels` holds it against the reference."""

import dataclasses
import math
import random

import pytest
import torch
from torch import nn

from gem.attention import BroadcastAttention, JaggedAttention, JaggedLayout
from gem.attention.backends import tlx_, triton_
from gem.attention.reference import visible
from gem.attention.testing import attend, call_of, random_problem

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAMES = ("dq", "dk", "dv")


def backward(module, problem, out, lse, dlse=None, deterministic=False):
    call = dataclasses.replace(call_of(problem), direction="backward", deterministic=deterministic)
    return module.backward(call, problem.dout, dlse, problem.q, problem.k, problem.v, out, lse)


def integers(queries, lengths, kv_heads, dim, **options):
    """(problem, out, lse) of which a backward rounds nothing but its results.

    Scores are 0, -1 or -2 in base 2 and the log-sum-exp is taken to be 0, so that probabilities
    are 1, 1/2 and 1/4. Values, dout and out are so small that every score gradient has 8 bits.
    """
    problem = random_problem(
        lengths if queries is None else queries, lengths, heads=4, kv_heads=kv_heads, dim=dim,
        dtype=torch.bfloat16, device=DEVICE, scale=math.log(2.0), **options,
    )  # fmt: skip

    def drawn(x, low, high):
        return torch.randint(low, high + 1, x.shape, device=DEVICE).to(x.dtype)

    q, k = drawn(problem.q, -2, 2), torch.zeros_like(problem.k)
    q[..., 0] = 1
    k[..., 0] = drawn(k[..., 0], -2, 0)
    small = {"v": drawn(k, -1, 1), "dout": drawn(problem.dout, -1, 1)}
    problem = dataclasses.replace(problem, q=q, k=k, **small)
    out = drawn(problem.dout, -1, 1)
    return problem, out, torch.zeros(out.shape[:-1], device=DEVICE)


def exact_gradients(problem, out):
    """What the backward gives of `integers`, every sum exact and the results rounded as it does."""
    q, k, v, dout, out = (x.double() for x in (problem.q, problem.k, problem.v, problem.dout, out))
    group, broadcast = q.shape[1] // k.shape[1], problem.q_layout is None
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    k_bounds = problem.k_layout.offsets.tolist()
    for b, (first, end) in enumerate(zip(k_bounds, k_bounds[1:], strict=False)):
        rows, keys = slice(first, end), end - first
        mine = slice(None) if broadcast else rows
        do, o = (x[b] if broadcast else x[rows] for x in (dout, out))
        k_all, v_all = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        p = torch.exp2(torch.einsum("qhd,khd->hqk", q[mine], k_all))
        p *= visible(p.shape[1], keys, *problem.sides, DEVICE)
        delta = (do * o).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", do, v_all) - delta)
        dq[mine] += torch.einsum("hqk,khd->qhd", ds, k_all)
        dk[rows] += torch.einsum("hqk,qhd->khd", ds, q[mine]).unflatten(1, (-1, group)).sum(2)
        dv[rows] += torch.einsum("hqk,qhd->khd", p, do).unflatten(1, (-1, group)).sum(2)
    scale = torch.tensor(problem.factor, dtype=torch.float32, device=DEVICE)
    return tuple(x.to(torch.bfloat16) for x in (dq.float() * scale, dk.float() * scale, dv))


FORMS = [
    (None, 4, {}),
    (None, 2, {"causal": True}),
    (None, 4, {"window": (100, 30)}),
    (40, 4, {}),
    (64, 4, {}),
    (40, 2, {}),
    (200, 4, {}),
]


@pytest.mark.parametrize(("queries", "kv_heads", "options"), FORMS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_integers_are_exact_at_every_launch(queries, kv_heads, options, dim, deterministic):
    """In whatever order dQ is added up. A left operand whose registers are overwritten while it is
    read gives other integers."""
    lengths = [257, 64, 500, 1, 0, 128] * 8
    problem, out, lse = integers(queries, lengths, kv_heads, dim, **options)
    exact = exact_gradients(problem, out)
    for _ in range(50):
        gradients = backward(tlx_, problem, out, lse, deterministic=deterministic)
        for name, a, b in zip(NAMES, gradients, exact, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("queries", [None, 40, 200], ids=["self", "40", "200"])
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_runs_have_the_same_bits(queries, dim):
    lengths = [300, 0, 77, 64, 511, 1] * 20
    problem = random_problem(
        lengths if queries is None else queries, lengths, heads=4, dim=dim, device=DEVICE,
        dtype=torch.bfloat16,
    )  # fmt: skip
    first = attend(problem, "tlx", deterministic=True)
    for _ in range(99):
        again = attend(problem, "tlx", deterministic=True)
        for name, x in first.items():
            assert torch.equal(again[name], x), name


# (queries of broadcast attention at most, or None for self- and cross-attention; the mask)
KINDS = [(64, {}), (300, {}), (None, {}), (None, {"causal": True}), (None, {"window": (70, 20)})]


def assert_like(name, a, b, bound, where):
    """Both round: the norms of difference and result, of at least 0.1 an entry, are compared."""
    size = b.double().norm().clamp(min=0.1 * max(1, b.numel()) ** 0.5)
    error = (a.double() - b.double()).norm()
    assert error <= bound * size, (name, where, float(error / size))


@pytest.mark.timeout(1800)  # of which most is compilation
def test_a_thousand_small_layouts_agree_with_triton():
    count = 0
    for dim in (64, 128):
        for kv_heads in (2, 4):
            for most, options in KINDS:
                for trial in range(50):
                    count += 1
                    rng = random.Random(count)
                    agree(rng, dim, kv_heads, most, options, (dim, kv_heads, most, options, trial))
    assert count == 1000


def agree(rng, dim, kv_heads, most, options, where):
    """One random layout, forward and backward, of TLX and Triton."""
    batch = rng.randint(1, 8)
    q_lengths, k_lengths = (
        [rng.choice([0, 1, rng.randint(0, 64), rng.randint(0, 300)]) for _ in range(batch)]
        for _ in range(2)
    )
    if most is not None:
        q_lengths = rng.randint(1, most)
    elif rng.random() < 0.5:
        k_lengths = q_lengths
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    problem = random_problem(
        q_lengths, k_lengths, heads=4, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16,
        device=DEVICE, spare=rng.choice([0, 3]), generator=generator, **options,
    )  # fmt: skip
    inputs = problem.q, problem.k, problem.v
    out, lse = tlx_.forward(call_of(problem), *inputs)
    expected, expected_lse = triton_.forward(call_of(problem), *inputs)
    assert_like("out", out, expected, 6e-3, where)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    dlse = torch.randn_like(lse) if rng.random() < 0.3 else None
    deterministic = rng.random() < 0.2
    results = backward(tlx_, problem, out, lse, dlse, deterministic)
    for name, a, b in zip(NAMES, results, backward(triton_, problem, out, lse, dlse), strict=True):
        assert_like(name, a, b, 8e-3, where)


class Reader(nn.Module):
    """Self-attention, then pooling by queries whose log-sum-exp counts too."""

    def __init__(self, backend, queries):
        super().__init__()
        made = {"backend": backend, "device": DEVICE, "dtype": torch.bfloat16}
        self.local = JaggedAttention(128, 2, num_kv_heads=1, causal=True, **made)
        self.pool = BroadcastAttention(128, 2, queries, sink=True, **made)

    def forward(self, x, layout):
        return self.pool(x + self.local(x, layout), layout).float().square().mean()


def trained(backend, queries, compiled):
    """(losses, gradients of the last step) of some steps on samples of changing lengths."""
    torch.manual_seed(0)
    model = Reader(backend, queries)
    loss_of = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng, losses = random.Random(0), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        lengths = [rng.choice([0, 1, rng.randint(2, 300)]) for _ in range(6)]
        layout = JaggedLayout.from_lengths(lengths, DEVICE)
        x = torch.randn(layout.rows, 128, generator=generator).to(DEVICE, torch.bfloat16)
        x.requires_grad_()
        optimizer.zero_grad()
        loss = loss_of(x, layout)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return losses, gradients


@pytest.mark.parametrize("queries", [20, 140])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_steps_of_whole_modules_agree_with_triton(queries, compiled):
    losses, gradients = trained("tlx", queries, compiled)
    expected_losses, expected = trained("triton", queries, compiled=False)
    assert losses == pytest.approx(expected_losses, rel=2e-2)
    for name, x in gradients.items():
        assert x.isfinite().all(), name
        assert (x - expected[name]).norm() <= 5e-2 * expected[name].norm(), name

"""The Triton and TLX backends against the float64 reference.

On a GPU these tests run under the `gpu` mark. Without one, `test_kernels_interpreted` runs those of
Triton in a process of its own with TRITON_INTERPRET=1, which acts when a kernel is defined; lengths
are smaller there, since the interpreter is slow.
"""

import os
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gem.attention import backends, broadcast_attention, jagged_attention, ops
from gem.attention.backends import triton_
from gem.attention.testing import (
    Problem,
    assert_close_to_reference,
    attend,
    call_of,
    random_problem,
    reference,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# NumPy warns of what floating-point units do in silence: log2(0), inf - inf.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = [QUIET] if INTERPRETED else [pytest.mark.gpu]

LENGTHS = [12, 9, 70, 0, 5] if INTERPRETED else [12, 9, 300, 0, 1, 700, 64, 2100]
OTHER = [20, 0, 60, 5, 33] if INTERPRETED else [20, 0, 560, 5, 64, 70, 128, 400]
BACKENDS = ["triton"] if INTERPRETED else ["triton", "tlx"]
DTYPES = [torch.float16, torch.bfloat16]
# The TLX backward has other steps for wider heads.
DIMS = pytest.mark.parametrize("dim", [32] if INTERPRETED else [32, 128])


def make(*args, dtype=torch.bfloat16, **options):
    return random_problem(*args, dtype=dtype, device=DEVICE, **options)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def check(problem, backend):
    skip_unsupported(backend, problem)
    results = attend(problem, backend)
    assert_close_to_reference(results, problem)
    return results


def skip_unsupported(name, problem):
    reason = backends.unsupported(name, call_of(problem))
    if reason is not None:
        pytest.skip(f"{name} {reason}")


def test_the_kernels_are_what_the_name_says():
    assert triton_.INTERPRETED == INTERPRETED


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"causal": True}),
        (torch.bfloat16, {"window": (9, 20)}),
        (torch.float16, {"window": (None, 5)}),
        (torch.bfloat16, {"window": (70, 0)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("k_lengths", [None, OTHER], ids=["self", "cross"])
@DIMS
def test_jagged(dim, k_lengths, options, dtype, backend):
    check(
        make(LENGTHS, k_lengths, dtype=dtype, dim=dim, heads=2, kv_heads=1, spare=3, **options),
        backend,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "kv_heads"), [(0, 1), (1, 2), (7, 1), (64, 2), (100, 2), (100, 1), (192, 2)]
)
@DIMS
def test_broadcast(dim, queries, kv_heads, dtype, backend):
    check(make(queries, LENGTHS, dtype=dtype, dim=dim, kv_heads=kv_heads, spare=3), backend)


@pytest.mark.parametrize("dim", [1, 40, 128] if INTERPRETED else [1, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("queries", [None, 33, 130], ids=["self", "33", "130"])
def test_head_dims(queries, dim, backend):
    lengths = [70, 0, 33]
    check(make(lengths, dim=dim) if queries is None else make(queries, lengths, dim=dim), backend)


EDGES = [
    ([0, 3, 0, 5], [7, 0, 0, 2]),
    ([1], [130]),
    ([130], [1]),
    ([64, 65, 63], [65, 63, 64]),
    ([0, 0], [4, 9]),
    ([4, 9], [0, 0]),
    ([0, 0], [0, 0]),
    ([], []),
]
SHARED_EDGES = [(5, []), (5, [0, 0]), (0, [3, 1])]


@pytest.mark.parametrize(("q_lengths", "k_lengths"), EDGES + SHARED_EDGES, ids=str)
def test_edges(q_lengths, k_lengths, backend):
    check(make(q_lengths, k_lengths), backend)


@pytest.mark.parametrize(("q_lengths", "k_lengths"), EDGES, ids=str)
def test_edges_of_causal_attention(q_lengths, k_lengths, backend):
    check(make(q_lengths, k_lengths, causal=True), backend)


@pytest.mark.parametrize("seed", range(5 if INTERPRETED else 200))
def test_random_layouts(seed, backend):
    rng = random.Random(seed)
    longest = 100 if INTERPRETED else 1000

    def lengths(batch):
        top = rng.choice([3, 20, longest])
        return [rng.choice([0, 1, rng.randint(0, top)]) for _ in range(batch)]

    batch, kv_heads = rng.randint(1, 6 if INTERPRETED else 40), rng.randint(1, 2)
    options = {"kv_heads": kv_heads, "heads": kv_heads * rng.choice([1, 2, 3])}
    options |= {"dim": rng.choice([16, 64] if INTERPRETED else [16, 64, 128])}
    options |= {"dtype": rng.choice(DTYPES)}
    if rng.random() < 0.5:
        check(make(rng.randint(1, 200), lengths(batch), **options), backend)
        return
    side = [None, 0, rng.randint(0, 40), rng.randint(0, 300)]
    window = rng.choice([None, (rng.choice(side), rng.choice(side))])
    k_lengths = rng.choice([None, lengths(batch)])
    check(make(lengths(batch), k_lengths, window=window, **options), backend)


@pytest.mark.parametrize("workers", [1, 31, 32, 33, 66])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_dq_of_many_workers(dtype, workers):
    """A program reads 64 numbers of 32 workers at once; the last ones may be fewer of either."""
    generator = torch.Generator().manual_seed(workers)
    partial = torch.randn(workers, 3, 2, 40, generator=generator, dtype=torch.float64)
    memory = torch.full((5, 2, 40), torch.nan, dtype=dtype, device=DEVICE)
    dq = memory[1:4]
    triton_.sum_partial(partial.to(DEVICE, torch.float32), dq, -0.3)
    expected = -0.3 * partial.sum(0)
    torch.testing.assert_close(dq.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert memory[0].isnan().all() and memory[4].isnan().all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("queries", [None, 20], ids=["self", "broadcast"])
def test_scales(queries, scale, backend):
    lengths = [40, 0, 70]
    problem = make(lengths, scale=scale) if queries is None else make(queries, lengths, scale=scale)
    check(problem, backend)


@pytest.mark.parametrize("queries", [None, 20, 140], ids=["self", "20", "140"])
def test_large_scores_stay_finite(queries, backend):
    lengths = [5, 33, 129]
    options = {"dim": 64, "std": 12.0}
    problem = make(lengths, **options) if queries is None else make(queries, lengths, **options)
    assert all(x.isfinite().all() for x in check(problem, backend).values())


def gradients(problem, backend, loss, strange=False):
    """Gradients of `loss(out, lse)`; with `strange`, of inputs that are no contiguous tensors."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    given = q, k, v
    if strange:  # q's heads outside of its rows, k and v interleaved, v with a gap between columns
        kv = torch.stack((k, v), 1)
        wide = torch.stack((v, v), -1)[..., 0]
        given = q.transpose(0, 1).contiguous().transpose(0, 1), kv[:, 0], wide
        assert not any(x.is_contiguous() for x in given)
    options = {"return_lse": True, "backend": backend, "scale": problem.scale}
    if problem.q_layout is None:
        out, lse = broadcast_attention(*given, problem.k_layout, **options)
    else:
        out, lse = jagged_attention(*given, problem.q_layout, problem.k_layout, **options)
    return out.detach(), *torch.autograd.grad(loss(out, lse), (q, k, v))


def double(problem):
    tensors = {name: getattr(problem, name).double() for name in ("q", "k", "v", "dout")}
    return Problem(**{**vars(problem), **tensors})


@pytest.mark.parametrize("queries", [None, 20, 140], ids=["self", "20", "140"])
def test_strange_strides_and_an_expanded_gradient(queries, backend):
    lengths = [40, 0, 70]
    problem = make(lengths) if queries is None else make(queries, lengths)
    same = gradients(problem, backend, lambda out, lse: out.sum())
    strange = gradients(problem, backend, lambda out, lse: out.sum(), strange=True)
    exact = gradients(double(problem), "reference", lambda out, lse: out.sum())
    for a, b, c in zip(same, strange, exact, strict=True):
        assert torch.equal(a, b)
        assert (a.double() - c).norm() <= 0.02 * c.norm()


@pytest.mark.parametrize("queries", [None, 20, 140], ids=["self", "20", "140"])
def test_the_gradient_of_the_log_sum_exp(queries, backend):
    lengths = [40, 3, 70]
    problem = make(lengths) if queries is None else make(queries, lengths)

    def loss(out, lse):
        return (out.double() * problem.dout.double()).sum() + (lse.double() * 3).square().sum()

    results = gradients(problem, backend, loss)
    exact = gradients(double(problem), "reference", loss)
    for a, b in zip(results, exact, strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("queries", [None, 20, 140], ids=["self", "20", "140"])
@pytest.mark.parametrize("poison", [float("nan")] if INTERPRETED else [float("nan"), float("inf")])
def test_a_neighbour_is_never_read_into_a_product(queries, poison, backend):
    lengths = [40, 70, 33]
    problem = make(lengths) if queries is None else make(queries, lengths)
    expected = attend(problem, backend)
    bad = slice(40, 110)
    k, v = problem.k.clone(), problem.v.clone()
    k[bad], v[bad] = poison, poison
    inputs = {"k": k, "v": v}
    if queries is None:
        q, dout = problem.q.clone(), problem.dout.clone()
        q[bad], dout[bad] = poison, poison
        inputs |= {"q": q, "dout": dout}
    results = attend(Problem(**{**vars(problem), **inputs}), backend)
    mine = [True, False, True]
    for name in ("out", "dk", "dv") if queries else ("out", "dq", "dk", "dv"):
        a, b = expected[name], results[name]
        keep = torch.tensor(mine, device=DEVICE)
        if not (queries and name == "out"):
            keep = keep.repeat_interleave(torch.tensor(lengths, device=DEVICE))
        assert torch.equal(a[keep], b[keep]), name


@pytest.mark.parametrize("queries", [None, 20, 140], ids=["self", "20", "140"])
@pytest.mark.parametrize("deterministic", [True] if INTERPRETED else [False, True])
def test_every_run_has_the_same_bits(queries, deterministic, backend):
    problem = make(OTHER) if queries is None else make(queries, OTHER)
    first = attend(problem, backend, deterministic)
    # TLX adds up dq in any order, unless one CTA keeps all queries.
    if backend == "tlx" and not deterministic and queries != 20:
        del first["dq"]
    for _ in range(1 if INTERPRETED else 50):
        again = attend(problem, backend, deterministic)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("queries", [None, 20], ids=["self", "broadcast"])
def test_opcheck(queries, backend):
    problem = make([20, 0, 9]) if queries is None else make(queries, [20, 0, 9])
    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    q_layout, k_layout = problem.q_layout, problem.k_layout
    layouts = [
        *((q_layout.offsets, q_layout.lengths) if q_layout else (None, None)),
        *(k_layout.offsets, k_layout.lengths),
    ]
    options = (0.3, None, None, backend, False)
    torch.library.opcheck(ops.attention, (*inputs, *layouts, *options))
    inputs = [x.detach() for x in inputs]
    out, lse = ops.attention(*inputs, *layouts, *options)
    torch.library.opcheck(
        ops.attention_backward,
        (torch.ones_like(out), None, *inputs, out, lse, *layouts, *options),
    )


@pytest.mark.parametrize("queries", [None, 20], ids=["self", "broadcast"])
def test_compiled_graphs_serve_changing_lengths(queries, backend):
    """New lengths compile at most one graph more."""
    counter = CompileCounterWithBackend("aot_eager" if INTERPRETED else "inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(q, k, v, q_layout, k_layout):
        if queries is None:
            out = jagged_attention(q, k, v, q_layout, k_layout, backend=backend, causal=True)
        else:
            out = broadcast_attention(q, k, v, k_layout, backend=backend)
        return out.float().square().sum()

    rng = random.Random(0)
    for _ in range(4):
        lengths = [rng.randint(0, 50) for _ in range(5)]
        problem = make(lengths) if queries is None else make(queries, lengths)
        inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
        value = loss(*inputs, problem.q_layout, problem.k_layout)
        grads = torch.autograd.grad(value, inputs)
        expected = reference(Problem(**{**vars(problem), "causal": queries is None}))["out"]
        torch.testing.assert_close(value.double(), expected.square().sum(), rtol=2e-2, atol=1e-3)
        assert all(g.isfinite().all() for g in grads)
    assert counter.frame_count <= 2

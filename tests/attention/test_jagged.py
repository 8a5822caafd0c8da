"""Self- and cross-attention against the float64 reference, and its contracts one by one."""

import random

import pytest
import torch

from gem.attention import JaggedLayout, jagged_attention
from gem.attention.backends import torch_
from gem.attention.testing import (
    Problem,
    assert_close_to_reference,
    attend,
    random_problem,
    reference,
)

BACKENDS = ["torch", "reference"]
OUTLIER = [12, 9, 300, 15, 0, 11]


def lens(lengths):
    return "self" if lengths is None else "lens" + "-".join(map(str, lengths))


def check(problem, **options):
    """Holds `attend` against the rule and returns its results."""
    results = attend(problem, **options)
    assert_close_to_reference(results, problem)
    return results


CROSS = [
    ([0, 3, 0, 5], [7, 0, 0, 2]),
    ([0, 1208, 840, 0], [2538, 1742, 840, 3072]),
    ([0, 5, 4, 0], [7, 5, 2, 6]),
    ([0, 0, 1023], [0, 1, 2045]),
    ([0, 1, 0, 1], [0, 3, 0, 5]),
    ([0, 0, 0, 1], [0, 0, 0, 1]),
    ([1], [1]),
    ([1], [300]),
    ([300], [1]),
    ([1000], [16]),
    ([64, 65, 63], [65, 63, 64]),
    (OUTLIER, [3, 30, 8, 250, 5, 1]),
    ([], []),
    ([0, 0], [0, 0]),
    ([0, 0], [4, 9]),
    ([4, 9], [0, 0]),
]


@pytest.mark.parametrize(("q_lengths", "k_lengths"), CROSS, ids=lens)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)], ids=["mha", "gqa4"])
def test_cross_attention(q_lengths, k_lengths, heads, kv_heads):
    check(random_problem(q_lengths, k_lengths, heads=heads, kv_heads=kv_heads, spare=2))


@pytest.mark.parametrize("lengths", [[1], [63], [64], [65], [129], [1, 1, 1], OUTLIER], ids=lens)
@pytest.mark.parametrize("dim", [8, 40, 64, 72, 128, 256])
def test_self_attention_of_every_head_dim(lengths, dim):
    check(random_problem(lengths, dim=dim))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (21, 7, 120), (3, 1, 8)])
def test_odd_head_counts(heads, kv_heads, dim):
    check(random_problem([0, 1, 0, 1], [0, 3, 0, 5], heads=heads, kv_heads=kv_heads, dim=dim))
    check(random_problem([0, 0, 0, 1], heads=heads, kv_heads=kv_heads, dim=dim))


WINDOWS = [(0, 0), (3, 0), (0, 3), (1, 1), (32, 0), (32, 64), (64, 64), (None, 5), (7, None)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([4, 1], None),
        ([33, 0, 200, 1, 64, 65], None),
        ([8], [4]),
        ([129, 6, 40], [40, 3, 0]),
        ([5, 300, 4], [9, 310, 700]),
    ],
    ids=lens,
)
def test_windows(q_lengths, k_lengths, window):
    for group in (1, 3):
        check(random_problem(q_lengths, k_lengths, heads=2 * group, kv_heads=2, window=window))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[5, 0, 1, 300, 64], OUTLIER], ids=lens)
def test_causal_is_a_right_window_of_zero(lengths, backend):
    problem = random_problem(lengths, causal=True)
    causal = check(problem, backend=backend)
    for window in ((None, 0), (10_000, 0), (max(lengths) - 1, 0)):
        other = Problem(**{**vars(problem), "causal": False, "window": window})
        for name, x in attend(other, backend).items():
            torch.testing.assert_close(x, causal[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (32, 0)}, {"scale": 0.7}], ids=str
)
def test_dtypes(dtype, options):
    problem = random_problem([5, 0, 33, 129, 300, 1], heads=4, kv_heads=2, dtype=dtype, **options)
    results = check(problem)
    assert all(results[name].dtype == dtype for name in ("out", "dq", "dk", "dv"))
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert results["lse"].dtype == lse_dtype


@pytest.mark.parametrize("std", [6.0, 12.0], ids=lambda x: f"std{x:g}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores(dtype, std):
    problem = random_problem([5, 33, 129], dim=64, dtype=dtype, std=std)
    assert (problem.q @ problem.k.transpose(1, 2)).abs().max() > 500
    assert all(x.isfinite().all() for x in check(problem).values())


def test_scores_beyond_exp_do_not_overflow():
    problem = random_problem([4, 3], std=300.0)
    assert all(x.isfinite().all() for x in attend(problem).values())


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts(seed):
    rng = random.Random(seed)

    def lengths(batch):
        top = rng.choice([3, 20, 100, 400])
        return [rng.choice([0, 1, rng.randint(0, top)]) for _ in range(batch)]

    batch = rng.randint(1, 12)
    q_lengths = lengths(batch)
    k_lengths = rng.choice([None, lengths(batch)])
    kv_heads, group = rng.randint(1, 3), rng.choice([1, 1, 2])
    side = [None, 0, 1, rng.randint(0, 40), rng.randint(0, 300)]
    window = rng.choice([None, (rng.choice(side), rng.choice(side))])
    check(
        random_problem(
            q_lengths,
            k_lengths,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            dim=rng.choice([8, 16, 24, 33]),
            window=window,
            spare=rng.choice([0, 3]),
            generator=torch.Generator().manual_seed(seed),
        )
    )


@pytest.mark.parametrize("chunk", [1, 5_000, 40_000])
@pytest.mark.parametrize("window", [None, (32, 0), (20, 50)], ids=str)
def test_chunks_of_any_size_give_the_same(chunk, window, monkeypatch):
    problem = random_problem([65, 3, 0, 200, 31], heads=4, kv_heads=2, window=window)
    expected = attend(problem, "torch")
    monkeypatch.setattr(torch_, "CHUNK", chunk)
    for name, x in attend(problem, "torch").items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_without_queries_get_zero_gradients(backend):
    results = attend(random_problem([0, 5, 4, 0], [7, 5, 2, 6], heads=4, kv_heads=1), backend)
    for name in ("dk", "dv"):
        assert not results[name][:7].any() and not results[name][14:].any()
        assert results[name][7:14].abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("queries", "keys", "options", "blind"),
    [
        (8, 4, {"causal": True}, 4),
        (6, 3, {"window": (1, 1)}, 2),
        (129, 40, {"window": (32, 64)}, 25),
        (5, 0, {}, 5),
    ],
    ids=["causal", "window", "wide window", "no keys"],
)
def test_queries_that_see_nothing(queries, keys, options, blind, backend):
    results = attend(random_problem([queries], [keys], **options), backend)
    assert not results["out"][:blind].any() and not results["dq"][:blind].any()
    assert (results["lse"][:blind] == -torch.inf).all()
    assert results["lse"][blind:].isfinite().all()
    assert all(results[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (5, 5, {"window": (2, 0)}),
        (5, 5, {"window": (1, 1)}),
        (5, 5, {"window": (0, 0)}),
        (70, 70, {"window": (33, 2)}),
        (6, 9, {"causal": True}),
        (9, 6, {"causal": True}),
        (6, 9, {"window": (2, 1)}),
        (9, 6, {"window": (None, 1)}),
    ],
    ids=str,
)
def test_which_keys_a_query_sees(queries, keys, options, backend):
    """One-hot values show the keys that were used; a window of n reaches n keys to its side."""
    q, k = torch.zeros(queries, 1, 8), torch.zeros(keys, 1, 8)
    one_hot = torch.eye(keys)
    used = torch.cat(
        [
            jagged_attention(
                q,
                k,
                one_hot[:, None, column : column + 8].contiguous()
                if column + 8 <= keys
                else torch.nn.functional.pad(one_hot[:, None, column:], (0, column + 8 - keys)),
                JaggedLayout.from_lengths([queries]),
                JaggedLayout.from_lengths([keys]),
                backend=backend,
                **options,
            )[:, 0]
            for column in range(0, keys, 8)
        ],
        dim=1,
    )[:, :keys]
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    for i in range(queries):
        at = i + keys - queries  # the last query stands at the last key
        first = 0 if left is None else max(0, at - left)
        last = keys - 1 if right is None else min(keys - 1, at + right)
        seen = list(range(first, last + 1))
        assert used[i].nonzero()[:, 0].tolist() == seen
        torch.testing.assert_close(used[i, seen], torch.full((len(seen),), 1 / max(1, len(seen))))


def test_a_window_beyond_the_sample_is_unbounded():
    problem = random_problem([5, 3, 60], [9, 2, 50])
    expected = attend(problem)
    wide = Problem(**{**vars(problem), "window": (100, 100)})
    for name, x in attend(wide).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_do_not_see_each_other(backend):
    layout = JaggedLayout.from_lengths([2, 3])
    q, k = torch.randn(2, 5, 2, 8).unbind()
    v = torch.cat([torch.ones(2, 2, 8), torch.full((3, 2, 8), 10.0)])
    out = jagged_attention(q, k, v, layout, layout, backend=backend)
    torch.testing.assert_close(out, v)
    q[:], k[:] = 0, 0  # equal weights, so that the mean is exact
    assert torch.equal(jagged_attention(q, k, v, layout, layout, backend=backend)[:2], v[:2])


@pytest.mark.parametrize("window", [None, (3, 0), (16, 16)], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_bad_sample_leaves_the_others_bitwise_unchanged(window, bad):
    """The rows of the middle sample and the spare rows turn bad in every input."""
    problem = random_problem([70, 40, 90], window=window, spare=5)
    clean = attend(problem)
    for x in (problem.q, problem.k, problem.v, problem.dout):
        x[70:110] = bad
    results = attend(problem)
    for name, x in results.items():
        assert torch.equal(x[:70], clean[name][:70]), name
        assert torch.equal(x[110:], clean[name][110:]), name
        assert not x[70:110].isfinite().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, (8, 0)], ids=str)
def test_spare_rows_are_never_read_and_get_zeros(window, backend):
    problem = random_problem([40, 0, 3], [70, 2, 1], spare=4, window=window)
    assert problem.q[-4:].isnan().all() and problem.v[-4:].isnan().all()
    for name, x in attend(problem, backend).items():
        expected = torch.full_like(x[-4:], -torch.inf if name == "lse" else 0)
        assert torch.equal(x[-4:], expected), name


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (32, 0)}], ids=str)
def test_permuting_the_batch_permutes_the_results_bitwise(options):
    lengths = [90, 3, 0, 300, 64, 65, 17, 3, 90]
    problem = random_problem(lengths, **options)
    results = attend(problem)
    order = [3, 0, 8, 6, 2, 1, 5, 7, 4]
    bounds = problem.k_layout.offsets.tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    layout = JaggedLayout.from_lengths([lengths[i] for i in order])
    tensors = {name: getattr(problem, name)[rows] for name in ("q", "k", "v", "dout")}
    permuted = Problem(**tensors, k_layout=layout, q_layout=layout, **options)
    for name, x in attend(permuted).items():
        assert torch.equal(x, results[name][rows]), name


@pytest.mark.parametrize("options", [{}, {"window": (32, 0)}, {"causal": True}], ids=str)
def test_deterministic_runs_give_the_same_bits(options):
    problem = random_problem([5, 33, 0, 700, 129], heads=4, kv_heads=2, **options)
    first, second = (attend(problem, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_of_any_strides():
    """Views of a fused projection, of a wider tensor, transposed, and with a stride of 0."""
    problem = random_problem([5, 0, 60], heads=3, dim=8)
    expected = attend(problem)
    fused = torch.stack([problem.q, problem.k, problem.v], dim=1)
    wide = torch.randn(65, 5 * 3, 8)
    wide[:, 3:6] = problem.dout
    views = {
        "fused": dict(zip("qkv", fused.unbind(1), strict=True)),
        "wide": {"dout": wide[:, 3:6]},
        "transposed": {"q": problem.q.transpose(1, 2).contiguous().transpose(1, 2)},
        "head major": {"dout": problem.dout.transpose(0, 1).contiguous().transpose(0, 1)},
    }
    for kind, changed in views.items():
        assert not any(x.is_contiguous() for x in changed.values())
        for name, x in attend(Problem(**{**vars(problem), **changed})).items():
            assert torch.equal(x, expected[name]), (kind, name)
    same = problem.dout[:1, :1, :1].expand_as(problem.dout)
    problem = Problem(**{**vars(problem), "dout": same})
    assert same.stride() == (0, 0, 0)
    check(problem)


def test_gradients_of_a_sum_and_through_a_transpose():
    problem = random_problem([5, 60], heads=3, dim=8, dtype=torch.float64)
    layout = problem.k_layout
    for reduce in (torch.sum, lambda x: (x.transpose(0, 2) * torch.arange(3)[:, None]).sum()):
        grads = []
        for backend in BACKENDS:
            q = problem.q.clone().requires_grad_()
            reduce(jagged_attention(q, problem.k, problem.v, layout, layout, backend=backend))
            reduce(
                jagged_attention(q, problem.k, problem.v, layout, layout, backend=backend)
            ).backward()
            grads.append(q.grad)
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_keys_and_values_may_be_one_tensor():
    problem = random_problem([5, 0, 60], dtype=torch.float64)
    exact = reference(Problem(**{**vars(problem), "v": problem.k}))
    k = problem.k.clone().requires_grad_()
    out = jagged_attention(problem.q, k, k, problem.q_layout, problem.k_layout)
    out.backward(problem.dout)
    torch.testing.assert_close(k.grad, exact["dk"] + exact["dv"], rtol=1e-10, atol=1e-10)


def test_int64_offsets_give_the_same():
    problem = random_problem([5, 0, 60])
    layout = JaggedLayout.from_offsets(problem.k_layout.offsets.long())
    other = Problem(**{**vars(problem), "k_layout": layout, "q_layout": layout})
    expected = attend(problem)
    assert all(torch.equal(x, expected[name]) for name, x in attend(other).items())


@pytest.mark.parametrize("side", [2**31 - 1, 2**31 - 64, 2**63 - 1, 2**70], ids=hex)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_wider_than_any_sample_is_none(backend, side):
    problem = random_problem([5, 0, 33], [40, 3, 12])
    expected = attend(problem, backend)
    for window in ((side, side), (None, side), (side, None)):
        wide = Problem(**{**vars(problem), "window": window})
        for name, x in attend(wide, backend).items():
            assert torch.equal(x, expected[name])
    causal = attend(Problem(**{**vars(problem), "causal": True}), backend)
    wide = attend(Problem(**{**vars(problem), "window": (side, 0)}), backend)
    assert all(torch.equal(wide[name], x) for name, x in causal.items())


def test_backends_see_no_side_that_no_sample_reaches(monkeypatch):
    """Kernels add sides to positions in 32 bits."""
    seen = []
    forward = torch_.forward
    monkeypatch.setattr(torch_, "forward", lambda call, *x: seen.append(call) or forward(call, *x))
    layout = JaggedLayout.from_lengths([3, 7])
    q = torch.randn(10, 1, 8)
    for window in ((7, 7), (6, 6), (2**31 - 1, 2)):
        jagged_attention(q, q, q, layout, layout, window=window, backend="torch")
    assert [(c.left, c.right) for c in seen] == [(None, None), (6, 6), (None, 2)]

"""Our backward kernels for Hopper, unmodified, in the simulator."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from gem.attention.backends.tlx_backward import form_of
from gem.attention.simulator import Counts
from gem.attention.testing import assert_close_to_reference, call_of, random_problem
from tests.attention.simulator.helpers import (
    differentiated,
    expected,
    problem_of,
    wrong_gradients,
)

NAMES = ("dq", "dk", "dv")
# Queries of jagged self-attention, of the kernel that keeps keys and of the one that keeps queries.
QUERIES = pytest.mark.parametrize("queries", [None, 130, 40], ids=["self", "130", "40"])


def make(queries, lengths, generator=0, **options):
    """In bfloat16; `queries` as in QUERIES."""
    first = lengths if queries is None else queries
    options = {"dim": 64, "heads": 2, "dtype": torch.bfloat16} | options
    generator = torch.Generator().manual_seed(generator)
    return random_problem(first, lengths, generator=generator, **options)


def dlse_of(problem, rng):
    """A gradient of the log-sum-exp, NaN past the last sample; or None."""
    if rng.random() < 0.6:
        return None
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    dlse = torch.randn(problem.dout.shape[:-1], generator=generator)
    if problem.q_layout is not None:
        dlse[int(problem.q_layout.lengths.sum()) :] = torch.nan
    return dlse


def run(layouts, seeds, capsys):
    """So many random layouts, each under so many seeds; prints what was simulated."""
    total = Counts()
    for number in range(layouts):
        rng = random.Random(number)
        problem = problem_of(rng, dim=rng.choice([64, 128, 40, 96]), most_queries=300)
        dlse, deterministic = dlse_of(problem, rng), rng.random() < 0.2
        processors, whole = rng.randint(1, 6), rng.random() < 0.5
        first = None
        for seed in range(seeds):
            gradients, counts = differentiated(
                problem, seed, processors, dlse, deterministic, whole=whole
            )
            total.add(counts)
            bad = wrong_gradients(problem, gradients, dlse)
            assert not bad, (number, seed, bad)
            first = first or gradients
            # The order of tasks reaches nothing but sums of dq, and those only if allowed to.
            for name, a, b in zip(NAMES, first, gradients, strict=True):
                assert torch.equal(a, b) or (name == "dq" and not deterministic), (number, seed)
    with capsys.disabled():
        print(f"\nsimulated: {layouts} layouts x {seeds} seeds, {total}")


def test_random_layouts_agree_with_the_reference(capsys):
    run(36, 3, capsys)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_many_layouts_under_many_seeds(capsys):
    run(200, 20, capsys)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("processors", [1, 3, 9])
def test_whole_samples_have_the_same_bits_in_every_order(dim, processors):
    """Up to 256 keys: two tiles, an odd number of steps or one; queries without keys and more."""
    k_lengths = [256, 129, 1, 0, 200, 70, 130, 255, 128]
    q_lengths = [256, 70, 200, 9, 0, 70, 300, 100, 65]
    options = {"dim": dim, "heads": 2, "dtype": torch.bfloat16}
    problem = random_problem(q_lengths, k_lengths, **options)
    assert form_of(dataclasses.replace(call_of(problem), deterministic=True), problem.q).whole
    first = None
    for seed in range(6):
        gradients, _ = differentiated(problem, seed, processors, deterministic=True)
        assert not wrong_gradients(problem, gradients)
        first = first or gradients
        assert all(torch.equal(a, b) for a, b in zip(first, gradients, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_whole_samples_beside_longer_ones(dim, kv_heads):
    """Where heads are not grouped, a tile of keys that is alone writes dQ without sums."""
    lengths = [100, 700, 0, 300, 256, 257, 129, 5, 40]
    problem = make(None, lengths, dim=dim, heads=4, kv_heads=kv_heads)
    for seed in range(3):
        gradients, _ = differentiated(problem, seed, 4, whole=True)
        assert not wrong_gradients(problem, gradients)


# The last tile has at most 64 keys, so that one consumer has none; one sample of three tiles.
FEW = [130, 64, 1, 0, 260]


@pytest.mark.parametrize(
    "options",
    [
        {"q_lengths": FEW, "kv_heads": 1},
        {},
        {"causal": True},
        {"causal": True, "kv_heads": 1},
        {"window": (70, 20)},
        {"window": (10, 3), "kv_heads": 1, "q_lengths": FEW},
        {"window": (None, 5), "kv_heads": 1},
        {"window": (40, None)},
        {"q_lengths": 130},
        {"q_lengths": 130, "kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_consumers_without_keys(dim, options):
    """In every order; and where every other sample is NaN nothing of it reaches the others."""
    options = {"dim": dim, "heads": 2, "spare": 2, "dtype": torch.bfloat16} | options
    q_lengths = options.pop("q_lengths", [70, 130, 200, 9, 40])
    generator = torch.Generator().manual_seed(dim)
    problem = random_problem(q_lengths, FEW, generator=generator, **options)
    dirty, mine = with_every_other_sample_nan(problem)
    fixed = None
    for seed in range(5):
        options = {"processors": 1 + seed, "whole": seed in (0, 3), "deterministic": seed in (1, 4)}
        gradients, _ = differentiated(problem, seed, **options)
        bad = wrong_gradients(problem, gradients)
        assert not bad, (seed, bad)
        if options["deterministic"]:
            fixed = fixed or gradients
            assert all(torch.equal(a, b) for a, b in zip(fixed, gradients, strict=True))
        if seed == 3:
            again, _ = differentiated(dirty, seed, **options)
            for name, rows in mine.items():
                a, b = (x[NAMES.index(name)][rows] for x in (gradients, again))
                assert a.isfinite().all() and torch.equal(a, b), (seed, name)


def with_every_other_sample_nan(problem):
    """(the problem so changed, the other samples' rows of each gradient that is theirs alone)."""
    rows = {"k": problem.k_layout, "v": problem.k_layout}
    if problem.q_layout is not None:
        rows |= {"q": problem.q_layout, "dout": problem.q_layout}
    inputs = {}
    for name, layout in rows.items():
        x = inputs[name] = getattr(problem, name).clone()
        rows[name] = torch.zeros(len(x), dtype=torch.bool)
        for begin, end in list(itertools.pairwise(layout.offsets.tolist()))[::2]:
            rows[name][begin:end] = True
        x[~rows[name]] = torch.nan
    mine = {f"d{name}": rows[name] for name in ("q", "k", "v") if name in rows}
    return dataclasses.replace(problem, **inputs), mine


@pytest.mark.parametrize(("q_lengths", "split"), [([1] * 9, True), ([40, 1, 60, 300], False)])
def test_sums_of_dq_are_not_mostly_padding(q_lengths, split):
    """One query for every sample would need 64 rows of sums, or 128."""
    problem = random_problem(q_lengths, [70] * len(q_lengths), dim=64, dtype=torch.bfloat16)
    assert form_of(call_of(problem), problem.q).split is split
    gradients, _ = differentiated(problem, 0)
    assert not wrong_gradients(problem, gradients)


def test_broadcast_gradients_of_few_queries_have_the_same_bits_in_every_order():
    problem = make(40, [70, 0, 300, 129, 1])
    first, _ = differentiated(problem, 0)
    for seed in (1, 2, 3):
        again, _ = differentiated(problem, seed)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([0, 3, 0, 5], [7, 0, 0, 2]),
        ([1], [130]),
        ([130], [1]),
        ([0, 0], [4, 9]),
        ([4, 9], [0, 0]),
        ([], []),
        (5, []),
        (5, [0, 0]),
        (70, [0, 0]),
        (70, [0, 0, 5]),  # the first sample has no keys, yet the sums of shared queries
        ([3, 0], [0, 5]),
        (0, [3, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_of_no_rows(q_lengths, k_lengths, deterministic):
    problem = random_problem(q_lengths, k_lengths, dim=64, dtype=torch.float16, spare=2)
    gradients, _ = differentiated(problem, 0, deterministic=deterministic)
    assert not wrong_gradients(problem, gradients)


@QUERIES
def test_every_row_is_written_and_spare_rows_are_zero(queries):
    assert torch.empty(3).isnan().all()  # memory that nobody writes
    problem = make(queries, [70, 0, 5], spare=4)
    gradients, _ = differentiated(problem, 0)
    for name, x in zip(NAMES, gradients, strict=True):
        assert x.isfinite().all()
        if name != "dq" or queries is None:
            assert not x[-4:].any() and x[:-4].any()


@QUERIES
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_neighbour_is_never_read_into_a_product(queries, poison):
    lengths = [40, 70, 33, 0, 129]
    problem = make(queries, lengths)
    inputs = {name: getattr(problem, name).clone() for name in ("k", "v")}
    if queries is None:
        inputs |= {name: getattr(problem, name).clone() for name in ("q", "dout")}
    for x in inputs.values():
        x[40:110] = poison
    poisoned = dataclasses.replace(problem, **inputs)
    mine = torch.ones(sum(lengths), dtype=torch.bool)
    mine[40:110] = False
    for seed in (0, 1):
        clean, _ = differentiated(problem, seed)
        dirty, _ = differentiated(poisoned, seed)
        for name, a, b in zip(NAMES, clean, dirty, strict=True):
            if name != "dq" or queries is None:
                assert torch.equal(a[mine], b[mine]), name


@pytest.mark.parametrize("window", [(None, 5), (70, None), (None, 90), (0, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_windows_of_one_side_and_of_one_key(dim, window):
    problem = random_problem(
        [130, 5, 0, 260], [200, 90, 7, 260], window=window, dim=dim, kv_heads=1,
        dtype=torch.float16, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for seed in (0, 1, 2):
        gradients, _ = differentiated(problem, seed, processors=3)
        assert not wrong_gradients(problem, gradients)


@pytest.mark.parametrize("right", [0, 61, 62, 63, None])
@pytest.mark.parametrize("short", [1, 2], ids="of a step by {}".format)
@pytest.mark.parametrize(("dim", "queries"), [(64, 128), (128, 64)])
def test_windows_that_just_fit_into_a_step(dim, queries, short, right):
    """With left = queries - 2 and right = 62 a window begins and ends in one step, just so."""
    problem = random_problem(
        [200, 64, 128, 70], [200, 64, 128, 134], window=(queries - short, right), dim=dim, heads=1,
        dtype=torch.float16, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    gradients, _ = differentiated(problem, 0)
    assert not wrong_gradients(problem, gradients)


def test_queries_and_keys_that_see_nothing_have_no_gradient():
    """Causal with more queries than keys, and a window that leaves most keys out."""
    problem = random_problem([130, 40, 70], [5, 0, 70], causal=True, dim=64, dtype=torch.bfloat16)
    gradients, _ = differentiated(problem, 0)
    assert not wrong_gradients(problem, gradients)
    blind = expected(problem)["lse"][:, 0] == -torch.inf
    assert blind.sum() == 165 and not gradients[0][blind].any()

    problem = random_problem([5, 3], [300, 64], window=(3, 0), dim=64, dtype=torch.bfloat16)
    gradients, _ = differentiated(problem, 0)
    assert not wrong_gradients(problem, gradients)
    seen = torch.zeros(364, dtype=torch.bool)
    seen[292:300] = seen[358:364] = True  # the windows of the last five and three positions
    for x in gradients[1:]:
        assert not x[~seen].any() and x[seen].any()


@QUERIES
@pytest.mark.parametrize("dim", [64, 128])
def test_large_activations_stay_finite(queries, dim):
    problem = make(queries, [5, 33, 129], dim=dim, std=7.0)
    scores = torch.einsum("qhd,khd->hqk", problem.q.double(), problem.k.double())
    assert scores.abs().max() > 1e3
    gradients, _ = differentiated(problem, 0)
    assert all(x.isfinite().all() for x in gradients)
    assert_close_to_reference(dict(zip(NAMES, gradients, strict=True)), problem)


@QUERIES
def test_inputs_that_tma_cannot_describe_are_copied(queries):
    """Not aligned to 16 bytes, although contiguous; a dout whose rows are one."""
    problem = make(queries, [70, 5])

    def moved(x):
        flat = torch.empty(x.numel() + 3, dtype=x.dtype)[3:].view(x.shape)
        return flat.copy_(x)

    row = problem.dout[(0,) * (problem.dout.dim() - 2)]
    problem = dataclasses.replace(problem, dout=row.expand(problem.dout.shape))
    odd = {name: moved(getattr(problem, name)) for name in ("q", "k", "v")}
    assert all(x.is_contiguous() and x.data_ptr() % 16 for x in odd.values())
    first, _ = differentiated(problem, 0)
    assert not wrong_gradients(problem, first)
    again, _ = differentiated(dataclasses.replace(problem, **odd), 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def wide(x):
    """x beside columns of NaN."""
    memory = torch.cat([x, torch.full_like(x[..., :8], torch.nan)], -1)
    return memory[..., : x.shape[-1]]


def heads_first(x):
    return x.movedim(-2, 0).contiguous().movedim(0, -2)


def apart(x):
    """Samples of broadcast attention with NaN between them, which no one stride of rows skips."""
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]


@pytest.mark.parametrize("moved", [wide, heads_first, apart])
@pytest.mark.parametrize(("dim", "queries"), [(64, 40), (128, 64), (40, 1)])
def test_delta_of_few_queries(dim, queries, moved):
    """The kernel computes it, from outputs of any strides and a gradient of the log-sum-exp."""
    problem = make(queries, [70, 300, 0, 129, 1, 64], dim=dim)
    generator = torch.Generator().manual_seed(1)
    dlse = torch.randn(6, 2, queries, generator=generator).transpose(1, 2)
    strided = dataclasses.replace(problem, dout=moved(problem.dout))
    assert not strided.dout.is_contiguous()
    first, _ = differentiated(problem, 0, dlse=dlse)
    assert not wrong_gradients(problem, first, dlse)
    for seed in (0, 1):
        again, _ = differentiated(strided, seed, dlse=dlse, moved=moved)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_head_of_dout_may_be_far_from_the_first():
    """More than 2^31 numbers away, though a head's stride has 31 bits. Few pages are touched."""
    problem = make(None, [70, 5], dtype=torch.float16, heads=3)
    memory = torch.from_numpy(np.zeros(2**31 + 75 * 64, np.float16))
    dout = memory.as_strided(problem.dout.shape, (64, 2**30, 1)).copy_(problem.dout)
    gradients, _ = differentiated(dataclasses.replace(problem, dout=dout), 0)
    assert not wrong_gradients(problem, gradients)

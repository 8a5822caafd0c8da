"""Our forward kernel for Hopper, unmodified, in the simulator."""

import contextlib
import dataclasses
import random

import pytest
import torch

from gem.attention import schedule
from gem.attention.backends import tlx_
from gem.attention.simulator import Counts
from gem.attention.testing import random_problem
from tests.attention.simulator.helpers import (
    RISING,
    SWITCHES,
    launched,
    problem_of,
    rising_problem,
    with_all,
    wrong,
)

Shape = tlx_.Shape
SHAPES = {
    64: [
        Shape(1, 64, 3, 2, 232),
        Shape(2, 64, 3, 1, 240),
        Shape(3, 64, 4, 2, 160),
        Shape(2, 128, 3, 2, 240),
        with_all(Shape(2, 64, 2, 2, 240)),
        Shape(1, 64, 4, 2, 232, counter=True),
        Shape(2, 128, 3, 2, 240, ping_pong=True, lazy=True),
    ],
    128: [
        Shape(1, 64, 3, 2, 232),
        with_all(Shape(2, 64, 2, 1, 240)),
        Shape(2, 128, 2, 2, 240),
        Shape(3, 64, 3, 1, 160),
        Shape(2, 128, 2, 1, 240, ping_pong=True),
        Shape(2, 128, 2, 2, 240, counter=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True, counter=True, lazy=True),
        Shape(3, 64, 4, 1, 160, p_wide=True, keep_q=True, lazy=True),
    ],
}


def switches(rng, shape):
    """Some of a shape's switches; a single consumer has nobody to take turns with."""
    drawn = [x for x in SWITCHES if rng.random() < 0.3]
    return [x for x in drawn if x != "ping_pong" or shape.consumers > 1]


def run(layouts, seeds, capsys):
    """So many random layouts, each under so many seeds; prints what was simulated."""
    total = Counts()
    for number in range(layouts):
        rng = random.Random(number)
        problem = problem_of(rng)
        shape = rng.choice(SHAPES[64 if problem.q.shape[2] <= 64 else 128])
        p_shared = rng.random() < 0.2 and shape.keys == 64
        if p_shared:
            shape = Shape(shape.consumers, 64, 2, 1, shape.registers)
        shape = with_all(shape, switches(rng, shape))
        processors = rng.randint(1, 6)
        for seed in range(seeds):
            out, lse, counts = launched(problem, shape, seed, processors, p_shared=p_shared)
            total.add(counts)
            assert not wrong(problem, out, lse), (number, seed, shape, wrong(problem, out, lse))
    with capsys.disabled():
        print(f"\nsimulated: {layouts} layouts x {seeds} seeds, {total}")


def test_random_layouts_agree_with_the_reference(capsys):
    run(60, 4, capsys)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_layouts_under_many_seeds(capsys):
    run(200, 20, capsys)


@pytest.mark.parametrize(("dim", "shape"), [(d, s) for d, x in SHAPES.items() for s in x], ids=str)
def test_every_shape(dim, shape):
    rng = random.Random(str(shape))
    problem = problem_of(rng, dim=dim)
    outs = []
    for seed in (0, 1, 5):
        out, lse, _ = launched(problem, shape, seed)
        assert not wrong(problem, out, lse)
        outs.append((out, lse))
    for out, lse in outs[1:]:  # the order of tasks does not reach the numbers
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


@pytest.mark.parametrize("counter", [False, True])
@pytest.mark.parametrize("queries", [1, 190, [64, 3, 130, 5]], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 64, 3, 2, 232),
        Shape(2, 64, 2, 1, 240, ping_pong=True, p_wide=True),
        Shape(3, 64, 3, 1, 160, lazy=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True),
        Shape(2, 128, 2, 2, 240, ping_pong=True, lazy=True),
    ],
    ids=str,
)
def test_tiles_in_parts(shape, queries, counter):
    """More CTAs than there would be work for: one sample has nearly all keys."""
    problem = random_problem(
        queries, [2500, 5, 0, 130], heads=2, kv_heads=1, dim=96, dtype=torch.bfloat16,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    shape = dataclasses.replace(shape, counter=counter)
    with in_parts() as parts:
        outs = [launched(problem, shape, seed, processors=20)[:2] for seed in (0, 1)]
    assert len(parts) == 2 and min(parts) > 1
    for out, lse in outs:
        assert not wrong(problem, out, lse)
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


@contextlib.contextmanager
def in_parts():
    """While it is open, lists the parts of each schedule that is asked for."""
    real, found = schedule.schedule, []

    def spied(*args):
        tiles = real(*args)
        found.append(tiles.parts)
        return tiles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "schedule", spied)
        yield found


@pytest.mark.parametrize("right", [0, 61, 62, 63, None])
@pytest.mark.parametrize("short", [1, 2], ids="of a block by {}".format)
@pytest.mark.parametrize(("consumers", "keys"), [(1, 64), (2, 64), (3, 64), (1, 128), (2, 128)])
def test_windows_that_just_fit_into_a_block(consumers, keys, short, right):
    """With left = keys - 2 a window begins in a tile's last block, with right = 62 also both begins
    and ends in another; one key more on a side, and there is no such block."""
    problem = random_problem(
        [200, 64, 128, 70], [200, 64, 128, 134], window=(keys - short, right), dim=64, heads=1,
        dtype=torch.float16, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    out, lse, _ = launched(problem, Shape(consumers, keys, 2, 1, 160), 0)
    assert not wrong(problem, out, lse)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", RISING, ids=str)
def test_scores_that_outgrow_all_before(options, dtype, lazy):
    problem = rising_problem([600, 3, 131], heads=1, dim=64, dtype=dtype, **options)
    for shape in (
        Shape(2, 128, 2, 2, 240, ping_pong=True, lazy=lazy),
        Shape(3, 64, 2, 1, 160, lazy=lazy),
    ):
        out, lse, _ = launched(problem, shape, 0)
        assert not wrong(problem, out, lse)


def test_samples_of_no_rows():
    for lengths in ([0, 0], [0, 5, 0], [1]):
        problem = problem_of(random.Random(3), q_lengths=lengths, k_lengths=lengths)
        out, lse, _ = launched(problem, Shape(2, 64, 2, 1, 240), 0)
        assert not wrong(problem, out, lse)


def test_inputs_that_tma_cannot_describe_are_copied():
    """Not aligned to 16 bytes, although contiguous; a head's stride that means nothing."""
    problem = problem_of(random.Random(3), dim=64, q_lengths=[70, 5], k_lengths=[70, 5])
    shape = Shape(2, 64, 2, 1, 240)
    expected, _, _ = launched(problem, shape, 0)

    def moved(x):
        flat = torch.empty(x.numel() + 3, dtype=x.dtype)[3:].view(x.shape)
        return flat.copy_(x)

    odd = {name: moved(getattr(problem, name)) for name in ("q", "k", "v")}
    assert all(x.is_contiguous() and x.data_ptr() % 16 for x in odd.values())
    out, _, _ = launched(dataclasses.replace(problem, **odd), shape, 0)
    assert torch.equal(out, expected)

    one = problem_of(random.Random(3), dim=64, q_lengths=[9], k_lengths=[9])
    odd = {
        name: getattr(one, name)[:, :1].as_strided((9, 1, 64), (64, 3, 1))
        for name in ("q", "k", "v")
    }
    one = dataclasses.replace(one, **odd)
    out, lse, _ = launched(one, shape, 0)
    assert out.isfinite().all() and not wrong(one, out, lse)

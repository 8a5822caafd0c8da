"""Launches of our kernels in the simulator, on small random problems."""

import dataclasses

import torch

from gem.attention.backends import tlx_
from gem.attention.simulator import simulated
from gem.attention.testing import call_of, random_problem, reference


def problem_of(rng, dim=None, q_lengths=None, k_lengths=None):
    """A small problem: broadcast or jagged, causal, windowed or neither, GQA or not."""

    def lengths(n):
        return [rng.choice([0, 1, rng.randint(0, 150), rng.randint(0, 300)]) for _ in range(n)]

    dim = dim or rng.choice([64, 64, 128, 96, 32])
    kv_heads = rng.choice([1, 2])
    options = {
        "heads": kv_heads * rng.choice([1, 2]),
        "kv_heads": kv_heads,
        "dim": dim,
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
        "generator": torch.Generator().manual_seed(rng.randrange(2**31)),
    }
    samples = rng.randint(1, 4)
    form = rng.choice(["broadcast", "self", "cross"])
    if form == "broadcast" and q_lengths is None:
        scale = rng.choice([None, -0.1])
        return random_problem(rng.randint(1, 200), lengths(samples), scale=scale, **options)
    q_lengths = q_lengths or lengths(samples)
    if form == "cross" and k_lengths is None:
        k_lengths = lengths(len(q_lengths))
    masks = [
        {},
        {"causal": True},
        {"window": (rng.randint(0, 99), 0)},
        {"window": (rng.randint(0, 60), rng.randint(0, 40))},
    ]
    options |= rng.choice(masks)
    return random_problem(q_lengths, k_lengths, spare=rng.choice([0, 3]), **options)


# The switches of a shape.
SWITCHES = [f.name for f in dataclasses.fields(tlx_.Shape) if f.default is False]


def with_all(shape, switches=SWITCHES):
    """The shape with these switches on."""
    return dataclasses.replace(shape, **dict.fromkeys(switches, True))


def launched(problem, shape, seed, processors=2, trace=None, **options):
    """(out, lse, counts) of a launch of this shape."""
    with simulated(seed=seed, processors=processors, trace=trace) as counts:
        out, lse = tlx_.launch(call_of(problem), problem.q, problem.k, problem.v, shape, **options)
    return out, lse, counts


_references = {}


def wrong(problem, out, lse):
    """What differs from the reference by more than rounding; empty if nothing does."""
    if id(problem) not in _references:
        _references.clear()
        _references[id(problem)] = problem, reference(problem)
    expected = _references[id(problem)][1]
    bad = []
    error = (out.double() - expected["out"]).norm() / expected["out"].norm().clamp(min=1e-9)
    worst = (out.double() - expected["out"]).abs().max() if out.numel() else 0.0
    if not error <= 6e-3 or not worst <= 0.05:
        bad.append(f"out is off by {error:.1e} (rms), {worst:.1e} (max)")
    blind = expected["lse"] == -torch.inf
    if not torch.equal(blind, lse == -torch.inf):
        bad.append("lse is -inf elsewhere")
    error = (lse.double() - expected["lse"])[~blind].abs()
    if error.numel() and not error.max() <= 1e-4:
        bad.append(f"lse is off by {error.max():.1e}")
    return bad

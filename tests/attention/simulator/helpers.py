"""Launches of our kernels in the simulator, on small random problems."""

import dataclasses

import torch

from gem.attention import broadcast_attention, jagged_attention
from gem.attention.backends import tlx_, tlx_backward
from gem.attention.simulator import simulated
from gem.attention.testing import NAMES, call_of, random_problem


def problem_of(rng, dim=None, q_lengths=None, k_lengths=None, most_queries=200):
    """A small problem: broadcast or jagged, causal, windowed or neither, GQA or not.

    Args:
        most_queries: of broadcast attention.
    """

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
        options |= {"scale": rng.choice([None, -0.1]), "spare": rng.choice([0, 3])}
        return random_problem(rng.randint(1, most_queries), lengths(samples), **options)
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


# Options for `rising_problem`.
RISING = (
    {"q_lengths": 70},
    {"q_lengths": 70, "scale": -0.125},
    {"q_lengths": 70, "scale": 0.0},
    {"causal": True},
    {"window": (150, 90)},
)


def rising_problem(lengths, q_lengths=None, **options):
    """A problem whose scores rise by hundreds from block to block, last to first: past what an
    exponential holds that is held against a block before. The first keys get all the weight.

    Args:
        lengths: of the keys.
        q_lengths, options: as in `random_problem`, which makes it but for the keys' size.
    """
    problem = random_problem(
        lengths if q_lengths is None else q_lengths,
        lengths,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    place = torch.cat([torch.arange(n) for n in lengths]).to(problem.k.device)
    rise = 1 + 6 * (600 - place).clamp(min=0) / 128
    k = (problem.k * rise.view(-1, 1, 1)).to(problem.k.dtype)
    return dataclasses.replace(problem, k=k)


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


def differentiated(
    problem,
    seed,
    processors=2,
    dlse=None,
    deterministic=False,
    trace=None,
    whole=False,
    moved=None,
):
    """((dq, dk, dv), counts) of the backward, given the exact output as a forward rounds it.

    Args:
        whole: take `tlx_backward.Form.whole` wherever it can serve.
        moved: copies the output into memory of other strides.
    """
    exact = expected(problem, dlse)
    call = dataclasses.replace(call_of(problem), direction="backward", deterministic=deterministic)
    out, lse = exact["out"].to(problem.q.dtype), exact["lse"].float()
    out = moved(out) if moved else out
    inputs = problem.q, problem.k, problem.v
    form = tlx_backward.form_of(call, problem.q)
    if whole and call.form == "jagged" and not form.split and call.left is call.right is None:
        form = dataclasses.replace(form, whole=True)
    with simulated(seed=seed, processors=processors, trace=trace) as counts:
        gradients = tlx_backward.backward(call, problem.dout, dlse, *inputs, out, lse, form)
    return gradients, counts


_expected = {}


def expected(problem, dlse=None):
    """out, lse, dq, dk and dv in float64; dlse is the gradient of the log-sum-exp."""
    key = id(problem), id(dlse)
    if key not in _expected:
        if len(_expected) >= 8:
            _expected.clear()
        _expected[key] = problem, dlse, _reference(problem, dlse)
    return _expected[key][2]


def _reference(problem, dlse):
    q, k, v = (x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    options = {"scale": problem.scale, "return_lse": True, "backend": "reference"}
    if problem.q_layout is None:
        out, lse = broadcast_attention(q, k, v, problem.k_layout, **options)
    else:
        options |= {"causal": problem.causal, "window": problem.window}
        out, lse = jagged_attention(q, k, v, problem.q_layout, problem.k_layout, **options)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double()
    gradients = torch.autograd.grad((out, lse), (q, k, v), (problem.dout.double(), dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=True))


def wrong(problem, out, lse):
    """What differs from the reference by more than rounding; empty if nothing does."""
    exact = expected(problem)
    bad = []
    error = (out.double() - exact["out"]).norm() / exact["out"].norm().clamp(min=1e-9)
    worst = (out.double() - exact["out"]).abs().max() if out.numel() else 0.0
    if not error <= 6e-3 or not worst <= 0.05:
        bad.append(f"out is off by {error:.1e} (rms), {worst:.1e} (max)")
    blind = exact["lse"] == -torch.inf
    if not torch.equal(blind, lse == -torch.inf):
        bad.append("lse is -inf elsewhere")
    error = (lse.double() - exact["lse"])[~blind].abs()
    if error.numel() and not error.max() <= 1e-4:
        bad.append(f"lse is off by {error.max():.1e}")
    return bad


def wrong_gradients(problem, gradients, dlse=None):
    """The same of (dq, dk, dv).

    Where a gradient vanishes, as with a single key, the rounding of out and of its product with
    dout remains, whatever the gradient: so a root mean square below 0.1 counts as 0.1.
    """
    exact, bad = expected(problem, dlse), []
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        truth = exact[name]
        if x.shape != truth.shape:
            bad.append(f"{name} has shape {list(x.shape)}, not {list(truth.shape)}")
        elif truth.numel():
            error = (x.double() - truth).abs()
            rms = error.norm() / truth.norm().clamp(min=0.1 * truth.numel() ** 0.5)
            worst = error.max() / truth.abs().max().clamp(min=1.0)
            if not rms <= 8e-3 or not worst <= 0.02:
                bad.append(f"{name} is off by {rms:.1e} (rms), {worst:.1e} (max)")
    return bad

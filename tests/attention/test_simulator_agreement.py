"""The TLX kernels give the same on a GPU and in the simulator, but for rounding."""

import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

import gem.attention.backends as backends
from gem.attention.backends import launching, tlx_, tlx_backward
from gem.attention.layout import JaggedLayout
from gem.attention.simulator import asynchronous, frontend, simulated
from gem.attention.simulator.values import Value
from gem.attention.testing import call_of, random_problem
from tests.attention.agreement import difference, gradient_difference
from tests.attention.simulator.mutation import imported_kernel, replaced
from tests.attention.simulator.mutation_cases import FORWARD

Shape = tlx_.Shape
# Means per sample on both sides of every threshold of `forward_shape`.
CHOSEN = {
    block_d: sorted(
        {
            tlx_.forward_shape(block_d, broadcast, queries, keys, window)
            for broadcast, window in ((False, False), (False, True), (True, False))
            for queries in (32, 64, 100, 128, 160, 192, 256)
            for keys in (100, 255, 256, 399, 400, 767, 768, 4096)
        },
        key=str,
    )
    for block_d in (64, 128)
}
MORE = {
    64: [Shape(3, 64, 3, 1, 160, keep_q=True), Shape(2, 64, 2, 1, 240, ping_pong=True)],
    128: [Shape(2, 128, 2, 1, 240, keep_q=True)],
}
SHAPES = [(d, shape) for d in CHOSEN for shape in (*CHOSEN[d], *MORE[d])]
FORMS = (
    {"form": "broadcast"},
    {"form": "self"},
    {"form": "cross"},
    {"form": "self", "causal": True},
    {"form": "cross", "window": (70, 0)},
    {"form": "self", "window": (40, 25)},
    {"form": "cross", "causal": True},
    {"form": "broadcast", "scale": -0.1},
)
DIMS = {64: (64, 40), 128: (128, 96)}
PER_SHAPE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout with its options."""

    number: int
    shape: Shape
    dim: int
    dtype: torch.dtype
    heads: tuple[int, int]  # of queries, of keys
    options: tuple
    p_shared: bool = False

    def problem(self):
        """On the CPU, with an empty sample; `most` is the longest one's length."""
        rng = random.Random(self.number)
        options = dict(self.options)
        form = options.pop("form")
        lengths = [rng.randint(1, 300), 0, rng.randint(1, 150), rng.choice([1, 64, 128])]
        lengths[0] = options.pop("most", lengths[0])
        rng.shuffle(lengths)
        others = [rng.choice([0, rng.randint(1, 250)]) for _ in lengths]
        queries = options.pop("queries", rng.randint(2, 200))
        first = queries if form == "broadcast" else lengths
        return random_problem(
            first,
            {"broadcast": lengths, "self": None, "cross": others}[form],
            heads=self.heads[0],
            kv_heads=self.heads[1],
            dim=self.dim,
            dtype=self.dtype,
            spare=3 * (self.number % 2),
            generator=torch.Generator().manual_seed(self.number),
            **options,
        )


# Tiles in parts: one sample has nearly all keys.
IN_PARTS = [
    Case(800 + n, shape, dim, dtype, (1, 1), (("form", form), ("queries", 60), ("most", 3000)))
    for n, (shape, dim, dtype, form) in enumerate(
        [
            (Shape(1, 64, 5, 2, 232, p_wide=True, counter=True), 128, torch.bfloat16, "broadcast"),
            (Shape(2, 128, 2, 2, 240, ping_pong=True), 128, torch.float16, "broadcast"),
            (Shape(2, 128, 4, 2, 240, ping_pong=True, lazy=True), 40, torch.bfloat16, "broadcast"),
        ]
    )
]


def cases():
    """Shapes by turns with forms, dims, dtypes and heads."""
    numbers = itertools.count()
    made = []
    for (block_d, shape), turn in itertools.product(SHAPES, range(PER_SHAPE)):
        n = next(numbers)
        dtype = (torch.bfloat16, torch.float16)[(n + n // PER_SHAPE) % 2]
        heads = ((2, 1), (2, 2), (4, 2))[n % 3]
        form = FORMS[(n * 3 + n // 8) % len(FORMS)]
        if shape.keep_q and turn == 0:
            form = FORMS[0]  # where it does something
        dim = DIMS[block_d][turn // 2]
        made.append(Case(n, shape, dim, dtype, heads, tuple(form.items())))
    for block_d, shape in ((64, Shape(2, 64, 2, 1, 240)), (128, Shape(2, 64, 2, 1, 240))):
        n = next(numbers)
        form = tuple(FORMS[n % len(FORMS)].items())
        made.append(Case(n, shape, block_d, torch.bfloat16, (2, 1), form, p_shared=True))
    return made + IN_PARTS


CASES = cases()
# By shape, as a kernel is compiled for each.
GROUPS = [list(g) for _, g in itertools.groupby(CASES, lambda c: (c.dim > 64, c.shape, c.p_shared))]


# Backward: of every third case, and of queries that all keys share.
BACKWARD = CASES[::3] + [
    Case(
        900 + n,
        Shape(1, 64, 3, 2, 232),
        dim,
        dtype,
        (2, 2),
        (("form", "broadcast"), ("queries", queries)),
    )
    for n, (dim, dtype, queries) in enumerate(
        [(64, torch.bfloat16, 64), (40, torch.float16, 33), (128, torch.float16, 50)]
    )
]


def launched(case, problem):
    return tlx_.launch(call_of(problem), problem.q, problem.k, problem.v, case.shape, case.p_shared)


def in_simulator(case, problem, seed=0):
    with simulated(seed=seed, processors=4):
        return launched(case, problem)


def moved(problem, device):
    """Copies of the same inputs on a device."""
    there = {x: getattr(problem, x).to(device, copy=True) for x in ("q", "k", "v", "dout")}
    keys, queries = problem.k_layout, problem.q_layout
    there["k_layout"] = _moved(keys, device)
    if queries is not None:
        there["q_layout"] = there["k_layout"] if queries is keys else _moved(queries, device)
    return dataclasses.replace(problem, **there)


def _moved(layout, device):
    return JaggedLayout.from_lengths(layout.lengths, device, rows=layout.rows)


def on_gpu(case, problem):
    """(out, lse) of the GPU, on the CPU."""
    return tuple(x.cpu() for x in launched(case, moved(problem, "cuda")))


def gradients(problem, out, lse):
    call = dataclasses.replace(call_of(problem), direction="backward")
    return tlx_.backward(call, problem.dout, None, problem.q, problem.k, problem.v, out, lse)


def gradients_in_simulator(problem, out, lse, seed=0):
    with simulated(seed=seed, processors=4):
        return gradients(problem, out, lse)


def gradients_on_gpu(problem, out, lse):
    found = gradients(moved(problem, "cuda"), out.cuda(), lse.cuda())
    return tuple(x.cpu() for x in found)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", BACKWARD, ids=lambda c: str(c.number))
def test_gradients_of_gpu_and_simulator_agree(case, capsys):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    problem = case.problem()
    given = in_simulator(case, problem)
    found = gradients_in_simulator(problem, *given)
    shares = gradient_difference(problem, found, gradients_on_gpu(problem, *given))
    with capsys.disabled():
        print(f"\n{case.number}, dim {case.dim}, {case.dtype}: {shares}", end="")
    assert max(shares.values()) <= 1


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0].dim}-{g[0].shape}-{g[0].p_shared}")
def test_gpu_and_simulator_agree(group, capsys):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    found = []
    for case in group:
        problem = case.problem()
        found.append(difference(problem, on_gpu(case, problem), in_simulator(case, problem)))
    with capsys.disabled():
        for case, apart in zip(group, found, strict=True):
            print(f"\n{case.number}, dim {case.dim}, {case.shape}: {apart}", end="")
    bad = [(case, str(d)) for case, d in zip(group, found, strict=True) if not d.worst <= 1]
    assert not bad


def test_the_cases_cover_what_there_is():
    assert len(CASES) >= 30
    assert {c.shape for c in CASES if not c.p_shared} == {s for _, s in SHAPES}
    assert {c.dim for c in CASES} == {40, 64, 96, 128}
    for shapes in CHOSEN.values():
        for shape in shapes:
            mine = [c for c in CASES if c.shape == shape]
            assert {c.dtype for c in mine} == {torch.bfloat16, torch.float16}
    assert {c.options for c in CASES if c not in IN_PARTS} == {tuple(x.items()) for x in FORMS}
    assert {c.heads[0] // c.heads[1] for c in CASES} == {1, 2}


def test_every_tlx_kernel_is_compared(monkeypatch):
    """A TLX kernel that is added without a comparison fails here; so does keeping no queries."""
    there = {
        name
        for file in Path(backends.__file__).parent.glob("tlx_*.py")
        for name, x in vars(__import__(f"{backends.__name__}.{file.stem}", fromlist=["_"])).items()
        if isinstance(x, triton.JITFunction)
        and ".tlx_" in x.fn.__module__
        and name[-7:] == "_kernel"
    }
    ran, kept = set(), set()
    run = launching.run

    def noted(kernel, *args, **options):
        if ".tlx_" in kernel.fn.__module__:
            ran.add(kernel.fn.__name__)
        kept.add(options.get("KEEP_Q"))
        return run(kernel, *args, **options)

    for module in (tlx_, tlx_backward):
        monkeypatch.setattr(module, "run", noted)
    for case in (*CASES[:2], *IN_PARTS[:1], *(c for c in CASES if c.shape.keep_q)):
        in_simulator(case, case.problem())
    for case in (BACKWARD[0], BACKWARD[-1]):
        problem = case.problem()
        gradients_in_simulator(problem, *in_simulator(case, problem))
    assert ran == there
    assert True in kept


@pytest.fixture
def other_arithmetic(monkeypatch):
    """Sums in another order and exponentials that are off, as a GPU's may be."""

    def multiply(a, b):
        a, b = a.astype(np.float32), b.astype(np.float32)
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for k in range(0, a.shape[1], 16):
            total = total + (a[:, k : k + 16].astype(np.float64) @ b[k : k + 16]).astype(np.float32)
            total = (total.view(np.uint32) & np.uint32(0xFFFFFFFE)).view(np.float32)  # cut off
        return total

    noise = np.random.default_rng(7)
    exp2 = frontend.TL.math.exp2

    def rough_exp2(x):
        y = exp2(x)
        off = noise.uniform(-1, 1, np.shape(y.data)) * 2.0**-22
        return Value((y.data * (1 + off)).astype(np.float32), y.dtype)

    monkeypatch.setattr(asynchronous, "multiply", multiply)
    monkeypatch.setattr(frontend.TL.math, "exp2", rough_exp2)


@pytest.mark.parametrize("case", CASES[:: max(1, len(CASES) // 8)], ids=lambda c: str(c.number))
def test_other_arithmetic_is_within_the_bound(case, request, capsys):
    """The bound is neither broken by what a GPU may do otherwise nor out of its reach."""
    problem = case.problem()
    plain = in_simulator(case, problem)
    request.getfixturevalue("other_arithmetic")
    apart = difference(problem, plain, in_simulator(case, problem, seed=3))
    with capsys.disabled():
        print(f"\n{case.number}, dim {case.dim}, {case.dtype}: {apart}", end="")
    assert 0 < apart.lse and apart.worst <= 1


@pytest.mark.parametrize("case", BACKWARD[::3] + BACKWARD[-1:], ids=lambda c: str(c.number))
def test_other_arithmetic_moves_gradients_within_the_bound(case, request, capsys):
    problem = case.problem()
    given = in_simulator(case, problem)
    plain = gradients_in_simulator(problem, *given)
    request.getfixturevalue("other_arithmetic")
    shares = gradient_difference(problem, plain, gradients_in_simulator(problem, *given, seed=3))
    with capsys.disabled():
        print(f"\n{case.number}, dim {case.dim}, {case.dtype}: {shares}", end="")
    assert max(shares.values()) <= 1
    if case.dtype == torch.float16:  # bfloat16 may round all of it away
        assert max(shares.values()) > 0
    assert max(gradient_difference(problem, plain, plain).values()) == 0


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_wrong_gradients_are_found(name):
    case = next(c for c in BACKWARD if dict(c.options)["form"] == "self")
    problem = case.problem()
    plain = gradients_in_simulator(problem, *in_simulator(case, problem))
    at = ("dq", "dk", "dv").index(name)
    for change in ("swap", "more", "nan"):
        changed = [x.clone() for x in plain]
        if change == "swap":
            changed[at][[0, 1]] = changed[at][[1, 0]]
        elif change == "more":
            changed[at] *= 1 + torch.finfo(problem.q.dtype).eps
        else:
            changed[at][2, 0, 1] = torch.nan
        shares = gradient_difference(problem, plain, changed)
        assert shares[name] > 1 and sum(x > 1 for x in shares.values()) == 1, change


def test_another_seed_gives_the_same_bits():
    for case in CASES[:PER_SHAPE]:
        problem = case.problem()
        other = in_simulator(case, moved(problem, "cpu"), seed=5)
        apart = difference(problem, in_simulator(case, problem), other)
        assert apart.worst == 0 and apart.unequal == 0


def rows_swapped(out, lse):
    out[[5, 6]] = out[[6, 5]]


def one_element(out, lse):
    out[7, 0, 3] += 0.002  # four times the bound


def slightly_more(out, lse):
    out *= 1 + torch.finfo(out.dtype).eps


def lse_of_one_row(out, lse):
    lse[9, 1] += 3e-5  # twice the bound


def blind_row(out, lse):
    lse[4, 0] = -torch.inf


def not_a_number(out, lse):
    out[3, 1, 0] = torch.nan


@pytest.mark.parametrize(
    ("wrong", "which"),
    [
        (rows_swapped, "out"),
        (one_element, "out"),
        (slightly_more, "out_rms"),
        (lse_of_one_row, "lse"),
        (blind_row, "lse"),
        (not_a_number, "out"),
    ],
)
def test_wrong_results_are_found(wrong, which):
    case = next(c for c in CASES if dict(c.options)["form"] == "self" and c.dim == 64)
    problem = case.problem()
    plain = in_simulator(case, problem)
    changed = tuple(x.clone() for x in plain)
    wrong(*changed)
    assert getattr(difference(problem, plain, changed), which) > 1


def test_a_kernel_that_leaves_out_a_key_is_found(tmp_path, monkeypatch):
    """Or cuts probabilities off where it should round them."""
    case = next(c for c in CASES if dict(c.options)["form"] == "broadcast" and c.dim == 128)
    problem = case.problem()
    plain = in_simulator(case, problem)
    for number, (was, new) in enumerate(
        [
            ("seen = (j < keys)[None, :]", "seen = (j < keys - 1)[None, :]"),
            (
                "    if OPTIONS.PACKED:\n        even, odd = tl.split(",
                "    p = p * 0.998\n    if OPTIONS.PACKED:\n        even, odd = tl.split(",
            ),
        ]
    ):
        changed = replaced(FORWARD.sources, was, new)
        module = imported_kernel(changed, tmp_path, f"disagrees_{number}")
        monkeypatch.setattr(tlx_, "hopper_forward_kernel", module.hopper_forward_kernel)
        assert difference(problem, plain, in_simulator(case, problem)).worst > 1

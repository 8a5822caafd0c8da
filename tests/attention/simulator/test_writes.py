"""Global memory: when what TMA stores and reductions have read is written there."""

import re

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import Trace, errors, simulate
from gem.attention.simulator.scheduler import HELD, Policy
from tests.attention.simulator import write_kernels as kernels

SEEDS = range(20)
ENOUGH = 11  # of them


def doubled(kernel, seed, wait, tiles=1, trace=None, **options):
    """Whether every tile is stored before it is added."""
    x, out = torch.randn(64 * tiles), torch.randn(64 * tiles)
    desc = TensorDescriptor.from_tensor(out, [64])
    args = [x, out, desc, tiles] if kernel is kernels.twice_kernel else [x, desc]
    simulate(kernel, (1,), args, seeds=[seed], trace=trace, WAIT=wait, **options)
    return torch.equal(out, 2 * x)


def wrong(*args, **options):
    return sum(not doubled(args[0], seed, *args[1:], **options) for seed in SEEDS)


CASES = pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (kernels.twice_kernel, {}),
        (kernels.twice_kernel, {"BULK": True}),
        (kernels.twice_kernel, {"tiles": 5}),
        (kernels.tasks_kernel, {}),
    ],
    ids=["store", "bulk store", "five tiles", "two tasks"],
)


@CASES
def test_after_a_full_wait_what_was_stored_is_there(kernel, options):
    assert not wrong(kernel, "full", **options)


@CASES
@pytest.mark.parametrize("wait", ["read", "read, in assembly", "full but one"])
def test_most_seeds_show_that_a_full_wait_is_missing(kernel, wait, options):
    assert wrong(kernel, wait, **options) >= ENOUGH
    assert not doubled(kernel, 0, wait, **options)
    assert doubled(kernel, 1, wait, **options)  # all is written at once


def test_seeds_write_late_at_once_or_in_between():
    assert Policy(0).writing == 0 and Policy(1).writing == 1
    assert {Policy(seed).writing for seed in SEEDS} == {0, 0.1, 1}


@pytest.mark.parametrize("seed", range(6))
def test_few_writes_are_late_at_a_time(seed):
    trace = Trace()
    right = doubled(kernels.twice_kernel, seed, "full", 2 * HELD, trace)
    writes = [e for e in trace.events if e["ph"] == "X" and e["name"] == "write of stage[0]"]
    changes = sorted(x for e in writes for x in ((e["ts"], 1), (e["ts"] + e["dur"], -1)))
    late = [sum(n for _, n in changes[:i]) for i in range(len(changes))]
    assert right and max(late, default=0) <= HELD
    assert len(writes) == (0 if Policy(seed).writing == 1 else 4 * HELD)
    assert seed != 0 or max(late) == HELD
    if Policy(seed).writing == 0:
        assert not doubled(kernels.twice_kernel, seed, "read", 2 * HELD)


@pytest.mark.parametrize("seed", range(6))
def test_a_write_that_a_loop_polls_happens(seed):
    out = torch.zeros(64)
    args = [out, TensorDescriptor.from_tensor(out, [64])]
    simulate(kernels.poll_kernel, (1,), args, seeds=[seed], step_limit=20_000)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("assembly", "constraints", "pure", "report"),
    [
        ("nanosleep.u32 20; mov.b32 $0, 0;", "=r", False, "the assembly 'nanosleep.u32 20; mov"),
        ("cp.async.bulk.wait_group 0;", "=r", False, "does not know the assembly"),
        ("cp.async.wait_group 0; mov.b32 $0, 0;", "=r", False, "does not know the assembly"),
        ("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=f", False, "of these types"),
        ("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", True, "is said to be pure"),
    ],
)
def test_other_assembly_is_reported(assembly, constraints, pure, report):
    with pytest.raises(errors.UnsupportedOperation, match=re.escape(report)):
        simulate(kernels.assembly_kernel, (1,), [assembly, constraints, pure])

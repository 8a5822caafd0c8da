"""Loops that poll: for what another task brings, and for what nobody does."""

import pytest
import torch

from gem.attention.simulator import errors, simulate
from tests.attention.simulator import spin_kernels as kernels

SEEDS = range(6)


def line_of(text, nth=0):
    with open(kernels.__file__) as f:
        return [i for i, line in enumerate(f, 1) if text in line][nth]


def flags(tasks, how, seed, step_limit=100_000):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    counts = simulate(
        kernels.flag_kernel,
        (1,),
        [flag, out],
        TASKS=tasks,
        HOW=how,
        seeds=[seed],
        step_limit=step_limit,
    )
    return out.item(), counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["loop", "function", "lock"])
def test_a_flag_that_another_task_sets(how, seed):
    out, counts = flags(True, how, seed)
    assert out == 5 and counts.turns < 1000


ENDLESS = {
    (True, "never set"): ("default", "it reads FLAG at spin_kernels.py:"),
    (True, "waits"): ("default", "which nobody changes; task at line"),
    (True, "both poll"): ("", "spins too: it reads "),
    (False, "two turns"): ("the program", "it reads FLAG at spin_kernels.py:"),
    (False, "arithmetic"): ("the program", "it reads no memory."),
    (False, "barrier"): ("the program", "full[0] at spin_kernels.py:"),
    (False, "shared"): ("the program", "it reads tile[0] at spin_kernels.py:"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tasks", "how"), ENDLESS)
def test_what_nobody_changes_is_reported(tasks, how, seed):
    """Long before the limit, with the line, the task and what is polled."""
    with pytest.raises(errors.EndlessLoop) as caught:
        flags(tasks, how, seed)
    task, words = ENDLESS[tasks, how]
    assert words in str(caught.value) and "goes round without end" in str(caught.value)
    assert task in caught.value.task
    assert caught.value.seed == seed and caught.value.cta == (0, 0, 0)
    assert caught.value.where[0][0] == kernels.__file__


def test_the_report_names_the_loop():
    with pytest.raises(errors.EndlessLoop) as caught:
        flags(False, "two turns", 0)
    line = line_of("while tl.load(FLAG) == 0:")
    assert caught.value.where[0][1] in (line, line + 1)
    assert f"it reads FLAG at spin_kernels.py:{line}" in str(caught.value)
    with pytest.raises(errors.EndlessLoop) as caught:
        flags(True, "waits", 0)
    wait = line_of("tlx.barrier_wait(full[0], 0)")
    assert f"waits at spin_kernels.py:{wait} for full[0] to end a phase" in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("counts", "turns changed nothing, and it reads FLAG at spin_kernels.py:"),
        ("for", "10000 steps of tasks and turns of loops and no end"),
        ("stores", "10000 steps of tasks and turns of loops and no end"),
    ],
)
def test_the_step_limit_stops_the_rest(how, words, seed):
    with pytest.raises(errors.StepLimit) as caught:
        flags(False, how, seed, step_limit=10_000)
    assert not isinstance(caught.value, errors.EndlessLoop)
    assert words in str(caught.value)
    assert caught.value.task == "the program" and caught.value.where


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("how", "expected"), [("clock", 1), ("calls", 2001), ("counts", 5001)])
def test_loops_that_end_are_left_alone(how, expected, seed):
    out = torch.zeros(1, dtype=torch.int32)
    simulate(kernels.busy_kernel, (1,), [out], HOW=how, seeds=[seed])
    assert out.item() == expected

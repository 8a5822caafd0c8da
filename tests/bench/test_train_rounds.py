"""Turns of training steps: order, batches, who drops out or is slow, the deadline; no model."""

import dataclasses
import time
import types
import weakref
from pathlib import Path

import pytest
import torch

from bench import train, train_group, train_rounds
from bench.train_group import NO_TIME, Clock, Group, Setting
from bench.train_rounds import Runner, split, take_turns

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Layout:
    lengths: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sequence:
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Batch:
    number: int
    sequences: dict


BATCHES = [Batch(n, {"browse": Sequence(Layout(torch.tensor([n])))}) for n in range(4)]


def nothing(done):
    pass


class Trainer:
    """Writes its steps to `log`; `on_step` is told how many there were before."""

    def __init__(self, name, log, on_step=nothing):
        self.name, self.log, self.on_step, self.done = name, log, on_step, 0
        self.ranks = types.SimpleNamespace(device=CPU)
        self.window = types.SimpleNamespace(clear=lambda: None)
        self.guard = types.SimpleNamespace(check=lambda: None)

    def step(self, batch):
        self.on_step(self.done)
        self.done += 1
        self.log.append((self.name, batch))


def runner_of(name, log, plan, on_step=nothing):
    return Runner({"backend": name, "batch_size": 8}, Trainer(name, log, on_step), plan)


def numbers(log, name):
    return [batch.number for who, batch in log if who == name]


def always(last):
    return True


def test_rounds_share_steps():
    assert split(10, 5) == [2] * 5 and split(9, 5) == [2, 2, 2, 2, 1]
    assert split(1, 5) == [1, 0, 0, 0, 0] and split(7, 1) == [7]


def test_order_is_reversed_and_all_meet_the_same_batches():
    log, plan = [], split(5, 3)
    runners = [runner_of(name, log, plan) for name in "abc"]
    assert not list(take_turns(runners, BATCHES, plan, CPU, always))
    first = [(name, number) for name in "abc" for number in (0, 1)]
    second = [(name, number) for name in "cba" for number in (2, 3)]
    third = [(name, 0) for name in "abc"]
    assert [(name, batch.number) for name, batch in log] == [*first, *second, *third]
    for runner in runners:
        assert len(runner.steps_ms) == 5 and [b.number for b in runner.batches] == [0, 1, 2, 3, 0]
        assert runner.peak_gib is None and runner.entry["took_s"] > 0
    lengths = [b.sequences["browse"].layout.lengths for b in (*BATCHES, *(b for _, b in log))]
    assert len({id(x) for x in lengths}) == len(lengths)  # new to schedules in every step


def test_one_that_fails_in_its_turn_leaves_the_others_theirs():
    def fail(done):
        if done == 3:
            raise torch.OutOfMemoryError("no memory\nmore")

    log, plan = [], split(6, 3)
    on_step = {"a": nothing, "b": fail, "c": nothing}
    runners = [runner_of(name, log, plan, does) for name, does in on_step.items()]
    alive = weakref.ref(runners[1].trainer)
    (out,) = take_turns(runners, BATCHES, plan, CPU, always)
    assert out is runners[1] and out.out and alive() is None
    assert out.entry["skipped"] == "OutOfMemoryError: no memory"
    assert numbers(log, "b") == [0, 1, 2]
    for runner in (runners[0], runners[2]):
        assert len(runner.steps_ms) == 6 and not runner.out and runner.trainer is not None


def test_a_slow_one_takes_part_in_the_first_rounds():
    log, plan = [], split(6, 3)
    runners = [runner_of("a", log, plan), runner_of("slow", log, split(2, 3))]
    assert not list(take_turns(runners, BATCHES, plan, CPU, always))
    assert numbers(log, "a") == [0, 1, 2, 3, 0, 1] and numbers(log, "slow") == [0, 2]


@pytest.fixture
def group(monkeypatch):
    """Makes groups of backends `(name, seconds of a step)`, on a clock that steps alone move."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(train_group, "time", clock)
    monkeypatch.setattr(train_rounds, "time", clock)
    found = {"parts_ms": {"attention": 1.0}, "busy_ms": 1.0, "longest_kernels": []}
    monkeypatch.setattr(train_rounds, "profile_steps", lambda *given: dict(found))
    monkeypatch.setattr(train_rounds, "flops_of", lambda *given: 1e9)

    def make(backends, deadline, slower=1.0):
        seconds, log, args = dict(backends), [], train.parse(["--steps=4", "--rounds=2"])
        args.backends = list(seconds)

        def prepare(self, runner):
            name = runner.entry["backend"]

            def pass_time(done):
                now[0] += slower * seconds[name]

            runner.trainer = Trainer(name, log, pass_time)
            runner.step_s, runner.plan = seconds[name], split(4, 2)

        monkeypatch.setattr(Group, "_prepare", prepare)
        data = types.SimpleNamespace(facts={"batch_size": 8}, batches=BATCHES)
        ranks = types.SimpleNamespace(device=CPU)
        setting = Setting(args, ranks, 1.0, Path(), Clock(0.0, deadline))
        return Group(setting, None, data, {"model": "m", "density": 0.5}), log

    return make


def test_entries_come_when_they_are_decided_and_stand_in_order(group):
    made, log = group([("a", 1.0), ("long", 20.0), ("b", 1.0)], deadline=100)
    assert [entry["backend"] for entry in made.measure()] == ["long", "a", "b"]
    a, long, b = made.entries
    assert long["skipped"] == NO_TIME and made.runners[1].trainer is None
    assert len(a["steps_ms"]) == len(b["steps_ms"]) == 4 and not numbers(log, "long")
    assert [name for name, _ in log] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert all(runner.trainer is None for runner in made.runners)


def test_the_turns_of_those_that_are_ready_are_reckoned_with(group):
    # A backend's turns and profile take 1.5 * (4 + 3) seconds, as far as is known before.
    made, log = group([("a", 1.0), ("b", 1.0), ("c", 1.0)], deadline=25)
    entries = {entry["backend"]: entry for entry in made.measure()}
    assert entries["c"]["skipped"] == NO_TIME and "took_s" not in entries["c"]
    assert len(entries["a"]["steps_ms"]) == len(entries["b"]["steps_ms"]) == 4


def test_no_round_begins_that_would_end_after_the_deadline(group):
    made, _ = group([("a", 1.0), ("b", 1.0)], deadline=25, slower=5.0)
    assert [len(entry["steps_ms"]) for entry in made.measure()] == [2, 2]

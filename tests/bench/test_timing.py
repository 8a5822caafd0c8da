"""Slow calls run as few times as a figure needs."""

import time

import pytest
import torch

from bench.peers.ours import Backend, BackendRoute
from bench.row import run_contender
from bench.timing import Launch, measure
from gem.attention import schedule
from gem.attention.testing import Judge
from tests.bench.problems import problem_of

CPU = torch.device("cpu")


class Sleeper:
    def __init__(self, seconds):
        self.seconds, self.runs = seconds, 0

    def __call__(self):
        self.runs += 1
        time.sleep(self.seconds)


@pytest.mark.parametrize(("device", "timer"), [("cpu", "wall"), ("cuda", "events")])
def test_a_checked_call_of_more_than_half_a_second_is_the_measurement(device, timer):
    """Whatever the device, which is not asked again."""
    call = Sleeper(0.0)
    timing = measure([call], torch.device(device), first=Launch(0.2, 0.6))
    assert (timing.ms, timing.host_us, call.runs) == (600.0, 2e5, 0)
    assert timing.timer == timer


def test_slow_calls_run_on_one_input_set(monkeypatch):
    """And a first one that may have compiled something is no measurement."""
    monkeypatch.setattr("bench.timing.ONE_SET", 0.005)
    monkeypatch.setattr("bench.timing.ONE_CALL", 0.005)
    slow, fast = [Sleeper(0.01), Sleeper(0.01)], [Sleeper(0.0), Sleeper(0.0)]
    measure(slow, CPU, min_ms=1)
    assert [call.runs for call in slow] == [4, 0]
    measure(fast, CPU, min_ms=1)
    assert all(call.runs > 2 for call in fast)


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_route_runs_each_direction_once_on_one_input_set(monkeypatch, slow):
    if slow:
        monkeypatch.setattr("bench.timing.ONE_SET", 0.0)
        monkeypatch.setattr("bench.timing.ONE_CALL", 0.0)
    problems = [problem_of("self"), problem_of("self")]
    runs = {"_attend": [], "backward": []}
    for name in runs:
        method = getattr(BackendRoute, name)

        def counted(route, method=method, seen=runs[name]):
            seen.append([p is route.problem for p in problems].index(True))
            return method(route)

        monkeypatch.setattr(BackendRoute, name, counted)
    judge = Judge(problems[0])
    found = run_contender(Backend("torch"), problems, ["forward", "backward"], judge, 0.1, {})
    assert all(outcome.holds and outcome.timing.ms > 0 for outcome in found.values())
    if slow:
        assert runs == {"_attend": [0], "backward": [0]}
    else:
        assert set(runs["_attend"]) == set(runs["backward"]) == {0, 1}


@pytest.mark.parametrize("name", ["broadcast", "self", "window"])
def test_the_first_call_of_torch_makes_no_plan(monkeypatch, name):
    route = BackendRoute(problem_of(name), "torch")
    monkeypatch.setitem(schedule._BUILDERS, "torch_tiles", None)
    route.first_forward()
    route.prepare_backward()
    route.backward()

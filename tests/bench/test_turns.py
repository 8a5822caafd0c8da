"""The fastest are timed once more, in turns with the matmul; on a CPU without graphs."""

import gc

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from bench import attention, row, timing, turns
from bench.lost import DeviceLost
from bench.peers.base import Contender
from bench.peers.flex import FlexRoute
from bench.peers.padded import PaddedRoute
from bench.row import Outcome, measure_row
from bench.shapes import Row
from bench.timing import Timing, in_rounds
from bench.turns import HotMatmul, close_ones, retime
from tests.bench.problems import problem_of

CPU = torch.device("cpu")
FLOPS = 2 * 256**3  # of the matmul on a CPU


def outcome(ms, timer="graph", **options):
    return Outcome(timing=Timing(ms, timer, 5.0), cost_s=1.0, **options)


class Made(Contender):
    """Routes by label: `good`, or `bad`, whose backward cannot be prepared."""

    def __init__(self, name, ours=False):
        self.name, self.ours, self.built = name, ours, []

    def routes(self, problems):
        def build(kind):
            def made():
                self.built += [kind(problem) for problem in problems]
                return self.built[-len(problems) :]

            return made

        return {"good": build(Counted), "bad": build(Unprepared)}


class Counted(PaddedRoute):
    inputs = out = None
    released = 0

    def __init__(self, problem):
        super().__init__(problem, "math")

    def release(self):
        super().release()
        self.released += 1


class Unprepared(Counted):
    def prepare_backward(self):
        super().prepare_backward()
        raise torch.OutOfMemoryError("no memory\nmore")


def rounds(ms, failing=()):
    """In place of `in_rounds`: each call runs once, and figures are those given."""
    seen = []

    def take(contenders, device, rounds, min_ms, on_failure):
        seen.append((list(contenders), rounds, min_ms))
        for name, calls in contenders.items():
            assert len(calls) == (1 if name == "matmul" else 2)
            assert all(call() is not None for call in calls)
            if name in failing:
                on_failure(name, RuntimeError("no capture"))
        return {name: ms[name] for name in contenders if name not in failing}

    return take, seen


@pytest.fixture
def problems():
    return [problem_of("self"), problem_of("self")]


def test_those_near_the_fastest_of_their_side_take_turns_where_a_graph_can():
    first = {"a": outcome(1.0), "b": outcome(1.25), "c": outcome(1.26), "d": Outcome(skipped="no")}
    assert close_ones(first, []) == ["a", "b"]
    assert close_ones(first | {"a": outcome(1.0, "profiler")}, []) == ["b"]
    assert close_ones(first | {"a": outcome(1.1, "events")}, []) == ["b", "c"]
    assert close_ones(first | {"e": outcome(0.5)}, []) == ["e"]
    assert close_ones(first | {"e": outcome(0.5)}, ["e"]) == ["a", "b", "e"]
    slower = {"e": outcome(8.0), "f": outcome(10.0), "g": outcome(10.1)}
    assert close_ones(first | slower, "efg") == ["a", "b", "e", "f"]
    assert close_ones(first | {"e": outcome(100.1)}, ["e"]) == ["a", "b"]
    assert close_ones({name: outcome(101.0) for name in "ab"}, ["a"]) == []
    assert close_ones({}, []) == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_close_ones_get_the_figures_of_turns_by_their_best_route(monkeypatch, problems, direction):
    take, seen = rounds({"a": 1.1, "b": 1.0, "ours": 0.2, "matmul": 0.5})
    monkeypatch.setattr(turns, "in_rounds", take)
    contenders = [Made("a"), Made("slow"), Made("b"), Made("broken"), Made("ours", True)]
    first = {name: outcome(1.0, route="good") for name in "ab"}
    first |= {"slow": outcome(2.0, route="good"), "broken": Outcome(compared={})}
    first |= {"ours": outcome(0.25, route="good")}
    found, matmul = retime(contenders, first, problems, direction, 48.0)
    assert seen == [(["a", "b", "ours", "matmul"], 5, 12.0)]
    assert {n: (found[n].timing.ms, found[n].timing.timer) for n in ("a", "b", "ours")} == {
        "a": (1.1, "turns"),
        "b": (1.0, "turns"),
        "ours": (0.2, "turns"),
    }
    assert matmul == HotMatmul(FLOPS / 0.5e-3 / 1e12)
    assert found["a"].cost_s > 1 and found["a"].timing.host_us == 5.0
    assert found["slow"] is first["slow"] and found["broken"] is first["broken"]
    assert list(found) == list(first)
    assert [len(c.built) for c in contenders] == [2, 0, 2, 0, 2]
    assert all(r.released and r.out is None for c in contenders for r in c.built)
    progress = attention.progress(direction, {"a": found["a"]}, None)
    assert progress.endswith("ms: a 1.100")


def test_one_that_fails_keeps_its_first_figure_and_the_others_go_on(monkeypatch, problems):
    take, seen = rounds(dict.fromkeys([*"abcd", "matmul"], 3.0), failing="b")
    monkeypatch.setattr(turns, "in_rounds", take)
    contenders = [Made(name) for name in "abcd"]
    first = {n: outcome(1.0, route="bad" if n == "a" else "good") for n in "abcd"}
    found, matmul = retime(contenders, first, problems, "backward", 48.0)
    assert seen[0][0] == ["b", "c", "d", "matmul"] and matmul.tflops
    assert [found[n].timing.timer for n in "abcd"] == ["graph", "graph", "turns", "turns"]
    assert [found[n].timing.ms for n in "abcd"] == [1.0, 1.0, 3.0, 3.0]
    assert found["a"].timing.note == "timed alone: OutOfMemoryError: no memory"
    assert found["b"].timing.note == "timed alone: RuntimeError: no capture"
    assert found["c"].timing.note is None and found["a"].cost_s > 1
    assert all(r.out is None for c in contenders for r in c.built)


def no_memory(dtype, device):
    raise torch.OutOfMemoryError("no memory\nmore")


@pytest.mark.parametrize("where", ["made", "captured", "fault"])
def test_without_the_matmul_the_others_take_turns_and_have_no_rate(monkeypatch, problems, where):
    failing = ["matmul"] if where == "captured" else []
    take, seen = rounds(dict.fromkeys([*"ab", "matmul"], 3.0), failing)
    monkeypatch.setattr(turns, "in_rounds", take)
    if where == "made":
        monkeypatch.setattr(turns, "matmul", no_memory)
    faults = {("matmul", "forward"): "lost", ("a", "backward"): "other"} if where == "fault" else {}
    first = {n: outcome(1.0, route="good") for n in "ab"}
    found, matmul = retime([Made("a"), Made("b")], first, problems, "forward", 48.0, faults)
    assert [found[n].timing for n in "ab"] == [Timing(3.0, "turns", 5.0)] * 2
    assert seen[0][0] == ["a", "b", *failing]
    note = {
        "made": "no rate in turns: OutOfMemoryError: no memory",
        "captured": "no rate in turns: RuntimeError: no capture",
        "fault": "lost",
    }[where]
    assert matmul == HotMatmul(None, note)


def test_a_single_one_that_is_left_takes_turns_with_the_matmul_alone(monkeypatch, problems):
    first = {n: outcome(1.0, route="good") for n in "ab"}
    ms = {"a": 3.0, "b": 3.0, "matmul": 1.0}
    for failing, timer in ((["b"], "turns"), (["b", "matmul"], "graph")):
        monkeypatch.setattr(turns, "in_rounds", rounds(ms, failing)[0])
        found, matmul = retime([Made("a"), Made("b")], first, problems, "forward", 48.0)
        assert found["a"].timing.timer == timer and found["b"].timing.note
        assert bool(matmul.tflops) == (timer == "turns")
    monkeypatch.setattr(turns, "in_rounds", rounds(ms, ["a", "b"])[0])
    found, matmul = retime([Made("a"), Made("b")], first, problems, "forward", 48.0)
    assert found["a"].timing.timer == "graph" and matmul == HotMatmul()


@pytest.mark.parametrize("name", ["b", "matmul"])
def test_a_lost_device_ends_the_turns_and_names_the_contender(monkeypatch, problems, name):
    def lost(device, contender, direction):
        raise DeviceLost(contender, direction, "illegal address")

    monkeypatch.setattr(turns, "check_device", lost)
    monkeypatch.setattr(turns, "in_rounds", rounds({"a": 3.0, "b": 3.0}, failing=[name])[0])
    contenders = [Made("a"), Made("b")]
    first = {n: outcome(1.0, route="good") for n in "ab"}
    with pytest.raises(DeviceLost, match=rf"{name} \(backward\) left the GPU unusable"):
        retime(contenders, first, problems, "backward", 48.0)
    assert all(r.released and r.out is None for c in contenders for r in c.built)


def test_a_row_times_alone_and_then_in_turns(monkeypatch):
    """Each pass by itself, and the matmul is left out where it ended an earlier run."""
    monkeypatch.setattr(row, "measure", lambda *args: Timing(2.0, "graph", 5.0))
    monkeypatch.setattr(row, "make_problems", lambda *args: [problem_of("self")] * 2)
    take, seen = rounds({"a": 1.5, "b": 1.6, "matmul": 0.5})
    monkeypatch.setattr(turns, "in_rounds", take)

    def measured(*names, **options):
        shape = Row("self", "any", 4, 4, 16, 30, 2)
        given = {"dtype": torch.bfloat16, "device": CPU, "seed": 1, "min_ms": 48.0} | options
        return measure_row(shape, [Made(n) for n in names], row.PASSES, **given)

    both = measured("a", "b")
    assert [names for names, *_ in seen] == [["a", "b", "matmul"]] * 2
    assert [both.outcomes["backward"][n].timing.ms for n in "ab"] == [1.5, 1.6]
    forward = both.outcomes["forward"]["a"]
    assert forward.holds and forward.timing.timer == "turns"
    assert both.matmul == dict.fromkeys(row.PASSES, HotMatmul(FLOPS / 0.5e-3 / 1e12))
    seen.clear()
    faults = {("a", "backward"): "it took the GPU with it", ("matmul", "forward"): "it too"}
    left = measured("a", "b", faults=faults)
    assert [names for names, *_ in seen] == [["a", "b"], ["b", "matmul"]]
    assert left.matmul["forward"] == HotMatmul(None, "it too") and left.matmul["backward"].tflops
    assert left.outcomes["backward"]["b"].timing.timer == "turns"


class Graph:
    """In place of a CUDA graph: replays take the times given, and an error is raised."""

    def __init__(self, *times):
        self.times, self.resets = list(times), 0

    def replay(self):
        took = self.times.pop(0)
        if isinstance(took, Exception):
            raise took
        return took

    def reset(self):
        self.resets += 1


def test_rounds_replay_in_turns_and_leave_out_what_fails(monkeypatch):
    order = []

    def long_graph(calls, device):
        graph = calls[0]()
        if graph is None:
            raise RuntimeError("no capture")
        return graph, 2, 6e-3

    def replay_ms(graph, count):
        order.append((graph, count))
        return [graph.replay()] * count

    monkeypatch.setattr(timing, "_long_graph", long_graph)
    monkeypatch.setattr(timing, "_replay_ms", replay_ms)
    a, b, lost = Graph(2.0, 4.0, 60.0), Graph(6.0, 8.0, 2.0), Graph(2.0, RuntimeError("lost"))
    calls = {"a": [lambda: a], "none": [lambda: None], "lost": [lambda: lost], "b": [lambda: b]}
    told = {}
    ms = in_rounds(calls, CPU, 3, 24.0, on_failure=told.__setitem__)
    assert ms == {"a": 2.0, "b": 3.0}
    assert {name: str(error) for name, error in told.items()} == {
        "none": "no capture",
        "lost": "lost",
    }
    first, second, third = order[:3], order[3:6], order[6:]
    assert all(set(x) == {(g, 4) for g in (a, lost, b)} for x in (first, second))
    assert set(third) == {(a, 4), (b, 4)} and len(third) == 2
    assert first != second  # nobody always comes after the same one
    assert a.resets == b.resets == lost.resets == 1
    again = Graph(1.0)
    with pytest.raises(RuntimeError, match="no capture"):
        in_rounds({"a": [lambda: again], "none": [lambda: None]}, CPU)
    assert again.resets == 1


@pytest.mark.parametrize("name", ["self", "window", "left", "broadcast"])
def test_flex_is_not_compiled_again_for_a_route_that_is_built_anew(name):
    """Though the masks that it was compiled with are gone."""
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    torch.compiler.reset()
    function = torch.compile(flex_attention, dynamic=False, backend=backend)
    problem = problem_of(name, torch.float32)
    for _ in range(3):
        FlexRoute(problem, function).forward()
        gc.collect()
    assert len(compiled) == 1

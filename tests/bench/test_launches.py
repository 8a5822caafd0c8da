"""The sweep of launch shapes reads and names them, and judges every result before it is timed."""

import pytest
import torch

from bench import launches
from bench.launches import backwards, forwards, name_of, shape_from, with_every_switch
from bench.timing import in_rounds, side_stream
from gem.attention.backends.tlx_ import Shape
from gem.attention.simulator import simulated
from gem.attention.testing import Judge, random_problem


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("2x128.2.2.240p", Shape(2, 128, 2, 2, 240, ping_pong=True)),
        ("3x64.4.1.160wk", Shape(3, 64, 4, 1, 160, p_wide=True, keep_q=True)),
        ("1x64.5.2.232", Shape(1, 64, 5, 2, 232)),
        ("2x64.4.2.240pwc", Shape(2, 64, 4, 2, 240, ping_pong=True, p_wide=True, counter=True)),
    ],
)
def test_a_shape_and_its_name_are_one(text, shape):
    assert shape_from(text) == shape and name_of(shape) == text


@pytest.mark.parametrize("text", ["", "2x128", "2x128.2.2.240x", "128.2.2.240p"])
def test_other_text_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="one is like"):
        shape_from(text)


def test_all_switches_differ():
    assert len(set(with_every_switch(Shape(2, 64, 4, 2, 240)))) == 8


def test_an_unknown_row_or_shape_ends_the_command_with_a_sentence(capsys):
    for argv in (["--rows", "none"], ["--rows", "self_d64", "--shapes", "wide"]):
        with pytest.raises(SystemExit):
            launches.parse(argv)
    errors = capsys.readouterr().err
    assert "matches no row" in errors and "no launch shape" in errors


def test_without_a_gpu_there_is_nothing_to_measure(capsys):
    assert launches.main(["--rows", "self_d64", "--device", "cpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("queries", "options", "names"),
    [
        (None, {}, ["chosen (keys)", "keys split", "keys whole"]),
        (None, {"causal": True}, ["chosen (keys)", "keys split"]),
        (40, {}, ["chosen (queries)", "keys", "keys split"]),
        (70, {}, ["chosen (keys)", "keys split"]),
    ],
    ids=str,
)
def test_a_backward_has_every_form_that_can_serve(queries, options, names):
    lengths = [70, 0, 9]
    problem = random_problem(queries or lengths, lengths, dim=64, dtype=torch.bfloat16, **options)
    with simulated():
        assert list(backwards(problem)) == [*names, "triton"]


@pytest.mark.gpu
def test_every_launch_is_right_and_timed():
    device = torch.device("cuda")
    problem = random_problem([5, 0, 300, 11], heads=4, dim=128, dtype=torch.bfloat16, device=device)
    judge = Judge(problem)
    with side_stream(device), torch.no_grad():
        calls = forwards(problem, [Shape(2, 64, 2, 1, 240)]) | backwards(problem)
        for name, call in calls.items():
            assert all(c.ratio <= 1 for c in judge.compare(call()).values()), name
        ms = in_rounds({name: [call] for name, call in calls.items()}, device, 2, 0.1)
    forms = {"chosen (keys)", "keys split", "keys whole", "triton"}
    assert forms < set(ms) and len(ms) == 6 and all(x > 0 for x in ms.values())

"""`python -m gem.attention.simulator` on a kernel of one's own."""

import json

import pytest

from gem.attention.simulator.__main__ import main

MINE = """
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.attention.simulator import kernels


def check(seed, fault="", wrong=0.0):
    a, b, c = torch.randn(64, 192).half(), torch.randn(192, 64).half(), torch.empty(64, 64)
    args = [TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b, c)]
    kernels.product_kernel[(1,)](*args, 3, STAGES=2, FAULT=fault, num_warps=4)
    torch.testing.assert_close(c + wrong, a.float() @ b.float(), rtol=1e-4, atol=1e-3)


def faulty():
    check(0, "no fence")


def off():
    check(0, wrong=1.0)


def idle():
    pass
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine_of_the_command.py"
    path.write_text(MINE)
    return path


def test_a_kernel_without_a_fault(mine, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert main([f"{mine}:check", "--seeds", "3", "--trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 0: 1 programs, 3 tile steps (") and len(lines) == 4
    assert lines[-1] == "no fault found"
    assert len(json.loads(trace.read_text())["traceEvents"]) > 30


def test_a_fault_is_printed_and_makes_the_exit_code(mine, capsys):
    assert main([f"{mine}:faulty", "--seed", "4"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("seed 4: MissingFence at ") and out.endswith("1 of 1 seeds failed\n")


def test_fences_of_the_compiler(mine, capsys):
    assert main([f"{mine}:faulty", "--seeds", "2", "--compiler-fences"]) == 0
    assert capsys.readouterr().out.endswith("no fault found\n")
    assert main([f"{mine}:faulty", "--seeds", "2"]) == 1
    assert "MissingFence" in capsys.readouterr().out


def test_wrong_numbers_make_the_exit_code(mine, capsys):
    assert main([f"{mine}:off", "--seeds", "2"]) == 1
    assert "seed 1: wrong: Tensor-likes are not close!" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["nothing.py:f", "mine", "{mine}:absent"])
def test_what_is_not_there(mine, what, capsys):
    with pytest.raises(SystemExit):
        main([what.format(mine=mine)])
    assert "error:" in capsys.readouterr().err


def test_nothing_launched_is_not_no_fault(mine, capsys):
    assert main([f"{mine}:idle"]) == 2
    assert "idle() launched no kernel" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([f"{mine}:check", "--seeds", "0"])
    assert "--seeds must be at least 1" in capsys.readouterr().err

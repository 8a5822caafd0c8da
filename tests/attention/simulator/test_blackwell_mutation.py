"""Faults planted one at a time in a copy of the wheel's Blackwell flash attention."""

import importlib.util
import re
from pathlib import Path

import torch
import triton
import triton.language.extra.tlx as tlx

from gem.attention.simulator import SimulationError, driver, simulated

SOURCE = Path(tlx.__file__).parent / "tutorials" / "blackwell_fa_ws.py"
# The softmax's wait for the last alpha to be read: it has waited for scores whose product was
# issued after the correction had arrived with that alpha read.
EQUIVALENT = {"barrier_wait(alpha_empties[qk_bufIdx], qk_phase ^ 1): dropped"}


def planted(lines):
    """(line number, new line, what it is) of every fault."""
    for i, line in enumerate(lines):
        call = line.strip().removeprefix("tlx.")
        if call.startswith(("barrier_wait(", "barrier_arrive(")):
            yield i, line[: len(line) - len(line.lstrip())] + "pass", f"{call}: dropped"
        if call.startswith("barrier_wait(") and call.endswith("phase)"):
            yield i, line.removesuffix(")") + " ^ 1)", f"{call}: other phase"
        if call.startswith("use_acc="):
            yield i, re.sub("=.*", "=True,", line), f"{call}: True"
        if call.startswith("mBarriers=[") and ", kv_empties" in call:
            yield i, re.sub(r", kv_empties\[\w+\]", "", line), f"{call}: without kv_empties"


def caught(path, name, problem):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *inputs, expected = problem
    for seed in range(4):
        try:
            with simulated("sm_100", seed, step_limit=20_000):
                out = module.attention(*inputs, 0.1)
        except SimulationError:
            return True
        if not (out.float() - expected).abs().max() < 2e-3:
            return True
    return False


def test_planted_faults_are_caught(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(triton.runtime.driver, "_active", driver.StandIn("sm_100"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 512, 128, generator=generator).half() for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), scale=0.1
    )
    lines = SOURCE.read_text().split("\n")
    missed, count = [], 0
    for i, new, what in [(0, lines[0], "nothing"), *planted(lines)]:
        name = f"planted_{count}"
        path = tmp_path / f"{name}.py"
        path.write_text("\n".join([*lines[:i], new, *lines[i + 1 :]]))
        found = caught(path, name, (q, k, v, expected))
        if what == "nothing":
            assert not found
            continue
        count += 1
        if not found:
            missed.append(what)
    with capsys.disabled():
        print(f"\nmutations: planted {count}, caught {count - len(missed)}")
    assert count >= 30 and set(missed) <= EQUIVALENT

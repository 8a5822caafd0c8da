"""Faults planted in copies of the Hopper kernels: the simulator catches them."""

import sys

import pytest
import torch

from gem.attention.simulator import SimulationError
from tests.attention.simulator.mutation import imported_kernel
from tests.attention.simulator.mutation_cases import CASES

SEEDS = (0, 1, 2, 3)
EVERY = pytest.mark.parametrize("case", CASES, ids=str)


def problems(case):
    generator = torch.Generator().manual_seed(5)
    return [launch.problem(generator) for launch in case.launches]


def caught(case, kernel, given, monkeypatch):
    """How the fault shows, or None."""
    monkeypatch.setattr(case.host, case.name, kernel)
    for seed in SEEDS:
        for problem, launch in zip(given, case.launches, strict=True):
            try:
                bad = launch.bad(problem, seed)
            except SimulationError as e:
                return f"{type(e).__name__}: {e.what}"
            if bad:
                return f"wrong numbers: {bad[0]}"
    return None


def run(case, chosen, tmp_path, monkeypatch, capsys):
    """The faults that nothing showed; prints them and how many others."""
    given, missed, kinds = problems(case), [], {}
    for number, (mutant, sources) in enumerate(chosen):
        mark = f"mutant_{number}"
        module = imported_kernel(sources, tmp_path, mark)
        how = caught(case, getattr(module, case.name), given, monkeypatch)
        for name in [x for x in sys.modules if x.endswith(f"_{mark}")]:
            del sys.modules[name]
        if how is None:
            missed.append(mutant)
        else:
            kinds[how.partition(":")[0]] = kinds.get(how.partition(":")[0], 0) + 1
    with capsys.disabled():
        print(f"\n{case}: planted {len(chosen)}, caught {len(chosen) - len(missed)}")
        print("by: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
        for mutant in missed:
            print(f"missed: {mutant}: {case.why(mutant) or 'why?'}")
    return missed


@EVERY
def test_without_a_fault_there_is_no_report(case, tmp_path, monkeypatch):
    module = imported_kernel(case.sources, tmp_path, f"mutant_none_{case}")
    assert caught(case, getattr(module, case.name), problems(case), monkeypatch) is None


@EVERY
def test_some_faults(case, tmp_path, monkeypatch, capsys):
    """Every ninth, so that kinds differ."""
    missed = run(case, case.faults()[::9], tmp_path, monkeypatch, capsys)
    assert case.explains(missed)


@EVERY
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_faults(case, tmp_path, monkeypatch, capsys):
    chosen = case.faults()
    missed = run(case, chosen, tmp_path, monkeypatch, capsys)
    assert len(chosen) >= 40 and len(missed) <= 0.05 * len(chosen)
    assert case.explains(missed)

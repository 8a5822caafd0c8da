"""Faults planted in copies of the Hopper forward kernel: the simulator catches them."""

import sys
from pathlib import Path

import pytest
import torch

from gem.attention.backends import tlx_, tlx_common, tlx_hopper_forward
from gem.attention.simulator import SimulationError
from gem.attention.testing import random_problem
from tests.attention.simulator.helpers import launched, with_all, wrong
from tests.attention.simulator.mutation import edited, imported, mutants

Shape = tlx_.Shape
KERNEL = Path(tlx_hopper_forward.__file__).read_text()
COMMON = Path(tlx_common.__file__).read_text()

# Launches that between them reach every line: (dim, shape, mask or queries, p_shared, processors).
LAUNCHES = [
    (128, with_all(Shape(2, 64, 2, 1, 240)), {"window": (150, 20)}, False, 2),
    (64, Shape(2, 64, 3, 2, 240, counter=True), {}, False, 2),
    (128, Shape(2, 64, 1, 1, 240), {}, True, 2),
    (64, Shape(3, 64, 2, 1, 160), {"causal": True}, True, 2),
    (64, with_all(Shape(2, 128, 2, 2, 240)), {"causal": True}, False, 2),
    (64, with_all(Shape(2, 64, 2, 1, 240)), {"queries": 130}, False, 4),
]
SEEDS = (0, 1, 2, 3)


# Faults of the counter of tiles: (kind, text, text instead).
COUNTED = [
    ("takes a tile past its bound", "turn + 2 < turns", "True"),
    ("no end of the tiles", "tl.where(tile < tiles, tile, -1)", "tile"),
    (
        "skips a tile",
        "tl.num_programs(0) // TEAM + number",
        "tl.num_programs(0) // TEAM + number + 1",
    ),
]

# Faults that change nothing, as text in their description, and why.
HARMLESS = {
    "early release: 's = tlx.async_dot_wait(PIECES, s)\\n    tlx.barrier_arrive(k_empty)'": (
        1,
        "before a block of keys is copied, the producer waits for the values of a block before to"
        " be released, which consumers do after the product in question",
    ),
    "one product more in flight: '0' -> '0 + 1'": (
        2,
        "the wait for the first half of the output has waited for all products",
    ),
    "no barrier_wait: 'tlx.barrier_wait(v_full, v_phase)'": (
        1,
        "it only keeps the compiler from moving what comes after it; the barrier has been passed",
    ),
}


def explained(missed):
    """Whether every one is harmless, and none more often than is known."""
    return all(harmless(m) for m in missed) and all(
        sum(text in str(m) for m in missed) <= times for text, (times, _) in HARMLESS.items()
    )


def harmless(mutant):
    """Why the fault changes nothing, or None."""
    return next((why for text, (_, why) in HARMLESS.items() if text in str(mutant)), None)


def problems():
    generator = torch.Generator().manual_seed(5)
    lengths = [260, 65, 0, 330, 130, 64]
    made = []
    for dim, _, options, _, _ in LAUNCHES:
        masks = {k: v for k, v in options.items() if k != "queries"}
        q_lengths = options.get("queries", lengths)
        k_lengths = lengths if options else lengths[::-1]
        options = {"heads": 2, "kv_heads": 1, "dim": dim, "dtype": torch.bfloat16}
        made.append(random_problem(q_lengths, k_lengths, generator=generator, **options, **masks))
    return made


def caught(kernel, given, monkeypatch):
    """How the fault shows, or None."""
    monkeypatch.setattr(tlx_, "hopper_forward_kernel", kernel)
    for seed in SEEDS:
        for problem, (_, shape, _, p_shared, processors) in zip(given, LAUNCHES, strict=True):
            try:
                out, lse, _ = launched(problem, shape, seed, processors, p_shared=p_shared)
            except SimulationError as e:
                return f"{type(e).__name__}: {e.what}"
            bad = wrong(problem, out, lse)
            if bad:
                return f"wrong numbers: {bad[0]}"
    return None


def all_mutants():
    """(fault, kernel's source, helpers' source)."""
    found = [(m, m.source(KERNEL), COMMON) for m in mutants(KERNEL)]
    for name, other in (("v_tiles", "k_tiles"), ("out_tiles", "q_tiles")):
        shape = "(BLOCK_K, BLOCK_D), DTYPE, STAGES" if name[0] == "v" else (
            "(64, BLOCK_D), DTYPE, CONSUMERS"
        )  # fmt: skip
        was = f"{name} = tlx.local_alloc({shape})"
        m = edited(KERNEL, "overlapping alias", was, f"{was[:-1]}, reuse={other})")
        found.append((m, m.source(KERNEL), COMMON))
    for kind, was, now in COUNTED:
        m = edited(KERNEL, kind, was, now)
        found.append((m, m.source(KERNEL), COMMON))
    found += [(m, KERNEL, m.source(COMMON)) for m in mutants(COMMON)]
    return found


def run(chosen, tmp_path, monkeypatch, capsys):
    given, missed, kinds = problems(), [], {}
    for number, (mutant, kernel_source, common_source) in enumerate(chosen):
        common = f"gem_mutant_common_{number}"
        kernel_source = kernel_source.replace("gem.attention.backends.tlx_common", common)
        imported(common_source, tmp_path / f"{common}.py")
        module = imported(kernel_source, tmp_path / f"gem_mutant_{number}.py")
        how = caught(module.hopper_forward_kernel, given, monkeypatch)
        del sys.modules[common], sys.modules[module.__name__]
        if how is None:
            missed.append(mutant)
        else:
            kinds[how.partition(":")[0]] = kinds.get(how.partition(":")[0], 0) + 1
    with capsys.disabled():
        print(f"\nmutations: planted {len(chosen)}, caught {len(chosen) - len(missed)}")
        print("by: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
        for mutant in missed:
            print(f"missed: {mutant}: {harmless(mutant) or 'why?'}")
    return missed


def test_without_a_fault_there_is_no_report(tmp_path, monkeypatch):
    module = imported(KERNEL, tmp_path / "gem_mutant_none.py")
    assert caught(module.hopper_forward_kernel, problems(), monkeypatch) is None


def test_some_faults(tmp_path, monkeypatch, capsys):
    """Every ninth, so that kinds differ."""
    missed = run(all_mutants()[::9], tmp_path, monkeypatch, capsys)
    assert explained(missed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_faults(tmp_path, monkeypatch, capsys):
    chosen = all_mutants()
    missed = run(chosen, tmp_path, monkeypatch, capsys)
    assert len(chosen) >= 40 and len(missed) <= 0.05 * len(chosen)
    assert explained(missed)

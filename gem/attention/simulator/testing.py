"""For tests of one's own kernels: the same launch under many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gem.attention.simulator.launch import Counts, simulated


def under_seeds(
    launch: Callable[[], object], seeds: Iterable[int] | int = 10, same: bool = True, **options
) -> tuple[object, Counts]:
    """Calls `launch` under every seed. Returns its last result and the counts of all.

    Args:
        launch: makes the kernel's outputs anew and launches it; returns tensors, one or several.
        seeds: the seeds, or how many (0, 1, ...).
        same: whether results have the same bits under every seed. A kernel that adds with atomics
            or reductions may not.
        **options: of `simulated`: target, kernels, processors, trace, step_limit.

    Raises:
        SimulationError: the first fault, with its seed.
        AssertionError: results differ between two seeds.
    """
    total, first, result = Counts(), None, None
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        with simulated(seed=seed, **options) as counts:
            result = launch()
        total.add(counts)
        if first is None:
            first = seed, _copies(result)
        elif same:
            for i, (x, y) in enumerate(zip(first[1], _copies(result), strict=True)):
                if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                    raise AssertionError(f"result {i} differs between seeds {first[0]} and {seed}")
    return result, total


def _copies(result: object) -> list[Tensor]:
    tensors = [result] if isinstance(result, Tensor) else result
    return [x.clone() for x in tensors if isinstance(x, Tensor)] if tensors is not None else []

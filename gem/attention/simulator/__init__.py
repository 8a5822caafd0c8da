"""Runs TLX kernels on a CPU and reports deadlocks, races and wrong numbers.

    from gem.attention.simulator import simulate
    simulate(kernel, grid, [args...], seeds=10, BLOCK=64)

or, for a launch that stays as it is:

    with simulated(seed=3):
        kernel[grid](args..., BLOCK=64)
"""

from gem.attention.simulator.errors import SimulationError
from gem.attention.simulator.launch import Counts, processors, simulate, simulated
from gem.attention.simulator.trace import Trace

__all__ = ["Counts", "SimulationError", "Trace", "processors", "simulate", "simulated"]

"""Launches of kernels in the simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import context, frontend, global_memory, targets
from gem.attention.simulator.errors import SimulationError
from gem.attention.simulator.memory import SharedMemory
from gem.attention.simulator.scheduler import Cta, Policy
from gem.attention.simulator.tensor_memory import PairFound, TensorMemory
from gem.attention.simulator.trace import Trace
from gem.attention.simulator.values import value

# Options of a launch that are not arguments of the kernel.
_OPTIONS = {
    "num_warps", "num_stages", "ptx_options", "num_ctas", "ctas_per_cga", "cluster_dims", "maxnreg",
    "enable_fp_fusion", "warmup", "debug", "minRegAutoWS", "maxRegAutoWS", "pingpongAutoWS",
    "ir_override",
}  # fmt: skip
STEP_LIMIT = 10_000_000


@dataclasses.dataclass
class Counts:
    """What a run did.

    Attributes:
        launches, programs: kernels launched, CTAs run.
        stolen: clusters that never started, as a running one took them over (CLC).
        products: `async_dot`s, the tile steps of a kernel.
        operations: asynchronous operations issued, products included.
        steps, switches: times a task was resumed, and was another than before.
        turns: of loops at run time.
        seconds: of wall time.
    """

    launches: int = 0
    programs: int = 0
    stolen: int = 0
    products: int = 0
    operations: int = 0
    steps: int = 0
    switches: int = 0
    turns: int = 0
    seconds: float = 0.0

    @property
    def products_per_second(self) -> float:
        """Simulated tile steps per second."""
        return self.products / self.seconds if self.seconds else 0.0

    def add(self, other: Counts) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {self.products} tile steps"
            f" ({self.products_per_second:.0f} per second), {self.operations} asynchronous"
            f" operations, {self.switches} switches, {self.seconds:.2f} s"
        )


class _Run:
    """One launch: what its CTAs share."""

    def __init__(
        self, grid, warps: int, target, policy, counts, trace, step_limit: int, compiler_fences
    ):
        self.compiler_fences = compiler_fences
        self.grid, self.warps, self.target, self.policy = grid, warps, target, policy
        self.counts, self.trace = counts, trace
        self.step_limit = step_limit
        self.last_step = counts.steps + counts.turns + step_limit
        self.waiting: list[tuple[int, int, int]] = []  # first CTAs of clusters not started
        self.pairs: dict[int, bool] = {}  # allocations in tensor memory, see `TensorBuffers`
        self.two_ctas = False  # whether there are products of pairs
        self.too_much: SimulationError | None = None  # columns, if no results of pairs are found


def launch(
    kernel: JITFunction,
    grid: Sequence[int] | Callable,
    args: Sequence,
    keywords: dict[str, object],
    *,
    target: str = "sm_90",
    seed: int = 0,
    counts: Counts | None = None,
    trace: Trace | None = None,
    step_limit: int = STEP_LIMIT,
    compiler_fences: bool = False,
) -> Counts:
    """Runs a kernel once under one seed. Returns its counts; see `simulate`."""
    counts = Counts() if counts is None else counts
    options = {k: v for k, v in keywords.items() if k in _OPTIONS and k not in kernel.arg_names}
    given = {k: v for k, v in keywords.items() if k not in options}
    bound = inspect.signature(_python(kernel)).bind(*args, **given)
    bound.apply_defaults()
    if callable(grid):
        grid = grid(bound.arguments)
    grid = (*(int(n) for n in grid), 1, 1)[:3]
    constant = {p.name for p in kernel.params if p.is_constexpr}
    arguments = {k: x if k in constant else _argument(x, k) for k, x in bound.arguments.items()}
    run = _Run(
        grid, int(options.get("num_warps") or 4), targets.target(target), Policy(seed), counts,
        trace, step_limit, compiler_fences,
    )  # fmt: skip
    function = frontend.compiled(kernel)
    dims = _cluster(grid, options)
    members = _programs(*(range(d) for d in dims))
    memories = [_memories(run.target, len(members) > 1) for _ in members]
    began = time.perf_counter()
    firsts = _programs(*(range(0, n, d) for n, d in zip(grid, dims, strict=True)))
    counts.launches += 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        before = _Before(run, arguments) if run.target.tensor_columns and len(members) > 1 else None
        while True:
            try:
                _run_all(run, firsts, members, memories, lambda: _start(function, arguments))
                break
            except PairFound as found:
                before.restore()
                run.pairs[found.number] = found.result
    finally:
        torch.set_num_threads(threads)
        counts.seconds += time.perf_counter() - began
    return counts


def _run_all(run: _Run, firsts, members, memories, start) -> None:
    """Runs the clusters of a grid one after another."""
    with np.errstate(all="ignore"):  # as on a GPU: infinities and NaN
        run.waiting = run.policy.order(firsts)
        while run.waiting:
            at, first = run.waiting.pop(0), None
            for member, memory in zip(members, memories, strict=True):
                program = tuple(a + m for a, m in zip(at, member, strict=True))
                cta = Cta(run, program, *memory, first)
                first = first or cta
            run.counts.programs += len(members)
            try:
                first.run(start)
            except SimulationError:
                _check_size(run, first)
                raise
            _check_size(run, first)


def _check_size(run: _Run, cta: Cta) -> None:
    """Reports tensor memory that is too much, also if results of pairs take half."""
    if run.too_much is not None:
        run.too_much.cta, run.too_much.seed = cta.program, run.policy.seed
        raise run.too_much


class _Before:
    """What a run changes, to begin it anew: the compiler knows layouts that a run finds out."""

    def __init__(self, run: _Run, arguments: dict):
        self.run, self.counts = run, dataclasses.replace(run.counts)
        self.events = len(run.trace.events) if run.trace is not None else 0
        self.memories = [(m.bytes, m.bytes.copy()) for m in _memories_of(arguments.values())]

    def restore(self) -> None:
        run = self.run
        vars(run.counts).update(vars(self.counts))
        run.policy, run.too_much = Policy(run.policy.seed), None
        if run.trace is not None:
            events = run.trace.events
            events[self.events :] = [x for x in events[self.events :] if x["ph"] == "M"]
        for now, before in self.memories:
            now[...] = before


def _memories_of(arguments) -> Iterator[global_memory.GlobalMemory]:
    """Of pointers and descriptors."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from _memories_of(x)
        memory = getattr(x, "memory", getattr(x, "base", None))
        if isinstance(memory, global_memory.GlobalMemory):
            yield memory


def _cluster(grid, options) -> tuple[int, int, int]:
    """CTAs of a cluster along each axis of the grid, which counts CTAs."""
    dims = options.get("ctas_per_cga") or options.get("cluster_dims") or ()
    dims = (*(int(n) for n in dims), 1, 1, 1)[:3]
    if any(n % d for n, d in zip(grid, dims, strict=True)):
        raise ValueError(f"grid is {grid}, which clusters of {dims} CTAs do not divide")
    return dims


def _programs(*axes) -> list[tuple[int, int, int]]:
    """Ids along these ranges, the first axis fastest."""
    x, y, z = axes
    return [(i, j, k) for k in z for j in y for i in x]


def _memories(target, cluster: bool) -> tuple:
    """(shared memory, tensor memory or None) of a CTA."""
    columns = target.tensor_columns
    tensor = TensorMemory(columns, columns if cluster else 0) if columns else None
    return SharedMemory(target.shared_bytes), tensor


def _python(kernel):
    function = kernel.fn
    while hasattr(function, "fn"):
        function = function.fn
    return function


def _start(function, arguments):
    result = function.call(**arguments)
    return result if function.switches else None


def _argument(x, name: str):
    """A kernel's argument as the simulator's value."""
    if isinstance(x, torch.Tensor):
        return global_memory.pointer(x, name)
    if isinstance(x, TensorDescriptor):
        return global_memory.descriptor(x, name)
    if isinstance(x, bool | int | float):
        return value(x)
    if isinstance(x, tuple | list):
        return tuple(_argument(y, f"{name}[{i}]") for i, y in enumerate(x))
    return x


def simulate(
    kernel: JITFunction,
    grid: Sequence[int] | Callable,
    args: Sequence | dict[str, object],
    *,
    target: str = "sm_90",
    seeds: Sequence[int] | int = 2,
    trace: Trace | None = None,
    step_limit: int = STEP_LIMIT,
    compiler_fences: bool = False,
    **constants,
) -> Counts:
    """Runs a kernel on CPU tensors once per seed, and checks it.

    Args:
        kernel: decorated with `triton.jit`; it runs as it is.
        grid: of a launch, or a function of the arguments.
        args: the kernel's arguments in order, or by name; tensors on the CPU, TensorDescriptors of
            such, numbers. What the kernel writes is in the tensors afterwards.
        target: "sm_90" (Hopper) or "sm_100" (Blackwell).
        seeds: the seeds, or how many (0, 1, ...). Seed 0 makes asynchronous operations take effect
            as late as possible, seed 1 at once, the others at random times. What a TMA store has
            read may be written to global memory later still.
        trace: filled with what happened, if given.
        step_limit: of scheduler steps and turns of loops per run.
        compiler_fences: whether `async_descriptor_store` needs no `tlx.fence` before it: Triton's
            compiler puts one there, in the task that issues it.
        **constants: constexprs, and options such as num_warps.

    Raises:
        SimulationError: what is wrong with the kernel (its kinds are in `errors`).
    """
    positional = () if isinstance(args, dict) else args
    keywords = {**(args if isinstance(args, dict) else {}), **constants}
    counts = Counts()
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        launch(
            kernel, grid, positional, keywords, target=target, seed=seed, counts=counts,
            trace=trace, step_limit=step_limit, compiler_fences=compiler_fences,
        )  # fmt: skip
    return counts


_processors = 132


def processors() -> int:
    """Multiprocessors of the simulated GPU, for launches that fill it (an H200's outside)."""
    return _processors


@contextlib.contextmanager
def simulated(
    target: str = "sm_90",
    seed: int = 0,
    kernels: Sequence[JITFunction] | None = None,
    processors: int = 2,
    trace: Trace | None = None,
    step_limit: int = STEP_LIMIT,
    compiler_fences: bool = False,
) -> Iterator[Counts]:
    """Within it, `kernel[grid](...)` is simulated; yields the counts of all launches.

    Args:
        target, seed, trace, step_limit, compiler_fences: as in `simulate`.
        kernels: those that are simulated (default: all).
        processors: multiprocessors of the simulated GPU; few make persistent kernels loop.

    An autotuned kernel takes its first configuration.
    """
    global _processors
    counts = Counts()
    run, tune = JITFunction.run, Autotuner.run

    def simulated_run(self, *args, grid, warmup=False, **keywords):
        if kernels is not None and self not in kernels:
            return run(self, *args, grid=grid, warmup=warmup, **keywords)
        launch(
            self, grid, args, keywords, target=target, seed=seed, counts=counts, trace=trace,
            step_limit=step_limit, compiler_fences=compiler_fences,
        )  # fmt: skip
        return None

    def first_config(self, *args, **keywords):
        config = self.configs[0]
        named = {**dict(zip(self.arg_names, args, strict=False)), **keywords}
        if config.pre_hook is not None:
            config.pre_hook({**named, **config.all_kwargs()})
        return self.fn.run(*args, **{**keywords, **config.all_kwargs()})

    before, _processors = _processors, processors
    JITFunction.run, Autotuner.run = simulated_run, first_config
    try:
        yield counts
    finally:
        JITFunction.run, Autotuner.run = run, tune
        _processors = before
        context.cta = context.task = None

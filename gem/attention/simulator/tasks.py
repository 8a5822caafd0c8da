"""What becomes of `tlx.async_tasks` and `tlx.async_task`."""

from __future__ import annotations

from gem.attention.simulator import context
from gem.attention.simulator.errors import ResourceError, UnsupportedOperation
from gem.attention.simulator.scheduler import Task

# What the default task keeps at least, per thread: setmaxnreg's least count.
_LEAST_REGISTERS = 24


class Spec:
    """An `async_task`: its body and its options."""

    def __init__(self, body, line: int, *args, num_warps=None, num_regs=None, registers=None,
                 replicate=1, warp_group_start_id=None):  # fmt: skip
        self.body, self.line = body, line
        self.default = bool(args) and args[0] == "default"
        if args and not self.default:
            raise context.error(UnsupportedOperation, f"async_task({args[0]!r})")
        self.warps = context.cta.run_of.warps if self.default else int(num_warps)
        self.registers = num_regs if num_regs is not None else registers
        self.replicate = int(replicate)
        if self.registers is not None:
            self.registers = int(self.registers)
            if self.registers % 8 or not 24 <= self.registers <= 256:
                raise context.error(
                    ResourceError,
                    f"{self.registers} registers per thread, not a multiple of 8 from 24 to 256",
                )


def _check(specs: list[Spec]) -> None:
    """Reports more threads or registers than there are."""
    target = context.cta.target
    defaults = [spec for spec in specs if spec.default]
    if len(defaults) != 1:
        raise context.error(
            UnsupportedOperation, f"{len(defaults)} default tasks; async_tasks has exactly one"
        )
    threads = sum(32 * spec.warps * spec.replicate for spec in specs)
    if threads > target.threads:
        raise context.error(
            ResourceError, f"{threads} threads of all tasks; a CTA has at most {target.threads}"
        )
    others = [spec for spec in specs if not spec.default]
    counted = [spec for spec in others if spec.registers is not None]
    if counted and len(counted) != len(others):
        raise context.error(
            ResourceError, "registers are given to some of the non-default tasks, not to all"
        )
    if not counted:
        return
    taken = sum(32 * s.warps * s.replicate * s.registers for s in counted)
    rest = 32 * defaults[0].warps * defaults[0].replicate * _LEAST_REGISTERS
    if taken + rest > target.registers:
        raise context.error(
            ResourceError,
            f"the tasks ask for {taken} registers and the default task needs at least {rest}, but"
            f" there are {target.registers}",
        )


def run(specs: list[Spec]):
    """Runs all tasks to their ends: the main program waits meanwhile."""
    cta, main = context.cta, context.task
    _check(specs)
    made = []
    for spec in specs:
        for replica in range(spec.replicate):
            name = "default" if spec.default else f"task at line {spec.line}"
            if spec.replicate > 1:
                name += f" replica {replica}"
            task = Task(cta, name, replica, 32 * spec.warps, main)
            task.coroutine = spec.body()
            made.append(task)
    main.tick()
    cta.tasks += made
    main.blocked = made, None
    yield
    main.blocked = None
    for task in made:
        main.know(task)

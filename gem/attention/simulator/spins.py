"""Loops that go round without end, polling what nobody changes.

A `while` counts its turns. A task is found to spin once it comes to a loop's head a second time
with the same variables, while nothing has changed that it could read in between (Brent's algorithm
finds that also where several turns make a cycle). It hands over then, as another task may change
what it polls; if no other task can go on either, that is reported.
"""

from __future__ import annotations

import sys

import numpy as np

from gem.attention.simulator import context
from gem.attention.simulator.errors import EndlessLoop, StepLimit
from gem.attention.simulator.values import Value

PATIENCE = 256  # turns before variables are compared, and between two at which a task hands over
_NAMED = 4  # of what a loop reads


class Spin:
    """The turns of a task's loops since something has changed.

    Attributes:
        changes: of the context, when they began.
        turns: how many.
        endless: whether these turns repeat themselves.
        reads: what has been read since turns are compared, with the place; None before.
    """

    def __init__(self):
        self.run = 0  # turns since it handed over
        self.begin()

    def begin(self) -> None:
        self.changes, self.turns, self.endless = context.changes, 0, False
        self.reads: dict[str, str] | None = None
        self.heads: dict[tuple, list] = {}

    def stuck(self) -> bool:
        """Whether the task turns in vain as long as nothing changes."""
        return self.endless and self.changes == context.changes

    def note(self, what: object, place: tuple) -> None:
        text = " ".join(map(str, (what, *place)))
        if len(self.reads) < _NAMED or text in self.reads:
            self.reads[text] = context.short(context.where())

    def repeats(self, frame) -> bool:
        """Whether the loop's head has been reached with these variables before."""
        if self.reads is None:
            self.reads = {}
        now, key = dict(frame.f_locals), (frame.f_code, frame.f_lineno)
        head = self.heads.get(key)
        if head is None or head[0] is not frame:
            self.heads[key] = [frame, now, 1, 0]
            return False
        _, before, power, count = head
        if _same(before, now):
            return True
        count += 1
        self.heads[key] = [frame, now, 2 * power, 0] if count == power else [
            frame, before, power, count
        ]  # fmt: skip
        return False

    def polls(self) -> str:
        """What the loop reads, for reports."""
        if not self.reads:
            return "it reads no memory"
        return "it reads " + ", ".join(f"{what} at {place}" for what, place in self.reads.items())


def turn(hands_over: bool) -> bool:
    """A turn of a `while` begins; whether its task is to let others run.

    Args:
        hands_over: whether it can; a loop that reads no memory does not.
    """
    spin = context.task.spin
    count()
    if spin.changes != context.changes:
        spin.begin()
    spin.turns += 1
    if spin.turns >= PATIENCE and not spin.endless:
        spin.endless = spin.repeats(sys._getframe(1))
    if spin.endless and not hands_over:
        raise context.error(EndlessLoop, f"{_ENDLESS}; {spin.polls()}.")
    spin.run += 1
    if spin.endless or spin.run >= PATIENCE:
        spin.run = 0
        return True
    return False


def count() -> None:
    """A turn of any loop at run time."""
    cta = context.cta
    cta.counts.turns += 1
    if cta.counts.steps + cta.counts.turns > cta.run_of.last_step:
        raise over(cta, context.where())


def over(cta, where) -> StepLimit:
    """The report of a run that has taken too many steps."""
    steps, spin = cta.run_of.step_limit, context.task.spin
    text = f"{steps} steps of tasks and turns of loops and no end"
    if spin.turns >= PATIENCE and spin.changes == context.changes:
        text += f"; the last {spin.turns} turns changed nothing, and {spin.polls()}"
    return StepLimit(text + ".", context.task.name, where)


_ENDLESS = "a loop goes round without end: its variables are the same at every turn"


def report(spinning: list, waiting: list[str], where) -> EndlessLoop:
    """Of tasks that all spin, while the others wait (their descriptions)."""
    task = spinning[0]
    text = f"{_ENDLESS}; {task.spin.polls()}, which nobody changes"
    others = [f"{other.name} spins too: {other.spin.polls()}" for other in spinning[1:]]
    return EndlessLoop("; ".join([text, *others, *waiting]) + ".", task.name, where)


def _same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is Value:
        return (
            a.dtype == b.dtype
            and a.base is b.base
            and np.array_equal(a.data, b.data, equal_nan=True)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(x, b[key]) for key, x in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool | int | float | str) and a == b

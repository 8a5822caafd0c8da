"""The task that runs now, and where in the kernel's source it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem.attention.simulator.errors import SimulationError
    from gem.attention.simulator.scheduler import Cta, Task

# Of the one CTA that runs at a time, and of its task that runs at a time.
cta: Cta | None = None
task: Task | None = None

# How often anything has changed that a kernel can read: memory, barriers, what is under way.
changes = 0

# A global that code compiled by the front end has.
MARK = "_sim_kernel"


def changed() -> None:
    """Notes a change; loops that go round without one are endless (`spins`)."""
    global changes
    changes += 1


def read(what: object, *place: object) -> None:
    """Notes what the running task reads, should it be in a loop that seems endless."""
    if task is not None and task.spin.reads is not None:
        task.spin.note(what, place)


def where() -> tuple[tuple[str, int], ...]:
    """(file, line) of the kernel code that runs, innermost first."""
    places = []
    frame = sys._getframe(1)
    while frame is not None:
        if MARK in frame.f_globals:
            places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


def error(kind: type[SimulationError], what: str) -> SimulationError:
    """An exception of this kind that names task and place."""
    return kind(what, task.name if task is not None else "", where())


def short(place: tuple[tuple[str, int], ...]) -> str:
    """`file:line` of the innermost place, without folders."""
    if not place:
        return "an unknown line"
    file, line = place[0]
    return f"{file.rpartition('/')[2]}:{line}"

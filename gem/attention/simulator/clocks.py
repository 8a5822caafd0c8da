"""Vector clocks: what a task knows to have happened.

Every agent of a CTA counts its own accesses: a task, its queue of matrix products, its queue of
asynchronous stores, and each mbarrier (for the copies that complete on it, by phases). A task knows
of an agent all that happened up to a count. Barriers hand that knowledge on. Two accesses are
ordered if the later one's task knew of the earlier one; this does not depend on the order in which
the scheduler happened to run them (Lamport 1978; Flanagan and Freund, FastTrack, 2009).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gem.attention.simulator import context

AGENTS = 1024


def nothing() -> np.ndarray:
    """The knowledge of somebody who knows nothing, `[AGENTS]`."""
    return np.zeros(AGENTS, np.int32)


@dataclasses.dataclass(slots=True)
class Access:
    """A read or write of shared memory.

    Attributes:
        agent, clock: its place in the vector clocks; clock is None while it is under way.
        task: the task that made or issued it.
        where: in the kernel's source.
        what: "load", "store", "copy to shared memory", ...
        asynchronous: whether the asynchronous proxy makes it.
    """

    agent: int
    clock: int | None
    task: str
    where: tuple[tuple[str, int], ...]
    what: str
    asynchronous: bool

    def known(self, clocks: np.ndarray) -> bool:
        return self.clock is not None and clocks[self.agent] >= self.clock

    def __str__(self) -> str:
        by = f" by task {self.task}" if self.task else ""
        return f"the {self.what} at {context.short(self.where)}{by}"

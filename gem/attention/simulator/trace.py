"""A trace of a run for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path

from gem.attention.simulator import context


class Trace:
    """What tasks, barriers and asynchronous operations did, in the order in which they did it.

    A process of the trace is a CTA of a run; a thread is a task, its operations of one kind, or a
    barrier, whose phases it shows. Microseconds stand for what the scheduler and the tasks did, one
    after another; they are no times.
    """

    def __init__(self):
        self.events: list[dict] = []
        self._known: dict[tuple, int] = {}
        self._phases: dict[tuple, int] = {}

    def slice(self, cta, task, start: int) -> None:
        """A task ran from start to now, and waits for something or not."""
        arguments = {}
        if task.blocked is not None and task.coroutine is not None:
            what = task.blocked[0]
            number = getattr(what, "number", None)
            arguments["waits for"] = getattr(what, "name", "its tasks")
            if number is not None:
                arguments["waits for"] = f"named barrier {number}"
        self._add(cta, task.name, "runs", start, max(cta.clock - start, 0.5), arguments)

    def barrier(self, cta, barrier) -> None:
        """A phase of a barrier ended."""
        key = id(cta), barrier.name
        start = self._phases.get(key, 0)
        self._phases[key] = cta.clock
        name = f"phase {barrier.phase - 1}"
        self._add(cta, f"barrier {barrier.name}", name, start, cta.clock - start, {})

    def operation(self, cta, operation) -> None:
        """An operation took effect."""
        lane = f"{operation.task.name}: {operation.name}"
        place = context.short(operation.where)
        length = max(operation.ended - operation.issued, 0.5)
        self._add(cta, lane, str(operation), operation.issued, length, {"issued at": place})

    def _add(self, cta, lane: str, name: str, start: float, length: float, arguments: dict) -> None:
        process = self._id("process_name", 0, f"program {cta.program} seed {cta.policy.seed}")
        thread = self._id("thread_name", process, lane)
        self.events.append(
            {
                "name": name, "ph": "X", "ts": start, "dur": length, "pid": process, "tid": thread,
                "args": arguments,
            }
        )  # fmt: skip

    def _id(self, kind: str, process: int, name: str) -> int:
        key = kind, process, name
        if key not in self._known:
            self._known[key] = number = len(self._known) + 1
            ids = {"pid": process or number, "tid": number}
            self.events.append({"name": kind, "ph": "M", **ids, "args": {"name": name}})
        return self._known[key]

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON."""
        Path(path).write_text(json.dumps({"traceEvents": self.events}))

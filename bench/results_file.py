"""The JSON file of a benchmark, written after every row and resumable.

Rows that were measured on one boot of a machine (one boot, one GPU) can be compared; a row of
another boot is measured again. The file is `complete` when every row of the shapes file is there in
both passes, from one boot, with the same contenders.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.shapes import Row


class ResultsFile:
    """Results in memory and on disk.

    Attributes:
        path: the file.
        data: what it holds (`machine`, `command`, `date`, `ceilings`, `complete`, `rows`,
            `faults`).
        boot: what identifies this machine since it was started.
    """

    def __init__(self, path: Path | str, boot: str, shapes: Sequence[Row]) -> None:
        self.path, self.boot, self.shapes = Path(path), boot, shapes
        self.data = read(self.path) if self.path.exists() else {}
        self.data.setdefault("rows", [])

    def is_of_another_boot(self) -> bool:
        """Whether its rows come from another machine, or from this one before it was restarted."""
        return bool(self.data["rows"]) and self.data.get("machine", {}).get("boot") != self.boot

    def describe(self) -> str:
        """The machine and the date of its rows."""
        machine = self.data.get("machine", {})
        return f"{machine.get('gpu') or 'a CPU'}, {self.data.get('date', 'no date')}"

    def ceilings(self, dtype: str) -> dict | None:
        """What this boot measured before, or None."""
        known = self.data.get("ceilings", {})
        if self.data.get("machine", {}).get("boot") == self.boot and known.get("dtype") == dtype:
            return known
        return None

    def start(self, machine: dict, command: str, date: str, ceilings: dict) -> None:
        if self.is_of_another_boot():
            self.data["rows"] = []
        self.data |= {"machine": machine, "command": command, "date": date, "ceilings": ceilings}

    def is_done(
        self, name: str, direction: str, dtype: str, deterministic: bool, contenders: Iterable[str]
    ) -> bool:
        """Whether this boot has measured all these contenders on the row."""
        return any(
            (r["name"], r["pass"], r["dtype"]) == (name, direction, dtype)
            and r["boot"] == self.boot
            and r.get("deterministic", False) == deterministic
            and set(contenders) <= set(r["contenders"])
            for r in self.data["rows"]
        )

    def put(self, entries: Iterable[dict]) -> None:
        """Adds entries, each in place of one of the same row and pass, and writes the file."""
        for entry in entries:
            entry = {**entry, "boot": self.boot}
            key = (entry["name"], entry["pass"])
            self.data["rows"] = [r for r in self.data["rows"] if (r["name"], r["pass"]) != key] + [
                entry
            ]
        order = {row.name: i for i, row in enumerate(self.shapes)}
        self.data["rows"].sort(
            key=lambda r: (order.get(r["name"], len(order)), r["pass"] != "forward")
        )
        self.write()

    def add_fault(self, name: str, direction: str, contender: str, reason: str) -> None:
        """Remembers that a contender ended a run, so that the next one leaves it out."""
        fault = {"row": name, "pass": direction, "contender": contender, "reason": reason}
        self.data.setdefault("faults", []).append({**fault, "boot": self.boot})
        self.write()

    def faults(self, name: str) -> dict[tuple[str, str], str]:
        return {
            (f["contender"], f["pass"]): f["reason"]
            for f in self.data.get("faults", [])
            if f["row"] == name and f["boot"] == self.boot
        }

    @property
    def complete(self) -> bool:
        rows = {(r["name"], r["pass"]): r for r in self.data["rows"]}
        wanted = [(row.name, p) for row in self.shapes for p in ("forward", "backward")]
        if not wanted or any(key not in rows for key in wanted):
            return False
        first = rows[wanted[0]]
        return all(
            rows[key][field] == first[field]
            for key in wanted
            for field in ("boot", "contenders", "dtype")
        )

    def write(self) -> None:
        """Replaces the file in one step: whoever reads it never sees half of it."""
        self.data["complete"] = self.complete
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(self.data), indent=1, allow_nan=False)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=self.path.name, suffix=".tmp", delete=False
        ) as file:
            file.write(text + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)


def read(path: Path | str) -> dict:
    """What a results file holds.

    Raises:
        ValueError: if it is no results file.
    """
    try:
        data = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ValueError(f"{path} has no list of rows")
    return data


def _finite(value):
    """The value with null for infinities and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

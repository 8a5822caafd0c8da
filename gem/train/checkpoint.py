"""Checkpoints: all that a run needs to go on, written whole or not at all.

    checkpoints/
      step-1200/
        meta.json      step, progress, config, ranks, versions
        tensors/       model and optimizers, by torch.distributed.checkpoint: any number of ranks
        rank-0.pt      what belongs to one rank: loader position, random states, open window
      last -> step-1200
      best -> step-800

A checkpoint is written under a hidden name and renamed when every rank is done, so that a
directory named `step-N` is complete.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gem.train.distributed import Ranks

META = "meta.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: `<run>/checkpoints`.
        ranks: all of them call `save`.
        keep_last: how many to keep beside the best.
    """

    def __init__(self, directory: Path, ranks: Ranks, keep_last: int) -> None:
        self.directory = directory
        self.ranks = ranks
        self.keep_last = keep_last

    def save(
        self, tensors: dict[str, Any], own: dict[str, Any], meta: dict[str, Any], best: bool
    ) -> Path:
        """Writes `step-<meta["step"]>` and points `last`, and `best` if asked, to it.

        Args:
            tensors: nested dict of tensors and sharded tensors.
            own: of this rank; plain values and tensors.
            meta: JSON values; `step` among them.
            best: whether it is the best so far.

        Raises:
            OSError: it cannot be written.
        """
        target = self.directory / f"step-{meta['step']}"
        if not self.ranks.broadcast(target.exists()):
            draft = self.directory / f".step-{meta['step']}.tmp"
            if self.ranks.first:
                self._clean()
                draft.mkdir(parents=True)
            self.ranks.barrier()
            self._write(draft / "tensors", tensors)
            torch.save(own, draft / f"rank-{self.ranks.rank}.pt")
            if self.ranks.first:
                (draft / META).write_text(json.dumps(meta, indent=1))
            self.ranks.barrier()
            if self.ranks.first:
                draft.rename(target)
        if self.ranks.first:
            self._point("last", target)
            if best:
                self._point("best", target)
            self._prune()
        self.ranks.barrier()
        return target

    def path(self, name: str) -> Path | None:
        """The checkpoint that `last` or `best` points to, if any."""
        pointer = self.directory / name
        return pointer.resolve() if (pointer / META).exists() else None

    def _write(self, path: Path, tensors: dict[str, Any]) -> None:
        try:
            with _quiet():
                dcp.save(tensors, checkpoint_id=path, process_group=self.ranks.host)
        except CheckpointException as error:
            raise OSError(f"cannot write the checkpoint {path}: {_cause(error)}") from error

    def _point(self, name: str, target: Path) -> None:
        draft = self.directory / f".{name}.tmp"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target.name)
        os.replace(draft, self.directory / name)

    def _prune(self) -> None:
        kept = {self.path("last"), self.path("best")}
        found = sorted(self.directory.glob("step-*"), key=lambda path: int(path.name[5:]))
        for path in found[: -self.keep_last]:
            if path.resolve() not in kept:
                # Renamed first: a half-removed directory must not look like a checkpoint.
                gone = path.with_name(f".{path.name}.tmp")
                path.rename(gone)
                shutil.rmtree(gone)

    def _clean(self) -> None:
        for path in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(path)


def find_checkpoint(path: str, prefer: str = "last") -> Path:
    """A checkpoint directory from itself, its `checkpoints` folder or its run directory.

    Args:
        path: what the user gave.
        prefer: `last` or `best`, where there is a choice.

    Raises:
        ValueError: there is none.
    """
    given = Path(path)
    if not given.exists():
        raise ValueError(f"no checkpoint at {path}: there is no such directory")
    for folder in (given, given / "checkpoints"):
        for candidate in (folder, folder / prefer, folder / "last"):
            if (candidate / META).exists():
                return candidate.resolve()
    raise ValueError(f"{path} is neither a checkpoint nor a run directory with one")


def run_directory(checkpoint: Path) -> Path:
    """The directory of the run that wrote a checkpoint."""
    return checkpoint.parent.parent


def read_meta(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / META).read_text())


def read_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    """What a rank saved for itself."""
    return torch.load(checkpoint / f"rank-{rank}.pt", weights_only=True)


def load_tensors(checkpoint: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Fills tensors in place; their nesting and names must be those saved.

    Raises:
        ValueError: the checkpoint has no such tensor, or one of another shape.
    """
    try:
        with _quiet():
            dcp.load(tensors, checkpoint_id=checkpoint / "tensors", process_group=ranks.host)
    except CheckpointException as error:
        raise ValueError(f"{checkpoint} does not hold this model: {_cause(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides that torchrec's ShardedTensor is to make way for DTensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank where something did; the exception itself is a trace."""
    (failure, _), *_ = error.failures.values()
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else type(failure).__name__


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that a run may use."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Sentences on where two nested configs differ, in the order of the keys."""
    if isinstance(saved, dict) and isinstance(now, dict):
        found = []
        for key in [*saved, *(key for key in now if key not in saved)]:
            inner = f"{path}.{key}" if path else key
            found += differences(saved.get(key, "(absent)"), now.get(key, "(absent)"), inner)
        return found
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}[{i}]")]
    return [] if saved == now else [f"{path} was {_brief(saved)} and is {_brief(now)}"]


def _brief(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."

"""Data sets that are made once: files in a directory named after all that determines them."""

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fingerprint(parameters: dict[str, Any]) -> str:
    """Twelve hexadecimal digits that change with any parameter."""
    text = json.dumps(parameters, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def prepared(
    cache: str, name: str, parameters: dict[str, Any], write: Callable[[Path], None]
) -> list[str]:
    """The parquet files that `write(directory)` makes, made now or found in the cache.

    The directory appears under its final name only when it is complete, so a run that is killed
    leaves nothing that a later one would trust. Processes that write at once do not disturb each
    other: the first to finish wins, and the others use its files.

    Args:
        cache: the cache's root; created if need be.
        name: the data set's name.
        parameters: everything that determines the files, JSON values.
        write: fills an empty directory with parquet files.
    """
    final = Path(cache).expanduser() / f"{name}-{fingerprint(parameters)}"
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            write(temporary)
            (temporary / "parameters.json").write_text(json.dumps(parameters, indent=2) + "\n")
            try:
                temporary.rename(final)
            except OSError:
                # Renaming onto a directory that is not empty fails: another process was first.
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return [str(file) for file in sorted(final.glob("*.parquet"))]


def parameters_of(dataset: Any, version: int) -> dict[str, Any]:
    """A data set's fields as JSON values, without the place of the cache."""
    values = dataclasses.asdict(dataset)
    del values["cache"]
    return {**values, "version": version}

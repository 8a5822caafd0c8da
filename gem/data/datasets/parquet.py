"""Parquet files that are there already."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class ParquetFiles:
    """A user's own files.

    Args:
        path: a folder (all its `*.parquet`, also in folders below), a file, a glob pattern, or a
            list of these. Files are read in the order of their names, a list in its own order.
    """

    path: Any

    def __post_init__(self) -> None:
        if self.path == "???":
            raise ValueError(
                "data.dataset.path is not set; give a folder, a file, a glob pattern, or a list"
            )
        single = isinstance(self.path, str | Path) or not isinstance(self.path, Sequence)
        paths = [self.path] if single else list(self.path)
        if not paths or not all(isinstance(path, str | Path) and str(path) for path in paths):
            raise ValueError(
                f"data.dataset.path={self.path!r}; it must be a folder, a file, a glob pattern, or "
                "a list of these"
            )
        self.path = [str(path) for path in paths]

    def prepare(self) -> list[str]:
        """The files. Raises FileNotFoundError for a path that leads to none."""
        files: list[str] = []
        for path in self.path:
            place = Path(path).expanduser()
            if place.is_dir():
                found = sorted(str(file) for file in place.rglob("*.parquet"))
            elif place.is_file():
                found = [str(place)]
            else:
                found = sorted(glob.glob(str(place), recursive=True))
            if not found:
                raise FileNotFoundError(f"data.dataset.path={path} leads to no parquet file")
            files += found
        return list(dict.fromkeys(files))

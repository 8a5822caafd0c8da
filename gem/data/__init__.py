"""From parquet files to batches of packed tensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem.data.batch import Batch, JaggedSequence
    from gem.data.errors import BadIdError, BadRowError
    from gem.data.jagged import keyed_jagged_tensor
    from gem.data.loader import Loader, make_loaders
    from gem.data.schema import Schema

__all__ = [
    "BadIdError",
    "BadRowError",
    "Batch",
    "JaggedSequence",
    "Loader",
    "Schema",
    "keyed_jagged_tensor",
    "make_loaders",
]

_HOMES = {
    "BadIdError": "errors",
    "BadRowError": "errors",
    "Batch": "batch",
    "JaggedSequence": "batch",
    "Loader": "loader",
    "Schema": "schema",
    "keyed_jagged_tensor": "jagged",
    "make_loaders": "loader",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: a schema is read without torch, which takes seconds to import.
    if name not in _HOMES:
        raise AttributeError(f"module 'gem.data' has no attribute '{name}'")
    return getattr(import_module(f"gem.data.{_HOMES[name]}"), name)

"""The names `tl` and `tlx` as a simulated kernel sees them."""

from __future__ import annotations

import types

import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.errors import UnsupportedOperation


class Namespace:
    """Operations by name; any other name is reported when it is used.

    Args:
        name: for reports.
        original: whose types and constants are taken over.
        operations: the simulator's versions.
    """

    def __init__(self, name: str, original: types.ModuleType, operations: dict[str, object]):
        self._name, self._original = name, original
        self.__dict__.update(operations)

    def __getattr__(self, key: str):
        if key.startswith("__"):
            raise AttributeError(key)
        found = getattr(self._original, key, None)
        plain = isinstance(found, tl.dtype | str | int | float)
        if plain or (isinstance(found, type) and key != "tensor"):
            self.__dict__[key] = found
            return found
        raise context.error(UnsupportedOperation, f"the simulator does not know {self._name}.{key}")


def operations(module: types.ModuleType) -> dict[str, object]:
    """The public functions of one of the simulator's modules."""
    return {
        key: x
        for key, x in vars(module).items()
        if isinstance(x, types.FunctionType)
        and x.__module__ == module.__name__
        and not key.startswith("_")
    }

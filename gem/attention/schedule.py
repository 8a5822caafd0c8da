"""Schedules: what a backend derives from the lengths of a batch, built once and kept.

A builder is a pure function of host lengths and plain arguments. Its result is cached on the
lengths tensor itself, so it lives as long as the layout does and is found again both from the
layout and from inside a custom op, which receives tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

_BUILDERS: dict[str, Callable[..., Any]] = {}
_CACHE = WeakTensorKeyDictionary()

Builder = TypeVar("Builder", bound=Callable[..., Any])


def register(kind: str) -> Callable[[Builder], Builder]:
    """Register `build(lengths, *args)` as the builder of the schedules of this kind.

    Raises:
        ValueError: if the kind is taken.
    """

    def decorate(build: Builder) -> Builder:
        if kind in _BUILDERS:
            raise ValueError(f"a schedule of kind {kind!r} is already registered")
        _BUILDERS[kind] = build
        return build

    return decorate


def schedule(kind: str, lengths: Tensor, *args: Any) -> Any:
    """The schedule of this kind for host lengths `[batch_size]`, built on the first call.

    Args:
        kind: the name of a registered builder.
        lengths: int64 `[batch_size]` on the CPU; not to be changed afterwards.
        *args: what else the builder takes. Hashable values, or another lengths tensor.

    Raises:
        ValueError: if nothing is registered as `kind`.
    """
    if kind not in _BUILDERS:
        raise ValueError(f"no schedule of kind {kind!r}; there are {sorted(_BUILDERS)}")
    cached = _CACHE.get(lengths)
    if cached is None:
        cached = _CACHE[lengths] = {}
    # Only weak references to tensors are kept, or a schedule would keep its own layout alive. An
    # id may be reused once its tensor is gone, so a hit must also point to the very same tensors.
    tensors = [a for a in args if isinstance(a, Tensor)]
    key = (kind, *(id(a) if isinstance(a, Tensor) else a for a in args))
    hit = cached.get(key)
    if hit is None or any(ref() is not a for ref, a in zip(hit[0], tensors, strict=True)):
        built = _BUILDERS[kind](lengths, *args)
        hit = cached[key] = ([TensorWeakRef(a) for a in tensors], built)
    return hit[1]

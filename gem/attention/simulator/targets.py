"""What the simulated processors have."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """Limits of one kind of GPU, per CTA where nothing else is said.

    Attributes:
        name: as in `simulate(target=...)`.
        capability: compute capability, major * 10 + minor.
        shared_bytes: shared memory that a CTA may use.
        registers: of a multiprocessor.
        threads: of a CTA.
        named_barriers: ids 0 to this minus 1.
        register_operand: whether a product's left operand may be in registers.
        tensor_columns: of tensor memory, 128 lanes of 32 bits each; 0 where there is none.
    """

    name: str
    capability: int
    shared_bytes: int = 227 * 1024
    registers: int = 64 * 1024
    threads: int = 1024
    named_barriers: int = 16
    register_operand: bool = True
    tensor_columns: int = 0


TARGETS = {
    "sm_90": Target("sm_90", 90),
    "sm_100": Target("sm_100", 100, register_operand=False, tensor_columns=512),
}


def target(name: str) -> Target:
    """The target of this name; ValueError where there is none."""
    if name not in TARGETS:
        raise ValueError(f"target is {name!r}; the simulator knows {', '.join(TARGETS)}")
    return TARGETS[name]

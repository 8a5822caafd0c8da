"""Left operands of Hopper's products in registers, and when their registers may be written again.

A product reads them until it has been waited for. Triton's values are immutable, but a loop writes
the registers of a variable anew at every turn: a left operand that is made while the same line's
product of the turn before still reads its own comes to lie in the same registers, or is copied
there too early (triton-lang/triton issue 9433). It has to be made after the wait, or be carried in
float32 and converted right before the product.

Noted is where tensors are made by `to`, by `local_load` and, in pairs of 16 bits, by assembly. It
stays with what lies in the same registers: halves of pairs, the same bits as another type, another
shape. Of others it is not known.
"""

from __future__ import annotations

import sys

from gem.attention.simulator import context
from gem.attention.simulator.errors import OverwrittenOperand


def noted(x, pairs: bool = False):
    """x, a tensor of at most 16 bits a number, with what its task has issued and waited for.

    Args:
        pairs: it has two such numbers in each of its own.
    """
    task = context.task
    if task is not None and (pairs or x.dtype.primitive_bitwidth <= 16) and task.lefts:
        line = context.where()[0][1] if pairs else sys._getframe(2).f_lineno
        x.origin = task.products.issued, task.products.waited, line
    return x


def kept(x, result):
    """result, which lies in the registers of x, or in a part of them."""
    if hasattr(x, "origin") and result is not NotImplemented:
        result.origin = x.origin
    return result


def check(task, x, place, number: int) -> None:
    """Reports a left operand that was made too early; notes the product that reads it.

    Args:
        place: of the product in the source.
        number: of the product in its task's queue.
    """
    key = place, tuple(task.unrolled)
    before, origin = task.lefts.get(key), getattr(x, "origin", None)
    task.lefts[key] = number
    if before is None or origin is None:
        return
    issued, waited, line = origin
    if waited < before <= issued:
        raise context.error(
            OverwrittenOperand,
            f"the left operand of the product, in registers, was made (at line {line}) while the"
            " product that this line issued at the turn before could still read its own: a loop"
            " gives both the same registers. Make it after the wait for that product, or carry it"
            " in float32.",
        )

"""Inline assembly: the waits for TMA copies to global memory, which TLX has only in part.

`tlx.async_descriptor_store_wait` is `cp.async.bulk.wait_group.read`: shared memory has been read.
Without `.read` it is the full wait: what was read has been written too. Each copy is a group.
"""

from __future__ import annotations

import re

import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.values import Value

# The move gives the call the result that it has to have.
_WAIT = re.compile(
    r"\s*cp\.async\.bulk\.wait_group(\.read)?\s+(\d+)\s*;\s*mov\.[bsu]32\s+\$0\s*,\s*0\s*;\s*"
)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """A wait for all but the last so many copies of the task; any other assembly is reported."""
    found = _WAIT.fullmatch(asm)
    if found is None or constraints != "=r" or args or dtype not in (tl.int32, tl.uint32):
        raise context.error(
            UnsupportedOperation, f"the simulator does not know the assembly {asm!r} of these types"
        )
    if is_pure:
        raise context.error(
            UnsupportedOperation, f"the compiler may leave out {asm!r}, which is said to be pure"
        )
    task, pendings = context.task, int(found[2])
    task.stores.wait(task, pendings)
    if not found[1]:
        task.cta.finish_writes(task, task.stores.issued - pendings)
    if task.cta.policy.switch():
        yield
    return Value(0, dtype)

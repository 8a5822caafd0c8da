"""Inline assembly: the waits for TMA copies to global memory, which TLX has only in part, and the
conversion of pairs of float32 numbers to 16 bits each, which lie in one register.

`tlx.async_descriptor_store_wait` is `cp.async.bulk.wait_group.read`: shared memory has been read.
Without `.read` it is the full wait: what was read has been written too. Each copy is a group.
"""

from __future__ import annotations

import re

import numpy as np
import triton.language as tl

from gem.attention.simulator import context, operands
from gem.attention.simulator.dtypes import held, rounded, to_bits
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.values import Value

# The move gives the call the result that it has to have.
_WAIT = re.compile(
    r"\s*cp\.async\.bulk\.wait_group(\.read)?\s+(\d+)\s*;\s*mov\.[bsu]32\s+\$0\s*,\s*0\s*;\s*"
)
_PACK = re.compile(r"\s*cvt\.rn\.(bf|f)16x2\.f32\s+\$0\s*,\s*\$2\s*,\s*\$1\s*;\s*")


def _packed(low, high, short, dtype):
    """32-bit numbers of the bits of two, the second in the upper half."""
    low, high = (to_bits(rounded(x.data, short), short).view(np.uint16) for x in (low, high))
    bits = low.astype(np.uint32) | high.astype(np.uint32) << 16
    return operands.noted(Value(bits.view(held(dtype)), dtype), pairs=True)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """A wait for all but the last so many copies of the task, or pairs converted to 16 bits.

    Any other assembly is reported.
    """
    words = dtype in (tl.int32, tl.uint32)
    found = _PACK.fullmatch(asm)
    floats = len(args) == 2 and all(x.shape and x.dtype == tl.float32 for x in args)
    if found and floats and words and (constraints, pack) == ("=r,f,f", 1):
        return _packed(*args, tl.bfloat16 if found[1] == "bf" else tl.float16, dtype)
    found = _WAIT.fullmatch(asm)
    if found is None or constraints != "=r" or args or not words:
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

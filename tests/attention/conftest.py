import os

import pytest

from gem.attention.backends import torch_


@pytest.fixture(autouse=True)
def _poison(nan_poison):
    """Unwritten memory is NaN in every test of attention, scratch memory included."""
    for memory in torch_._workspace.kept.values():
        memory.fill_(float("nan"))


def _mend_interpreter():
    """Makes `tl.dot` and bfloat16 work in Triton's interpreter.

    In fbtriton 3.7.4 its `create_dot` does not take the arguments that `tl.dot` hands it. There and
    in stock Triton it multiplies the bits of bfloat16, which NumPy lacks, as if they were integers,
    and casts float32 to bfloat16 by truncation, where a GPU rounds to nearest.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast = builder.cast_impl

    def numbers(x):
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data

    def create_dot(self, a, b, d, *options):
        return handle(
            np.matmul(numbers(a), numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar
        )

    def cast_impl(self, x, to):
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.int16)
            return handle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return cast(self, x, to)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend_interpreter()

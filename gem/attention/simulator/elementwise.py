"""Functions of single numbers over tensors: `tl.map_elementwise` and the packed float32 of PTX."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gem.attention.simulator import context
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.values import Value, made, value


def mapped(function, *args):
    """`map_elementwise` of a Python function without hand-overs.

    It is called once with the whole tensors, or, if it decides on them, for every element.
    """
    args = [value(x) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in args))
    whole = [Value(np.broadcast_to(x.data, shape), x.dtype, x.base) for x in args]
    try:
        return function(*whole)
    except UnsupportedOperation as e:
        if "a condition that is a tensor" not in e.what:
            raise
    rows = zip(*(x.data.ravel() for x in whole), strict=True)
    results = [
        function(*(made(n, x.dtype) for n, x in zip(row, whole, strict=True))) for row in rows
    ]
    if isinstance(results[0], tuple):
        return tuple(_stacked(column, shape) for column in zip(*results, strict=True))
    return _stacked(results, shape)


def _stacked(results, shape) -> Value:
    results = [value(x) for x in results]
    kinds = {x.dtype.name for x in results}
    if len(kinds) != 1:
        raise context.error(
            UnsupportedOperation, f"map_elementwise of a function that returns {sorted(kinds)}"
        )
    data = np.array([x.data for x in results]).reshape(shape)
    return Value(data, results[0].dtype)


def _fma(a, b, c):
    """`fma.rn.f32x2`, rounded twice."""
    return a * b + c


def _amax_to_e8m0(amax, reciprocal):
    """The biased exponent of amax * reciprocal rounded up to a power of two, and its inverse."""
    scale = np.asarray((amax * reciprocal).data, np.float32)
    fraction, exponent = np.frexp(scale)
    exponent = np.clip(exponent - (fraction == 0.5) + 127, 0, 254) * (scale > 0)
    exponent = np.where(np.isnan(scale), 255, exponent).astype(np.uint32)
    inverse = ((np.uint32(254) - exponent) << np.uint32(23)).view(np.float32)
    return made(exponent, tl.uint32), made(inverse, tl.float32)


# By their names in triton.language.extra.cuda.inline_ptx_lib and tlx.mxfp8_utils: inline PTX.
# Of pairs of float32 each goes by itself.
PACKED = {
    "_fused_amax_to_e8m0": _amax_to_e8m0,
    "_cvt_e4m3x4_f32": lambda a: a.to(tl.float8e4nv),
    "_cvt_e5m2x4_f32": lambda a: a.to(tl.float8e5),
    "_mul_f32x2": lambda a, b: a * b,
    "_sub_f32x2": lambda a, b: a - b,
    "_fma_f32x2": _fma,
    "_reduce_fadd2": lambda a, b, c, d: (a + b, c + d),
}

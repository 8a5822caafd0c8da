"""The kernels as representative calls launch them, for `python -m bench.compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention import JaggedLayout
from gem.attention.backends import Call, tlx_, triton_
from gem.attention.backends.launching import recorded

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}


def compile_cases() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constexprs, options) of every kernel, in several calls each."""
    for dim in (64, 128):
        for queries in (64, 128, 192, 256):
            yield from _cases(f"broadcast_q{queries}_d{dim}", dim, queries)
        yield from _cases(f"self_d{dim}", dim)
        yield from _cases(f"whole_d{dim}", dim, lengths=[40] * 600)
        yield from _cases(f"deterministic_d{dim}", dim, deterministic=True)
        yield from _cases(f"causal_d{dim}", dim, right=0)
        yield from _cases(f"window_d{dim}", dim, left=256, right=256)
    yield from _cases("gqa_d128", 128, kv_heads=1)
    for queries in (64, 192, 256):
        yield from _cases(f"counter_q{queries}_d128", 128, queries, switch="counter")
    for queries in (64, 256):  # a sample long enough for all CTAs
        yield from _cases(f"parts_q{queries}_d128", 128, queries, lengths=[40_000])
    for dim in (64, 128):
        for queries in (64, 192, 256):
            short = {"lengths": [500] * 80} if queries == 192 else {}
            yield from _cases(f"lazy_q{queries}_d{dim}", dim, queries, switch="lazy", **short)


def _cases(
    name: str,
    dim: int,
    queries: int | None = None,
    kv_heads: int = 4,
    left: int | None = None,
    right: int | None = None,
    deterministic: bool = False,
    switch: str | None = None,
    lengths: Sequence[int] = (1024,) * 40,
) -> Iterator[tuple]:
    """The kernels of one call, or the TLX forward with a switch of its shape on."""
    heads, keys = 4, sum(lengths)
    layout = JaggedLayout.from_lengths(lengths)
    jagged = queries is None
    q = torch.empty(keys if jagged else queries, heads, dim, dtype=torch.bfloat16)
    kv = torch.empty(keys, kv_heads, dim, dtype=torch.bfloat16)
    call = Call(
        form="jagged" if jagged else "broadcast",
        direction="forward",
        device=q.device,
        dtype=q.dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        left=left,
        right=right,
        deterministic=deterministic,
        q_offsets=layout.offsets if jagged else None,
        q_lengths=layout.lengths if jagged else None,
        k_offsets=layout.offsets,
        k_lengths=layout.lengths,
    )
    with recorded() as launches:
        if switch:
            shape = dataclasses.replace(tlx_.shape_of(call, q), **{switch: True})
            tlx_.launch(call, q, kv, kv, shape)
        else:
            out, lse = triton_.forward(call, q, kv, kv)
            triton_.backward(call, torch.empty_like(out), None, q, kv, kv, out, lse)
            tlx_.forward(call, q, kv, kv)
            tlx_.backward(call, torch.empty_like(out), None, q, kv, kv, out, lse)
    taken = set()
    for kernel, args, options in launches:
        # Those of TLX come second; it launches some of Triton's kernels too.
        full = f"{name}_{kernel.__name__}"
        full = f"{name}_tlx_{kernel.__name__}" if full in taken else full
        taken.add(full)
        yield full, kernel, *_signature(kernel, args, options)


def _signature(
    kernel: Any, args: tuple, options: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """(signature, constexprs, options) that Triton would make of a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constexprs, rest = {}, {}, {}
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    for name, value in given.items():
        if isinstance(value, Tensor):
            signature[name] = f"{_TYPES[value.dtype]}:16"
        elif isinstance(value, TensorDescriptor):
            box = ", ".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype][1:]}[{box}]>"
        elif name not in kernel.arg_names:
            rest[name] = value
        elif value is None or kernel.params[kernel.arg_names.index(name)].is_constexpr:
            constexprs[name] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            aligned = value % 16 == 0 and name not in plain
            signature[name] = "i32:16" if aligned else "i32"
    return signature, constexprs, rest

"""What operations compute: numbers, bounds of copies, the times of asynchronous operations."""

import json

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.backends.tlx_common import ragged
from gem.attention.simulator import Trace, errors, simulate, simulated
from gem.attention.simulator.global_memory import descriptor
from gem.attention.simulator.scheduler import Policy
from gem.attention.simulator.values import Value, value
from tests.attention.simulator import kernels


def test_integers_divide_and_wrap_as_in_c():
    a = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 5, 0], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 2, 3, 5, 9], dtype=torch.int32)
    out = torch.zeros(5 * 8, dtype=torch.int32)
    simulate(kernels.arithmetic_kernel, (1,), [a, b, out], N=8)
    out = out.view(5, 8)
    quotient = torch.div(a, b, rounding_mode="trunc")
    assert torch.equal(out[0], quotient)
    assert torch.equal(out[1], torch.fmod(a, b))
    assert torch.equal(out[2], a * b)  # torch wraps too
    assert torch.equal(out[3], torch.where(a < b, a ^ b, a & b))
    total = 0
    for q in quotient.tolist():
        total = (total + q) * 65537
    assert out[4, 0].item() == (total + 2**31) % 2**32 - 2**31


def test_mixed_types_follow_tritons_rules():
    i32, i64 = value(3), value(3, tl.int64)
    f16, bf16, f32 = (value(0.1, t) for t in (tl.float16, tl.bfloat16, tl.float32))
    for a, b, expected in (
        (i32, i64, tl.int64), (i32, 2, tl.int32), (i32, 0.5, tl.float32), (bf16, 0.5, tl.bfloat16),
        (bf16, i64, tl.bfloat16), (f16, bf16, tl.float32), (bf16, f32, tl.float32),
        (i32 == 3, i32, tl.int32), (value(True), 7, tl.int32),
    ):  # fmt: skip
        assert (a + b).dtype == expected and (b + a).dtype == expected
    assert (i32 / 2).dtype == tl.float32 and (bf16 / bf16).dtype == tl.float32
    assert float(bf16) == float(torch.tensor(0.1).bfloat16())
    assert float(bf16 + bf16 * 3.0) == float(torch.tensor(0.1).bfloat16() * 4)
    assert (value(-7) >> 1).data == -4 and (~value(5)).data == -6


def test_reductions_shapes_and_atomics():
    x = torch.randn(16, 32)
    out, counter = torch.full((5 * 16,), torch.nan), torch.zeros(19, dtype=torch.int32)
    simulate(kernels.reduce_kernel, (3,), [x, out, counter], ROWS=16, COLUMNS=32, seeds=[0])
    out = out.view(5, 16)
    torch.testing.assert_close(out[0, :-1], x.sum(1)[:-1])
    torch.testing.assert_close(out[1, :-1], x.amax(1)[:-1])
    assert out[:2, -1].isnan().all()
    torch.testing.assert_close(out[2], x.bfloat16().float().sum(1))
    torch.testing.assert_close(out[3], x.exp2().sum(1))
    # Even and odd numbers below 14, from three programs; each thread sees the sum before it.
    assert counter[:3].tolist() == [3 * 42, 3 * 49, 9]
    assert counter[3:].tolist() == [max(i - 3, 0) for i in range(16)]
    sums = [2 * (42 if i % 2 == 0 else 49) + sum(range(i % 2, i, 2)) for i in range(14)]
    assert out[4].tolist() == [*sums, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("reduce", ["", "add", "max"])
def test_copies_end_at_the_bounds(dtype, reduce):
    rows, columns = 40, 48
    for row, column in ((0, 0), (30, 24), (-8, 0), (8, -16), (39, 47), (40, 0), (-16, 0), (16, 16)):
        x = torch.randint(-9, 9, (rows, columns)).to(dtype)
        # What surrounds the tensors is neither read nor written.
        outer = torch.randint(-9, 9, (rows + 4, columns + 8)).to(dtype)
        out, before = outer[2:-2, :columns], outer.clone()
        simulate(
            kernels.copy_kernel,
            (1,),
            [TensorDescriptor.from_tensor(t, [16, 32]) for t in (x, out)] + [row, column],
            REDUCE=reduce,
        )
        box = slice(max(row, 0), max(row + 16, 0)), slice(max(column, 0), max(column + 32, 0))
        expected = before.clone()
        inside = expected[2:-2, :columns][box]
        for _ in range(2):  # once per seed
            changed = {"": x[box], "add": inside + x[box], "max": inside.maximum(x[box])}[reduce]
            inside.copy_(changed)
        assert torch.equal(outer, expected)


def test_ragged_descriptors_end_where_samples_end():
    x = torch.randn(30, 3, 16).bfloat16()
    for strided in (
        x,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x, x], 2)[..., :16],
    ):
        found = descriptor(ragged(strided, 8, 16), "x")
        for first, count, row, head in ((0, 30, 0, 0), (4, 11, 8, 2), (20, 10, 8, 1), (3, 0, 0, 0)):
            offsets = [2**30, first + count, head, 2**30 - count + row, 0]
            box = found.load(offsets).data.reshape(8, 16)
            there = max(min(8, count - row), 0)
            expected = torch.zeros(8, 16)
            expected[:there] = x[first + row : first + row + there, head].float()
            assert torch.equal(torch.from_numpy(box), expected)


def test_a_descriptor_that_leaves_its_tensor_is_reported():
    x = torch.randn(16, 32)
    longer = TensorDescriptor(x, [32, 32], [32, 1], [16, 32])
    out = TensorDescriptor.from_tensor(torch.empty(40, 32), [16, 32])
    simulate(kernels.copy_kernel, (1,), [longer, out, 0, 0], REDUCE="")
    with pytest.raises(errors.OutOfBounds, match="of desc_in, which has 2048"):
        simulate(kernels.copy_kernel, (1,), [longer, out, 8, 0], REDUCE="")


@pytest.mark.parametrize("fault", ["no wait", "no store"])
def test_a_copy_must_be_waited_for(fault):
    x, out = torch.randn(16, 32), torch.empty(16, 32)
    args = [TensorDescriptor.from_tensor(t, [16, 32]) for t in (x, out)] + [0, 0]
    kind = errors.AsyncConflict if fault == "no wait" else errors.UnwaitedResult
    for seed in range(4):
        if fault == "no wait":
            with pytest.raises(kind, match="may still be writing"):
                simulate(kernels.copy_kernel, (1,), args, REDUCE="", FAULT=fault, seeds=[seed])
        else:  # waited for, though not used
            simulate(kernels.copy_kernel, (1,), args, REDUCE="", FAULT=fault, seeds=[seed])


def traced(seed):
    a, b, c = torch.randn(64, 256).half(), torch.randn(256, 64).half(), torch.empty(64, 64)
    trace = Trace()
    args = [TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b, c)]
    simulate(kernels.product_kernel, (1,), [*args, 4], seeds=[seed], STAGES=2, trace=trace)
    return trace


def lasted(trace, name):
    return [e["dur"] for e in trace.events if e["ph"] == "X" and e["name"].startswith(name)]


def test_operations_take_effect_late_at_once_or_in_between():
    late, early = traced(0), traced(1)
    for name in ("copy to", "store from", "product"):
        assert set(lasted(early, name)) <= {1, 2}  # 2 where a copy ends a barrier's phase
    assert min(lasted(late, "copy to")) > 2
    assert len({str(traced(seed).events) for seed in range(2, 8)}) == 6


def test_a_seed_decides_everything():
    for seed in (0, 1, 7):
        assert traced(seed).events == traced(seed).events


def test_policies_draw_their_readiness_from_the_seed():
    drawn = {(Policy(s).switching, Policy(s).finishing) for s in range(2, 40)}
    assert len(drawn) == 9
    assert not Policy(0).switch() and not Policy(1).switch()


def test_the_trace_is_json_of_tasks_and_operations(tmp_path):
    trace = traced(3)
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert "program (0, 0, 0) seed 3" in names and "default: copy" in names
    assert any(name.endswith(": product") for name in names)
    assert sum(e["name"] == "product" for e in events) == 4
    assert sum(e["name"].startswith("copy to a_tiles") for e in events) == 4
    assert any(e["args"].get("waits for", "").startswith("full[") for e in events)
    assert "barrier full[1]" in names
    assert sum(e["name"].startswith("phase ") for e in events) == 2 * 4


def test_launches_are_simulated_within_the_context():
    x, out = torch.randn(64), torch.zeros(64)
    with simulated(seed=1) as counts:
        kernels.outside_kernel[(1,)](x, out, LAST=0, KIND="masked")
    assert torch.equal(out, x) and counts.launches == 1 and counts.programs == 1
    assert kernels.outside_kernel.run.__module__.startswith("triton")


def test_values_outside_a_kernel_print_as_numbers():
    assert repr(value(3)) == "3" and repr(Value(torch.zeros(2, 3).numpy(), tl.float32)) == (
        "<fp32[2, 3]>"
    )


def test_only_tensors_of_the_cpu():
    with pytest.raises(ValueError, match="X is on meta; the simulator takes CPU tensors"):
        x = torch.empty(64, device="meta")
        simulate(kernels.outside_kernel, (1,), [x, x], LAST=0, KIND="load")
    with pytest.raises(ValueError, match="target is 'sm_80'; the simulator knows sm_90, sm_100"):
        x = torch.zeros(64)
        simulate(kernels.outside_kernel, (1,), [x, x], LAST=0, KIND="load", target="sm_80")

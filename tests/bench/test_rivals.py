"""Others' attention as backends, on the CPU by stand-ins for their kernels."""

import types

import pytest
import torch

from bench.rivals import RIVALS, fa4_expanded, kept, register
from bench.rivals.padded import Kernel, Padded
from gem.attention import JaggedLayout, backends, jagged_attention
from gem.attention.backends import torch_
from gem.attention.testing import (
    NAMES,
    assert_close_to_reference,
    call_of,
    random_problem,
    reference,
)
from tests.bench.problems import PROBLEMS

# Those of the model: as many heads for keys as for queries.
KINDS = {name: given for name, given in PROBLEMS.items() if "kv_heads" not in given[1]}
KINDS |= {
    "broadcast_with_empty": ((7, [5, 0, 30, 11]), {"heads": 4}),
    "few_queries": (([2] * 4, [5, 0, 70, 11]), {}),
    "causal_window": (([5, 0, 30, 70],), {"window": (4, 0)}),
}

LOOSE = {"atol": 1e-3, "rtol": 1e-4}


def cpu_forward(q, k, v, bias, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )


def cpu_backward(dout, q, k, v, bias, scale, out, lse):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
    )


def flash_fwd(q, k, v, *, return_lse, softmax_scale, window_size_left, window_size_right, **where):
    assert return_lse and q.shape[0] == int(where["cu_seqlens_q"][-1])
    for side in "qk":
        lengths = where[f"cu_seqlens_{side}"].diff()
        assert where[f"max_seqlen_{side}"] >= int(lengths.max())
        assert where[f"cu_seqlens_{side}"].dtype == torch.int32
    layouts = (JaggedLayout.from_offsets(where[f"cu_seqlens_{side}"]) for side in "qk")
    out, lse = jagged_attention(
        q,
        k,
        v,
        *layouts,
        scale=softmax_scale,
        window=(window_size_left, window_size_right),
        return_lse=True,
        backend="torch",
    )
    return out, lse.T.contiguous(), None, None, None


def flash_bwd(q, k, v, out, dout, lse, *, dlse, **options):
    assert out.shape == dout.shape == q.shape and lse.shape == (q.shape[1], q.shape[0])
    assert dlse is None or (dlse.shape == lse.shape and dlse.is_contiguous())
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, new_lse, *_ = flash_fwd(*inputs, return_lse=True, **options)
    torch.testing.assert_close((again, new_lse), (out, lse))
    given = [again] if dlse is None else [again, new_lse]
    return torch.autograd.grad(given, inputs, [dout] if dlse is None else [dout, dlse])


@pytest.fixture(params=["padded", "padded_expanded_bias", "fa4_expanded"])
def rival(request, monkeypatch):
    if request.param == "fa4_expanded":
        interface = types.SimpleNamespace(_flash_attn_fwd=flash_fwd, _flash_attn_bwd=flash_bwd)
        monkeypatch.setattr(fa4_expanded, "_interface", lambda: interface)
        return fa4_expanded
    expands = request.param == "padded_expanded_bias"
    return Padded(Kernel("cpu", cpu_forward, cpu_backward, expands))


def make(name, dtype):
    lengths, options = KINDS[name]
    return random_problem(*lengths, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_results_obey_the_rule(name, dtype, rival):
    problem = make(name, dtype)
    call, inputs = call_of(problem), (problem.q, problem.k, problem.v)
    if rival is not fa4_expanded:
        assert rival.unsupported(call) is None
    out, lse = rival.forward(call, *inputs)
    grads = rival.backward(call, problem.dout, None, *inputs, out, lse)
    assert not kept._KEPT
    results = dict(zip(NAMES, (out, lse, *grads), strict=True))
    if dtype == torch.bfloat16:  # PyTorch's CPU kernel has an exponential of few digits there
        torch.testing.assert_close(results.pop("lse"), reference(problem)["lse"].float(), **LOOSE)
    assert_close_to_reference(results, problem)


@pytest.mark.parametrize("name", ["broadcast_with_empty", "few_queries", "equal"])
def test_the_gradient_of_the_log_sum_exp_counts(name, rival):
    problem = make(name, torch.float32)
    call, inputs = call_of(problem), (problem.q, problem.k, problem.v)
    out, lse = rival.forward(call, *inputs)
    right = torch_.forward(call, *inputs)
    dlse = torch.randn_like(lse)
    found = rival.backward(call, problem.dout, dlse, *inputs, out, lse)
    expected = torch_.backward(call, problem.dout, dlse, *inputs, *right)
    without = torch_.backward(call, problem.dout, None, *inputs, *right)
    for grad, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, truth, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(expected[0], without[0], atol=1e-3)


def test_registered_names_are_taken_and_have_reasons_on_a_cpu(monkeypatch):
    monkeypatch.setattr(backends, "BY_NAME", dict(backends.BY_NAME))
    register()
    for name in RIVALS:
        assert name in backends.names()
        reason = backends.unsupported(name, call_of(make("equal", torch.bfloat16)))
        assert reason == "needs a cuda device" or reason == "needs a CUDA device"


def test_what_padding_cannot_serve_has_a_reason():
    rival = Padded(Kernel("cpu", cpu_forward, cpu_backward, True))
    grouped = random_problem([3, 4], heads=4, kv_heads=2)
    assert rival.unsupported(call_of(grouped)) == "has no grouped heads"
    crossed = random_problem([3, 4], [5, 6], window=(1, 0))
    assert "queries and keys of one length" in rival.unsupported(call_of(crossed))

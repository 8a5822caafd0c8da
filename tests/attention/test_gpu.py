"""What only an accelerator can show: no copies back to the host, and the same results there."""

import pytest
import torch

from gem.attention import (
    BroadcastAttention,
    JaggedAttention,
    JaggedLayout,
    backends,
    broadcast_attention,
    jagged_attention,
)
from gem.attention.testing import (
    Problem,
    assert_close_to_reference,
    attend,
    call_of,
    random_problem,
)

pytestmark = pytest.mark.gpu

LENGTHS = [12, 9, 300, 15, 0, 11, 700]


def skip_unsupported(backend, problem):
    reason = backends.unsupported(backend, call_of(problem))
    if reason is not None:
        pytest.skip(f"{backend} {reason}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "options"),
    [(LENGTHS, {}), (LENGTHS, {"causal": True}), (LENGTHS, {"window": (32, 8)}), (6, {})],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_against_the_reference(q_lengths, options, dtype, backend):
    problem = random_problem(
        q_lengths,
        LENGTHS,
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=dtype,
        device="cuda",
        spare=3,
        **options,
    )
    assert_close_to_reference(attend(problem, backend), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["torch", "triton"])
def test_a_step_copies_nothing_to_the_host(dtype):
    layout = JaggedLayout.from_lengths(LENGTHS, "cuda")
    made = {"device": "cuda", "dtype": dtype}
    x = torch.randn(layout.rows, 64, **made, requires_grad=True)
    local = JaggedAttention(64, 2, window=(32, 0)).to(**made)
    pool = BroadcastAttention(64, 2, 4).to(**made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        longer = layout.prepend(2)
        blocks = layout.split(64)
        pool(local(x, layout) + local(x, blocks), layout).sum().backward()
        assert longer.rows == layout.rows + 2 * len(LENGTHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(("backend", "heads", "dim"), [("triton", 4, 256), ("tlx", 8, 128)])
def test_addresses_beyond_32_bits(backend, heads, dim):
    """2.1e9 numbers and more in each of k, v and their gradients, the last sample at the end."""
    rows, tail = 2_200_000, 1000
    lengths = [rows - tail, tail]
    assert rows * heads * dim > 2**31
    layout = JaggedLayout.from_lengths(lengths, "cuda")
    k = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device="cuda").normal_()
    v = torch.empty_like(k).normal_()
    q = torch.randn(16, heads, dim, dtype=torch.bfloat16, device="cuda")
    dout = torch.zeros(2, *q.shape, dtype=torch.bfloat16, device="cuda")
    dout[1].normal_()
    own = JaggedLayout.from_lengths([tail], "cuda")
    alone = Problem(q, k[-tail:], v[-tail:], dout[1:], own)
    skip_unsupported(backend, alone)
    for form in ("broadcast", "jagged"):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        if form == "broadcast":
            out = broadcast_attention(*inputs, layout, backend=backend)
            grads = torch.autograd.grad(out, inputs, dout)
            out = out[1:]
        else:
            q_layout = JaggedLayout.from_lengths([0, 16], "cuda")
            out = jagged_attention(*inputs, q_layout, layout, backend=backend)
            grads = torch.autograd.grad(out, inputs, dout[1])
            out = out[None]
        results = {"out": out.detach(), "dq": grads[0], "dk": grads[1][-tail:]}
        assert_close_to_reference(results | {"dv": grads[2][-tail:]}, alone)
        assert not grads[1][:-tail].any() and not grads[2][:-tail].any()
        del grads, inputs, out


@pytest.mark.parametrize("backend", ["triton", "tlx"])
@pytest.mark.parametrize("queries", [64, 130, LENGTHS], ids=["64", "130", "self"])
def test_a_call_can_be_captured_in_a_graph(queries, backend):
    problem = random_problem(queries, LENGTHS, dim=64, dtype=torch.bfloat16, device="cuda")
    skip_unsupported(backend, problem)
    expected = attend(problem, backend, deterministic=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(problem, backend, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = attend(problem, backend, deterministic=True)
    for x in results.values():
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(results[name], x) for name, x in expected.items())

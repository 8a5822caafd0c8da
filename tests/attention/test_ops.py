"""Autograd and torch.compile see attention as two custom ops."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gem.attention import (
    BroadcastAttention,
    JaggedAttention,
    JaggedLayout,
    broadcast_attention,
    jagged_attention,
    ops,
    rotary_angles,
)
from gem.attention.testing import attend, random_problem

OPTIONS = [{}, {"causal": True}, {"window": (2, 1)}]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("keys", [[4, 0, 3, 2], None], ids=["cross", "self"])
def test_gradcheck_of_out_and_lse(backend, options, keys):
    q_layout = JaggedLayout.from_lengths([2, 0, 3, 5])
    k_layout = q_layout if keys is None else JaggedLayout.from_lengths(keys)

    def run(q, k, v):
        out, lse = jagged_attention(
            q, k, v, q_layout, k_layout, return_lse=True, backend=backend, **options
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    inputs = double(10, 4, 3), double(k_layout.rows, 2, 3), double(k_layout.rows, 2, 3)
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradcheck_of_shared_queries(backend):
    layout = JaggedLayout.from_lengths([2, 0, 3])

    def run(q, k, v):
        out, lse = broadcast_attention(q, k, v, layout, return_lse=True, backend=backend)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    inputs = double(4, 2, 3), double(5, 2, 3), double(5, 2, 3)
    assert torch.autograd.gradcheck(run, inputs)
    out, _ = run(*inputs)
    dq = torch.autograd.grad(out.sum(), inputs[0])[0]
    assert dq.shape == inputs[0].shape


def test_a_gradient_of_a_wrong_shape_is_caught(monkeypatch):
    """Autograd would sum a dq of [batch, ...] over the batch in silence."""
    from gem.attention.backends import torch_

    def batched(call, dout, dlse, q, k, v, out, lse):
        return torch.zeros(3, *q.shape), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(torch_, "backward", batched)
    problem = random_problem(4, [2, 0, 3])
    out = broadcast_attention(problem.q.requires_grad_(), problem.k, problem.v, problem.k_layout)
    with pytest.raises(AssertionError, match="dq has shape"):
        out.sum().backward()


def test_only_the_lse_may_be_used():
    problem = random_problem([3, 4], dtype=torch.float64)
    q = problem.q.requires_grad_()
    _, lse = jagged_attention(
        q, problem.k, problem.v, problem.q_layout, problem.k_layout, return_lse=True
    )
    lse.sum().backward()
    assert q.grad.abs().sum() > 0


def test_second_derivatives_are_refused():
    problem = random_problem([3, 4])
    q, layout = problem.q.requires_grad_(), problem.q_layout
    out = jagged_attention(q, problem.k, problem.v, layout, layout)
    grad = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_training_after_inference_in_a_fresh_thread():
    """What the backend keeps between calls must not be bound to inference mode."""
    problem = random_problem([40, 3], window=(2, 0))

    def both():
        with torch.inference_mode():
            alone = jagged_attention(
                problem.q, problem.k, problem.v, problem.q_layout, problem.k_layout, window=(2, 0)
            )
        results = attend(problem)
        assert torch.equal(alone, results["out"])
        return results

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(both).result()["dq"].isfinite().all()


def test_modules_run_on_the_meta_device():
    layout = JaggedLayout.from_lengths([3, 4]).to("meta")
    with torch.device("meta"):
        model = BroadcastAttention(16, 2, 3), JaggedAttention(16, 2, window=(1, 0))
        x = torch.empty(7, 16)
    assert model[0](model[1](x, layout), layout).shape == (2, 3, 16)


def op_arguments(q_lengths, k_lengths, dtype=torch.float32):
    problem = random_problem(q_lengths, k_lengths, heads=4, kv_heads=2, dim=8, dtype=dtype)
    q_layout, k_layout = problem.q_layout, problem.k_layout
    jagged = q_layout is not None
    layouts = (
        q_layout.offsets if jagged else None,
        q_layout.lengths if jagged else None,
        k_layout.offsets,
        k_layout.lengths,
    )
    tensors = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    left, right = (2, 1) if jagged else (None, None)
    return tensors, layouts, (0.3, left, right, "auto", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"), [([2, 0, 3], [4, 1, 0]), (3, [4, 1, 0])], ids=["jagged", "shared"]
)
def test_opcheck(q_lengths, k_lengths, dtype):
    tensors, layouts, options = op_arguments(q_lengths, k_lengths, dtype)
    torch.library.opcheck(ops.attention, (*tensors, *layouts, *options))
    tensors = [x.detach() for x in tensors]
    out, lse = ops.attention(*tensors, *layouts, *options)
    for dlse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), dlse, *tensors, out, lse, *layouts, *options)
        torch.library.opcheck(ops.attention_backward, arguments)


class Model(torch.nn.Module):
    """Self-attention on a prepended layout, cross-attention and pooling, as a model stacks them."""

    def __init__(self):
        super().__init__()
        self.self_attention = JaggedAttention(16, 2, window=(3, 0), qk_norm=True)
        self.cross = JaggedAttention(16, 4, num_kv_heads=2)
        self.pool = BroadcastAttention(16, 2, 3)

    def forward(self, x, layout, other, other_layout):
        angles = rotary_angles(torch.arange(x.shape[0]), 8)
        x = x + self.self_attention(x, layout, rotary=angles)
        x = x + self.cross(x, layout, other, other_layout)
        return self.pool(x, layout)


def batch(lengths):
    layout = JaggedLayout.from_lengths(lengths)
    other = JaggedLayout.from_lengths([n + 2 for n in lengths])
    return torch.randn(layout.rows, 16), layout, torch.randn(other.rows, 16), other


def run(model, inputs):
    x = inputs[0].clone().requires_grad_()
    out = model(x, *inputs[1:])
    grads = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    return [out.detach(), *grads]


def test_changing_lengths_compile_at_most_twice():
    torch._dynamo.reset()
    model = Model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    torch._dynamo.utils.counters.clear()
    for lengths in ([3, 4, 2], [5, 4, 0], [2, 0, 70], [3, 4, 2], [0, 2, 0], [9, 200, 31]):
        inputs = batch(lengths)
        for a, b in zip(run(compiled, inputs), run(model, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    compiled(*batch([5, 6, 7, 8]))
    compiled(*batch([1, 9]))
    assert counter.frame_count <= 3  # another number of samples is another shape


def test_the_functions_compile_with_few_shapes_too():
    """Totals 7, 9 and 12, a max_length given as a tensor, and an expanded query parameter."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    query = torch.nn.Parameter(torch.randn(4, 1, 8))

    def pool(k, v, layout):
        return broadcast_attention(query.expand(4, 2, 8), k, v, layout, return_lse=True)

    compiled = torch.compile(pool, fullgraph=True, backend=counter)
    for lengths in ([3, 4], [2, 7], [12, 0]):
        longest = torch.tensor(max(lengths) + 5)
        layout = JaggedLayout.from_lengths(lengths, max_length=longest)
        k, v = torch.randn(2, sum(lengths), 2, 8).unbind()
        for a, b in zip(compiled(k, v, layout), pool(k, v, layout), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2


def test_prepend_compiles():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attention = JaggedAttention(16, 2)

    def step(x, layout):
        longer = layout.prepend(2)
        extra = x.new_zeros(longer.rows - layout.rows, 16)
        return attention(torch.cat([x, extra]), longer)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lengths in ([3, 4], [5, 0], [1, 9]):
        layout = JaggedLayout.from_lengths(lengths)
        x = torch.randn(layout.rows, 16)
        torch.testing.assert_close(compiled(x, layout), step(x, layout))
    assert counter.frame_count <= 2


def test_fake_tensors_know_shapes_and_dtypes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype, lse_dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        with FakeTensorMode():
            q, k = torch.empty(7, 4, 8, dtype=dtype), torch.empty(9, 2, 8, dtype=dtype)
            offsets, lengths = torch.empty(4, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
            options = (1.0, None, None, "auto", False)
            out, lse = ops.attention(q, k, k, offsets, lengths, offsets, lengths, *options)
            assert out.shape == (7, 4, 8) and lse.shape == (7, 4)
            assert out.dtype == dtype and lse.dtype == lse_dtype
            out, lse = ops.attention(q, k, k, None, None, offsets, lengths, *options)
            assert out.shape == (3, 7, 4, 8) and lse.shape == (3, 7, 4)

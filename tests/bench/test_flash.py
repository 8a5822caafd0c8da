"""The FlashAttention routes with stand-ins of the same signatures, computed in plain PyTorch."""

import sys
import types

import pytest
import torch

from bench.peers.base import Unavailable
from bench.peers.flash import Fa3, Fa3Route, Fa4, Fa4Route, Fa4View, VarlenRoute
from gem.attention import JaggedLayout, jagged_attention
from gem.attention.testing import Judge, random_problem
from tests.bench.problems import PROBLEMS, problem_of, results_of


def attend(q, k, v, q_offsets, k_offsets, left, right, scale):
    """Packed attention of the stand-ins: out, and lse `[heads, rows]`."""
    assert q_offsets.dtype == k_offsets.dtype == torch.int32
    layouts = (JaggedLayout.from_offsets(x) for x in (q_offsets, k_offsets))
    window = None if left is None and right is None else (left, right)
    out, lse = jagged_attention(
        q, k, v, *layouts, window=window, scale=scale, return_lse=True, backend="torch"
    )
    return out, lse.T


def fa4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    return_lse=False,
):
    left, right = window_size
    assert type(max_seqlen_k) is int and not (causal and window_size != (None, None))
    assert max_seqlen_k >= int(cu_seqlens_k.diff().max()) and return_lse
    shape = q.shape
    if cu_seqlens_q is None:
        assert q.dim() == 4 and q.stride(0) == 0
        cu_seqlens_q = torch.arange(shape[0] + 1, dtype=torch.int32) * shape[1]
        q = q.flatten(0, 1)
    right = 0 if causal else right
    out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, softmax_scale)
    return out.view(shape), lse


@pytest.fixture
def fa4_module(monkeypatch):
    module = types.SimpleNamespace(flash_attn_varlen_func=fa4)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


def check(problem, route):
    for name, compared in Judge(problem).compare(results_of(route)).items():
        assert compared.ratio <= 1, (name, compared)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
def test_fa4(name, view, fa4_module):
    problem = problem_of(name)
    if view and problem.q_layout is not None:
        with pytest.raises(Unavailable, match="only where q is shared"):
            Fa4View().routes([problem])
        return
    check(problem, Fa4Route(problem, view))


# The operators' schemas as FlashAttention-3 registers them.
FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
    "Tensor? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0., bool deterministic=False, int sm_margin=0) -> Tensor"
)


def sides_of(options):
    causal, left, right = options
    assert not causal or (left, right) == (-1, -1)
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def fa3_fwd(q, k, v, *args):
    assert args[:4] == (None,) * 4 and args[6:9] == (None,) * 3
    assert args[11:20] == (None,) * 9
    assert args[24:] == (0, 0.0, True, None, 1, None, 0)
    q_offsets, k_offsets, max_q, max_k, scale = args[4], args[5], args[9], args[10], args[20]
    assert max_q >= int(q_offsets.diff().max()) and max_k >= int(k_offsets.diff().max())
    out, lse = attend(q, k, v, q_offsets, k_offsets, *sides_of(args[21:24]), scale)
    return out, lse.contiguous(), q.new_empty(0), q.new_empty(0)


def fa3_bwd(dout, q, k, v, out, lse, dq, dk, dv, q_offsets, k_offsets, *args):
    assert args[:2] == (None, None) and args[8:] == (0.0, False, 0)
    assert out.shape == q.shape == dout.shape and lse.shape == (q.shape[1], q.shape[0])
    scale, sides = args[4], sides_of(args[5:8])
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        again, _ = attend(*inputs, q_offsets, k_offsets, *sides, scale)
        grads = torch.autograd.grad(again, inputs, dout)
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad)
    return q.new_empty(0)


@pytest.fixture(scope="module")
def fa3_operators():
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        pytest.skip("FlashAttention-3 itself is loaded")
    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((FWD, fa3_fwd), (BWD, fa3_bwd)):
        library.define(schema)
        library.impl(schema.split("(")[0], with_defaults(schema, function), "CPU")
    yield
    library._destroy()


def with_defaults(schema, function):
    """Kernels of a library get trailing defaults left out; put them back."""
    defaults = [a.default_value for a in torch._C.parse_schema("x::" + schema).arguments]

    def call(*args):
        return function(*args, *defaults[len(args) :])

    return call


@pytest.mark.parametrize("name", PROBLEMS)
def test_fa3(name, fa3_operators):
    problem = problem_of(name)
    check(problem, Fa3Route(problem))


@pytest.mark.parametrize("name", PROBLEMS)
def test_varlen_attn(name, monkeypatch):
    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
        window_size=(-1, -1), enable_gqa=False,
    ):  # fmt: skip
        assert enable_gqa == (query.shape[1] != key.shape[1]) and isinstance(window_size, tuple)
        assert max_q >= int(cu_seq_q.diff().max()) and max_k >= int(cu_seq_k.diff().max())
        left, right = (None if side < 0 else side for side in window_size)
        return attend(query, key, value, cu_seq_q, cu_seq_k, left, right, scale)[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    problem = problem_of(name)
    check(problem, VarlenRoute(problem))


def test_a_version_without_windows_is_left_out(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    with pytest.raises(Unavailable, match="no window"):
        VarlenRoute(problem_of("window"))
    assert VarlenRoute(random_problem([4, 3], causal=True)).options == {"is_causal": True}


@pytest.mark.parametrize("contender", [Fa4(), Fa4View(), Fa3()], ids=lambda c: c.name)
def test_without_a_gpu_there_is_a_reason(contender):
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        contender.routes([problem_of("broadcast")])

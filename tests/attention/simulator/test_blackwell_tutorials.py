"""Blackwell tutorials of the fbtriton wheel run unchanged; they are imported from there."""

import importlib
import types

import pytest
import torch
import triton

from gem.attention.simulator import driver, errors, simulated

FOLDER = "triton.language.extra.tlx.tutorials"
SEEDS = range(4)


@pytest.fixture
def tutorial(monkeypatch):
    """Imports one by name: they ask for a GPU then, and for its multiprocessors at a launch."""
    monkeypatch.setattr(triton.runtime.driver, "_active", driver.StandIn("sm_100"))
    processors = types.SimpleNamespace(multi_processor_count=2, major=10, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: processors)
    return lambda name: importlib.import_module(f"{FOLDER}.{name}")


def attention(module, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 512, 128, generator=generator).half() for _ in range(3))
    with simulated("sm_100", seed, compiler_fences=True) as counts:
        out = module.attention(q, k, v, 0.1, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), scale=0.1, is_causal=options.get("causal", False)
    )
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-3)
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_flash_attention_forward(tutorial, seed):
    counts = attention(tutorial("blackwell_fa_ws"), seed)
    assert counts.programs == 4 and counts.products == 2 * 2 * 4 * 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "blackwell_fa_ws_persistent",
        "blackwell_fa_ws_pipelined",
        "blackwell_fa_ws_pipelined_persistent",
        "blackwell_fa_clc",
    ],
)
def test_further_forwards(tutorial, name, causal, seed):
    counts = attention(tutorial(name), seed, causal=causal)
    assert counts.products >= 2 * 2 * (3 if causal else 4) * 4


def product(function, seed, m=512, n=256, k=256, fences=True, atol=1e-2):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).half() for shape in ((m, k), (k, n)))
    with simulated("sm_100", seed, compiler_fences=fences) as counts:
        c = function(a, b)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-3, atol=atol)
    return counts


TILES = {
    "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8,
    "NUM_SMEM_BUFFERS": 3, "NUM_TMEM_BUFFERS": 2,
}  # fmt: skip
PLAIN = {
    **TILES, "NUM_MMA_GROUPS": 1, "EPILOGUE_SUBTILE": 2, "NUM_CTAS": 1, "SPLIT_K": 1,
    "INTERLEAVE_EPILOGUE": 0,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "two groups": {
        "BLOCK_SIZE_M": 256, "NUM_MMA_GROUPS": 2, "INTERLEAVE_EPILOGUE": 1,
        "USE_WARP_BARRIER": True,
    },
    "pairs": {"NUM_CTAS": 2, "ctas_per_cga": (2, 1, 1)},
    "pairs, two groups": {
        "BLOCK_SIZE_M": 256, "NUM_MMA_GROUPS": 2, "NUM_CTAS": 2, "ctas_per_cga": (2, 1, 1),
    },
    "split": {"SPLIT_K": 2},
    "small": {"BLOCK_SIZE_M": 64, "EPILOGUE_SUBTILE": 1},
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_warp_specialised_gemm(tutorial, variant, seed):
    module, config = tutorial("blackwell_gemm_ws"), {**PLAIN, **VARIANTS[variant]}
    atol = 4e-2 if variant == "split" else 1e-2  # it adds float16 parts
    product(lambda a, b: module.matmul(a, b, dict(config)), seed, atol=atol)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("warp_barrier", [False, True])
def test_launch_control_gemm(tutorial, warp_barrier, seed):
    module = tutorial("blackwell_gemm_clc")
    config = {**TILES, "EPILOGUE_SUBTILE": True, "USE_WARP_BARRIER": warp_barrier}
    counts = product(lambda a, b: module.matmul(a, b, dict(config)), seed, n=512, fences=False)
    assert counts.programs + counts.stolen == 16
    assert counts.programs == {0: 1, 1: 16}.get(seed, counts.programs)


@pytest.mark.parametrize("seed", range(8))
def test_gemm_of_pairs(tutorial, seed):
    counts = product(tutorial("blackwell_gemm_2cta").matmul, seed, fences=False)
    assert counts.programs == 8 and counts.products == 4 * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_pipelined_gemm_ends_without_a_wait(tutorial, seed):
    # Nor does the compiler wait at the end of a program.
    with pytest.raises(errors.UnwaitedResult, match="1 asynchronous store that it has not waited"):
        product(tutorial("blackwell_gemm_pipelined").matmul, seed)


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ctas", [1, 2])
def test_flash_attention_backward(tutorial, ctas, causal, seed, monkeypatch):
    """Pairs of CTAs add to dq by products with 64 rows each, read in all lanes at once."""
    module = tutorial("blackwell_fa_ws_pipelined_persistent")
    kernel = module._attn_bwd_ws
    configs = [config for config in kernel.configs if config.kwargs["NUM_CTAS"] == ctas]
    monkeypatch.setattr(kernel, "configs", [configs[seed % len(configs)]])
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, 1, 512, 128, generator=generator).half() for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with simulated("sm_100", seed, compiler_fences=True):
        module.attention(*inputs, 0.1, causal).backward(dout)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*exact, scale=0.1, is_causal=causal).backward(
        dout.double()
    )
    for x, y in zip(inputs, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() <= 1e-3 * y.grad.norm()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ctas", [2, 4])
def test_layer_norm_of_a_cluster(tutorial, ctas, seed, monkeypatch):
    module = tutorial("blackwell-multi-cta-layernorm_test")
    rows, columns = 3, 8192 * ctas
    kernel = module.kernel_layernorm_multi_cta
    config = next(c for c in kernel.configs if c.kwargs["num_reduction_ctas"] == ctas)
    monkeypatch.setattr(module, "_WS_NARROW_N_THRESHOLD", 0)
    pruned = module.prune_and_update_configs([config], {}, M=rows, N=columns)
    monkeypatch.setattr(kernel, "configs", pruned)
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(n, columns, generator=generator).half() for n in (rows, 1, 1))
    with simulated("sm_100", seed) as counts:
        out, mean, _ = module.multi_cta_layernorm(x, weight[0], bias[0])
    expected = torch.nn.functional.layer_norm(
        x.float(), (columns,), weight[0].float(), bias[0].float()
    )
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mean, x.float().mean(1), rtol=1e-4, atol=1e-5)
    assert counts.programs == rows * ctas

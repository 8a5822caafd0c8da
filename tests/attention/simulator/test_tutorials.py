"""Hopper tutorials of the fbtriton wheel run unchanged; they are imported from there."""

import importlib
import types

import pytest
import torch
import triton

from gem.attention.simulator import driver, simulated

FOLDER = "triton.language.extra.tlx.tutorials"
NAMES = [
    "hopper_fa_ws",
    "hopper_fa_ws_pipelined",
    "hopper_fa_ws_pipelined_pingpong",
    "hopper_fa_ws_pipelined_pingpong_persistent",
]


@pytest.fixture
def tutorial(request, monkeypatch):
    # They ask for a GPU at import and for its multiprocessors at a launch.
    monkeypatch.setattr(triton.runtime.driver, "_active", driver.StandIn("sm_90"))
    processors = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: processors)
    return importlib.import_module(f"{FOLDER}.{request.param}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:triton")
@pytest.mark.parametrize("tutorial", ["hopper_gemm_pipelined", "hopper_gemm_ws"], indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_matrix_products(tutorial, seed):
    a, b = torch.randn(200, 192).half(), torch.randn(192, 256).half()
    with simulated(seed=seed):
        out = tutorial.matmul(a, b)
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("tutorial", NAMES, indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_flash_attention_forward(tutorial, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = 1, 2, 384, 128
    q, k, v = (torch.randn(shape, generator=generator).half() for _ in range(3))
    kernel = next(x for x in vars(tutorial).values() if isinstance(x, triton.runtime.Autotuner))
    for config in kernel.configs:
        with simulated(seed=seed) as counts:
            out = tutorial.attention(q, k, v, 0.1, config=config.kwargs)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), scale=0.1
        )
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-3)
        assert counts.products >= 3 * 3 * 2 * 2

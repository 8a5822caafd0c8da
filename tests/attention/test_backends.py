"""Which backend serves a call, and what is said about it."""

import ast
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from gem.attention import JaggedLayout, backends, jagged_attention
from gem.attention.backends import torch_


def call(**changed):
    options = {
        "form": "jagged",
        "direction": "forward",
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
    }
    return backends.Call(**{**options, **changed})


@pytest.fixture
def fast(monkeypatch):
    """A backend that is faster than all others, but serves bfloat16 alone."""
    module = types.ModuleType("fast")
    module.calls = []

    def unsupported(call):
        return None if call.dtype == torch.bfloat16 else "needs bfloat16"

    def forward(call, q, k, v):
        module.calls.append(call)
        return torch_.forward(call, q, k, v)

    module.unsupported, module.forward, module.backward = unsupported, forward, torch_.backward
    monkeypatch.setitem(sys.modules, "fast", module)
    monkeypatch.setattr(backends, "AUTOMATIC", {"fast": "fast", **backends.AUTOMATIC})
    monkeypatch.setattr(backends, "BY_NAME", {"fast": "fast", **backends.BY_NAME})
    backends._log_once.cache_clear()
    yield module
    backends._load.cache_clear()


def attend(dtype, **options):
    layout = JaggedLayout.from_lengths([3, 2])
    q = torch.randn(5, 2, 8, dtype=dtype)
    return jagged_attention(q, q, q, layout, layout, **options)


def test_auto_takes_the_fastest_that_supports_the_call(fast):
    attend(torch.bfloat16)
    assert len(fast.calls) == 1
    seen = fast.calls[0]
    assert (seen.form, seen.direction, seen.dtype) == ("jagged", "forward", torch.bfloat16)
    assert seen.k_lengths.tolist() == [3, 2] and seen.k_offsets.tolist() == [0, 3, 5]
    attend(torch.float32)
    assert len(fast.calls) == 1


def test_a_fall_back_is_logged_once_with_its_reason(fast, caplog):
    with caplog.at_level(logging.INFO, logger="gem.attention.backends"):
        attend(torch.bfloat16)
        assert not caplog.messages
        for _ in range(3):
            attend(torch.float32)
    assert caplog.messages == ["attention forward: torch (fast: needs bfloat16)"]


def test_a_backend_named_by_hand_that_cannot_serve_raises(fast):
    with pytest.raises(ValueError, match="backend 'fast' cannot serve this call: needs bfloat16"):
        attend(torch.float32, backend="fast")
    attend(torch.bfloat16, backend="fast")
    assert len(fast.calls) == 1


def test_a_backend_that_cannot_be_imported_is_passed_over(monkeypatch):
    backends._load.cache_clear()
    monkeypatch.setattr(backends, "AUTOMATIC", {"gone": "no.such.module", **backends.AUTOMATIC})
    monkeypatch.setattr(backends, "BY_NAME", {"gone": "no.such.module", **backends.BY_NAME})
    assert backends.select("auto", call()) is torch_
    with pytest.raises(ValueError, match="'gone' cannot serve this call: cannot be imported"):
        backends.select("gone", call())
    backends._load.cache_clear()


def test_no_backend_at_all_raises_with_every_reason(fast, monkeypatch):
    monkeypatch.setattr(backends, "AUTOMATIC", {"fast": "fast"})
    with pytest.raises(ValueError, match="no attention backend can serve .*fast: needs bfloat16"):
        backends.select("auto", call())


def test_report_says_why_not(fast):
    assert backends.report(call()) == {"fast": "needs bfloat16", "torch": None}


def test_names_are_what_backend_takes():
    assert backends.names()[0] == "auto"
    assert {"torch", "reference"} <= set(backends.names())
    for name in backends.names()[1:]:
        assert attend(torch.float32, backend=name).shape == (5, 2, 8)


def test_attention_imports_torch_alone():
    """Somebody can lift `gem/attention` out: it needs torch (kernels: Triton) and itself."""
    folder = Path(backends.__file__).parents[1]
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("gem.attention"), path

"""Which backend serves a call, and what is said about it."""

import ast
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from gem.attention import JaggedLayout, backends, jagged_attention
from gem.attention.backends import torch_, triton_


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
    torch_alone = {"torch": backends.AUTOMATIC["torch"]}
    monkeypatch.setattr(backends, "AUTOMATIC", {"fast": "fast", **torch_alone})
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
    # On a CPU it is said quietly, since nothing there would be faster.
    with caplog.at_level(logging.DEBUG, logger="gem.attention.backends"):
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
    assert set(backends.names()) == {"auto", "tlx", "triton", "torch", "reference"}
    for name in ("auto", "torch", "reference"):
        assert attend(torch.float32, backend=name).shape == (5, 2, 8)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.bfloat16}, "needs a GPU"),
        ({"device": torch.device("meta")}, "does not know meta devices"),
        ({"device": torch.device("cuda")}, "needs float16 or bfloat16, not float32"),
        ({"device": torch.device("cuda"), "dtype": torch.bfloat16}, None),
    ],
    ids=str,
)
def test_what_triton_serves(changed, reason):
    assert backends.unsupported("triton", call(**changed)) == reason
    order = [name for name, why in backends.report(call(**changed)).items() if why is None]
    assert order[0] == ("torch" if reason else "triton")


@pytest.mark.parametrize("memory", [48, 99, 163, 227], ids=lambda kib: f"{kib}KiB")
@pytest.mark.parametrize("block_d", [16, 64, 128, 256])
def test_triton_tiles_fit_the_shared_memory_of_smaller_gpus(memory, block_d):
    for tiles, resident in (
        (triton_.forward_tiles(block_d, 2000, 2000), "queries"),
        (triton_.keys_tiles(block_d), "keys"),
        (triton_.queries_tiles(block_d, 2000), "queries"),
    ):
        fitted = tiles.fitted(resident, block_d, memory * 1024)
        assert fitted._bytes(resident, block_d) <= memory * 1024
        assert min(fitted.queries, fitted.keys) >= 16 and fitted.stages >= 1
        assert fitted == tiles or memory < 227


SCHEDULES = ("schedule.py", "dealing.py", "tables.py")


def test_attention_imports_torch_and_numpy_alone():
    """Somebody can lift `gem/attention` out: it needs torch, NumPy (kernels: Triton) and itself.

    NumPy is for schedules and the simulator.
    """
    folder = Path(backends.__file__).parents[1]
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in folder.rglob("*.py"):
        more = {"numpy"} if "simulator" in path.parts or path.name in SCHEDULES else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed | more or name.startswith("gem.attention"), path

"""Every error of the attention functions: its type, and what it names."""

import pytest
import torch

from gem.attention import JaggedLayout, broadcast_attention, jagged_attention

LAYOUT = JaggedLayout.from_lengths([2, 3])


def arguments(**changed):
    x = {name: torch.zeros(5, 4, 8) for name in "qkv"}
    return {**x, "q_layout": LAYOUT, "k_layout": LAYOUT, **changed}


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


SHARED = [
    ({"q": [1.0]}, ValueError, "q must be a tensor, but got list"),
    ({"k": zeros(5, 8)}, ValueError, r"k must have shape \[rows, heads, dim\], but has \[5, 8\]"),
    ({"v": zeros(5, 4, 8).to_sparse()}, ValueError, "v must be a dense tensor"),
    ({"k": zeros(5, 4, 8).half()}, TypeError, "one dtype, but have torch.float32, torch.float16"),
    ({"v": zeros(5, 4, 8).half()}, TypeError, "torch.float32, torch.float32 and torch.float16"),
    ({"q": zeros(5, 4, 8).bfloat16()}, TypeError, "one dtype, but have torch.bfloat16"),
    (
        {name: zeros(5, 4, 8, dtype=torch.int32) for name in "qkv"},
        ValueError,
        "float16, bfloat16, float32 or float64, but are torch.int32",
    ),
    ({"v": zeros(5, 4, 8, device="meta")}, ValueError, "one device, but are on cpu, cpu and meta"),
    ({"v": zeros(5, 2, 8)}, ValueError, r"same rows and heads.*\[5, 4, 8\] and \[5, 2, 8\]"),
    ({"v": zeros(4, 4, 8)}, ValueError, r"same rows and heads.*\[5, 4, 8\] and \[4, 4, 8\]"),
    ({"v": zeros(5, 4, 16)}, ValueError, "one head dim, but have 8, 8 and 16"),
    ({"q": zeros(5, 4, 16)}, ValueError, "one head dim, but have 16, 8 and 8"),
    (
        {name: zeros(5, 4, 264) for name in "qkv"},
        ValueError,
        "head dim must be 1 to 256, but is 264",
    ),
    ({name: zeros(5, 4, 0) for name in "qkv"}, ValueError, "head dim must be 1 to 256, but is 0"),
    (
        {name: zeros(5, 3, 8) for name in "kv"},
        ValueError,
        "multiple of those of k and v, but are 4 and 3",
    ),
    ({name: zeros(5, 0, 8) for name in "kv"}, ValueError, "but are 4 and 0"),
    ({"k_layout": [0, 2, 5]}, ValueError, "k_layout must be a JaggedLayout, but got list"),
    (
        {"k_layout": JaggedLayout.from_lengths([2, 2])},
        ValueError,
        "k_layout describes 4 rows, but k and v have 5",
    ),
    ({"k_layout": LAYOUT.to("meta")}, ValueError, "k_layout is on meta, but k and v are on cpu"),
    ({"scale": torch.nan}, ValueError, "scale must be None or a finite number, but got nan"),
    ({"scale": torch.tensor(1.0)}, ValueError, "scale must be None or a finite number"),
    ({"scale": True}, ValueError, "scale must be None or a finite number, but got True"),
    ({"backend": "cudnn"}, ValueError, r"backend must be one of \['auto', .*, but got 'cudnn'"),
    ({"backend": None}, ValueError, "backend must be one of"),
]

JAGGED = [
    ({"q": zeros(4, 4, 8)}, ValueError, "q_layout describes 5 rows, but q have 4"),
    ({"q_layout": None}, ValueError, "q_layout must be a JaggedLayout, but got NoneType"),
    (
        {"k_layout": JaggedLayout.from_lengths([2, 3, 0])},
        ValueError,
        "q_layout has 2 samples, but k_layout has 3",
    ),
    ({"window": 3}, ValueError, r"None or a pair \(left, right\), but got 3"),
    ({"window": (3,)}, ValueError, r"None or a pair \(left, right\), but got \(3,\)"),
    ({"window": (-3, 0)}, ValueError, r"ints of at least 0 or None .* got \(-3, 0\)"),
    ({"window": (3, -1)}, ValueError, r"ints of at least 0 or None .* got \(3, -1\)"),
    ({"window": (1.5, 0)}, ValueError, "ints of at least 0 or None"),
    ({"window": (True, 0)}, ValueError, "ints of at least 0 or None"),
    (
        {"causal": True, "window": (3, 2)},
        ValueError,
        r"right window of 0, but window is \(3, 2\)",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), SHARED + JAGGED)
def test_jagged_attention(changed, error, message):
    given = arguments(**changed)
    tensors = [given.pop(name) for name in ("q", "k", "v", "q_layout", "k_layout")]
    with pytest.raises(error, match=message):
        jagged_attention(*tensors, **given)


@pytest.mark.parametrize(("changed", "error", "message"), SHARED)
def test_broadcast_attention(changed, error, message):
    given = arguments(**changed)
    tensors = [given.pop(name) for name in ("q", "k", "v", "k_layout")]
    del given["q_layout"]
    with pytest.raises(error, match=message):
        broadcast_attention(*tensors, **given)


def test_the_unchanged_arguments_are_right():
    given = arguments()
    assert jagged_attention(**given).shape == (5, 4, 8)
    del given["q_layout"]
    assert broadcast_attention(**given).shape == (2, 5, 4, 8)


@pytest.mark.parametrize("window", [(3, None), (3, 0), (None, None), [3, 0]], ids=str)
def test_causal_goes_with_windows_that_it_agrees_with(window):
    given = arguments(**{name: torch.randn(5, 4, 8) for name in "qkv"})
    out = jagged_attention(**given, causal=True, window=window)
    assert torch.equal(out, jagged_attention(**given, window=(window[0], 0)))

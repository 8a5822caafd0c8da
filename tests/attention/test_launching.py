"""Compiled kernels are kept for launches that differ in nothing that Triton compiles in."""

import itertools

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.backends import launching
from gem.attention.backends.launching import kind

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def arguments():
    """Arguments of every kind that kernels take, and some more."""
    yield from (None, True, False, 0.0, 1.0, 16.0, float("inf"))
    for n in (0, 1, 2, 8, 15, 16, 17, 32, 2**31 - 16, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63):
        yield n
        yield -min(n, 2**63 - 1)
    memory = torch.zeros(4096, dtype=torch.uint8)
    for dtype in DTYPES:
        for first in (0, 8, 16, 24, 64):
            yield memory[first : first + 2048].view(dtype).view(32, -1)
    for dtype, rows in itertools.product(DTYPES[:3], (16, 64)):
        x = memory.view(dtype).view(32, -1)
        yield TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 32])


def triton_kind(x, specialized):
    """What Triton's own cache of compiled kernels knows of an argument."""
    backend = type(make_backend(GPUTarget("cuda", 90, 32)))
    return jit.native_specialize_impl(backend, x, False, specialized, specialized)


@pytest.mark.parametrize("specialized", [True, False])
def test_arguments_of_one_kind_share_a_compiled_kernel(specialized):
    by_kind = {}
    for x in arguments():
        by_kind.setdefault(kind(x), []).append(triton_kind(x, specialized))
    for found in by_kind.values():
        assert all(known == found[0] for known in found), found
    assert len(by_kind) > 20
    assert any(len(found) > 2 for found in by_kind.values())  # or nothing would be found again


class Kernel:
    """Notes its launches, by the kernel and by what it compiles."""

    arg_names = ("x", "count", "BLOCK", "WIDE")

    def __init__(self, interpreted=False):
        self.interpreted, self.launched, self.again = interpreted, [], []

    def fn(self):
        pass

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((grid, args, options))
            return None if self.interpreted else Compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.again.append((grid, args))


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})


def launch(kernel, grid, x, count, **options):
    options = {"WIDE": False, "BLOCK": 64, "num_warps": 4} | options
    launching._launch(x.device, kernel, grid, (x, count), options)


def test_a_kept_kernel_gets_its_constants_in_order():
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, (3,), x, 5)
    launch(kernel, (4, 2), x[32:], 7)
    assert len(kernel.launched) == 1
    grid, (again, count, *constants) = kernel.again[0]
    assert grid == (4, 2, 1)
    assert again.data_ptr() == x[32:].data_ptr()
    assert [count, *constants] == [7, 64, False]


@pytest.mark.parametrize(
    "other",
    [
        lambda kernel, x: launch(kernel, (3,), x[1:], 5),
        lambda kernel, x: launch(kernel, (3,), x.int(), 5),
        lambda kernel, x: launch(kernel, (3,), x, 1),
        lambda kernel, x: launch(kernel, (3,), x, 16),
        lambda kernel, x: launch(kernel, (3,), x, 2**31),
        lambda kernel, x: launch(kernel, (3,), x, None),
        lambda kernel, x: launch(kernel, (3,), x, 5, WIDE=True),
        lambda kernel, x: launch(kernel, (3,), x, 5, num_warps=8),
        lambda kernel, x: launch(kernel, (3,), x, 5, num_stages=2),
        lambda kernel, x: launch(kernel, (3,), x.to("meta"), 5),
    ],
    ids="offset dtype one sixteen wide none constant warps option device".split(),
)
def test_what_differs_is_compiled_anew(other):
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, (3,), x, 5)
    other(kernel, x)
    assert (len(kernel.launched), len(kernel.again)) == (2, 0)


def test_kernels_do_not_mix():
    kernels, x = (Kernel(), Kernel()), torch.zeros(64)
    for kernel in kernels:
        launch(kernel, (3,), x, 5)
    assert [len(kernel.launched) for kernel in kernels] == [1, 1]


def test_an_interpreted_kernel_is_not_kept():
    kernel, x = Kernel(interpreted=True), torch.zeros(64)
    for _ in range(2):
        launch(kernel, (3,), x, 5)
    assert len(kernel.launched) == 2

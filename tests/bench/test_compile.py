"""Ahead-of-time compilation and what is read from the assembler's output."""

import types

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import gem.attention.backends.torch_ as some_backend  # noqa: E402
from bench import compile as bench_compile  # noqa: E402
from bench.compile import parse, report  # noqa: E402
from bench.nsight import parse as parse_ncu  # noqa: E402


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def product(x, y, z, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(z + i, tl.dot(tl.load(x + i), tl.load(y + i)))


TYPES = {"x": "*fp32:16", "y": "*fp32:16", "n": "i32:16"}


def test_a_small_kernel_compiles_without_a_gpu():
    made = report("double", double, TYPES, {"BLOCK": 1024}, {"num_warps": 4})
    assert 0 < made.registers < 64 and made.clean and made.stack == 0 and made.shared == 0
    assert ".target sm_90a" in made.asm["ptx"]
    # Divisibility decides whether loads are wide.
    assert "ld.global.v4" in made.asm["ptx"]
    narrow = report("narrow", double, {**TYPES, "x": "*fp32", "n": "i32"}, {"BLOCK": 1024})
    assert "ld.global.v4" not in narrow.asm["ptx"]


def test_too_few_registers_show_as_spills_and_a_product_takes_shared_memory():
    types_ = {"x": "*bf16:16", "y": "*bf16:16", "z": "*fp32:16"}
    roomy = report("product", product, types_, {"SIZE": 128}, {"num_warps": 4})
    assert roomy.clean and roomy.shared > 0 and roomy.registers > 64
    tight = report("tight", product, types_, {"SIZE": 128}, {"num_warps": 4, "maxnreg": 128})
    assert tight.spill_stores > 0 and tight.spill_loads > 0 and not tight.clean


def test_an_argument_without_type_is_named():
    with pytest.raises(ValueError, match="double: argument 'n' has neither a type nor a value"):
        report("double", double, {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 128})


def test_notices_of_the_assembler_are_kept():
    output = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    48 bytes stack frame, 40 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers, 16 bytes smem
"""
    made = parse("k", output, dynamic_shared=1000)
    assert (made.registers, made.spill_stores, made.spill_loads) == (168, 40, 36)
    assert (made.stack, made.shared) == (48, 1016) and not made.clean
    assert len(made.notices) == 1 and "C7510" in made.notices[0]


def test_the_command_prints_a_line_per_case(monkeypatch, capsys):
    def cases():
        yield "good", double, TYPES, {"BLOCK": 128}, {}
        yield "bad", double, {"x": "*fp32"}, {"BLOCK": 128}, {}

    monkeypatch.setattr(some_backend, "compile_cases", cases, raising=False)
    monkeypatch.setattr(
        bench_compile.pkgutil,
        "iter_modules",
        lambda *args: [types.SimpleNamespace(name=some_backend.__name__)],
    )
    assert bench_compile.main(["good"]) == 0
    assert "good " in capsys.readouterr().out
    assert bench_compile.main([]) == 1
    assert "bad " in (printed := capsys.readouterr().out) and "argument 'y'" in printed
    assert bench_compile.main(["nothing"]) == 1


def test_the_profilers_csv_is_read():
    output = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum"
"","","us","Mbyte"
"0","forward_kernel","12.5","3.2"
"1","second","1","-"
==PROF== Disconnected
"""
    first, second = parse_ncu(output)
    assert first.name == "forward_kernel"
    assert first.values == {"gpu__time_duration.sum": "12.5 us", "dram__bytes.sum": "3.2 Mbyte"}
    assert second.values["gpu__time_duration.sum"] == "1 us"
    assert parse_ncu("==ERROR== no permission") == []

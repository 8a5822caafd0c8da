"""What the compiler makes of the kernels for Hopper; needs no GPU, but the pinned ptxas."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import triton

from bench.compile import cases, report

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(name):
    (case,) = cases(name)
    return report(*case)


def machine_code(result):
    """(address, instruction) of what Triton would load."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(result.asm["cubin"])
        dump = [CUOBJDUMP, "-sass", binary]
        text = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    found = re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    return [(int(m[1], 16), m[2].strip()) for m in found]


def product_loops(code, addresses=False):
    """The innermost loops with matrix products, each a list of instructions (or as in `code`)."""
    loops = []
    for place, (address, instruction) in enumerate(code):
        jump = re.search(r"BRA (0x[0-9a-f]+)", instruction)
        # A wait that is tried again jumps back too, from the end of the code.
        waits = any("PHASECHK" in earlier for _, earlier in code[max(0, place - 2) : place])
        if jump and int(jump[1], 16) < address and not waits:
            loops.append((int(jump[1], 16), address))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[(at, i) for at, i in code if begin <= at <= end] for begin, end in inner]
    bodies = [body for body in bodies if any("HGMMA" in i for _, i in body)]
    return bodies if addresses else [[i for _, i in body] for body in bodies]


def spilled(loop):
    return [i for i in loop if re.search(r"\b(LDL|STL)\b", i)]


def unmasked(loops):
    return [loop for loop in loops if not any("FSEL" in i for i in loop)]


@pytest.mark.parametrize(
    "name",
    [
        "broadcast_q64_d128",
        "broadcast_q192_d128",
        "broadcast_q256_d128",
        "self_d128",
        "causal_d128",
        "counter_q192_d128",
        "counter_q256_d128",
    ],
)
def test_the_hopper_forward_neither_spills_nor_serializes_in_its_loops(name):
    result = compiled(f"{name}_hopper_forward_kernel")
    assert not [n for n in result.notices if re.search(r"C75\d\d|serialized", n)]
    # Between tiles table rows and an address are spilled.
    assert result.spill_stores <= {"causal_d128": 28, "counter_q192_d128": 8}.get(name, 0)
    loops = product_loops(machine_code(result))
    # The rest of a tile and the last tile's, for each consumer; masked and not.
    assert len(loops) >= 2
    assert not any(spilled(loop) for loop in loops)
    assert unmasked(loops), "no loop without a mask"
    # What carrying probabilities in pairs or in float32 spares: joining halves for their product.
    joins = [sum("PRMT" in i for i in loop) for loop in unmasked(loops)]
    assert max(joins) <= (64 if name == "causal_d128" else 4)


def shortest_way(loop):
    """The instructions of the shortest way from a loop's begin to its end."""
    places = {address: place for place, (address, _) in enumerate(loop)}
    ways = {len(loop): ()}  # from each place on, as linked lists
    lengths = {len(loop): 0}
    for place, (address, instruction) in reversed(list(enumerate(loop))):
        after = [place + 1]
        jump = re.match(r"(@!?U?P\d )?BRA (0x[0-9a-f]+)", instruction)
        if jump and int(jump[2], 16) in places and int(jump[2], 16) > address:
            after = [places[int(jump[2], 16)]] + (after if jump[1] else [])
        best = min(after, key=lengths.get)
        ways[place], lengths[place] = (instruction, ways[best]), lengths[best] + 1
    taken, way = [], ways[0]
    while way:
        taken.append(way[0])
        way = way[1]
    return taken


@pytest.mark.parametrize("queries", [64, 256])
def test_the_hopper_forward_of_tiles_in_parts_needs_no_shared_memory_for_them(queries):
    """Nor do the loops over keys spill; a part's results are written from where they are."""
    result = compiled(f"parts_q{queries}_d128_hopper_forward_kernel")
    assert not [n for n in result.notices if re.search(r"C75\d\d|serialized", n)]
    code = machine_code(result)
    loops = product_loops(code)
    assert len(loops) >= 2 and not any(spilled(loop) for loop in loops)
    assert result.shared <= 227 * 1024
    # 64 columns for two rows of each thread, two numbers at a time, wherever a tile ends.
    assert sum("STG.E.64" in i for _, i in code) >= 64


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("form", ["q64", "q192", "q256"])
def test_the_lazy_hopper_forward_asks_for_no_maxima(form, dim):
    result = compiled(f"lazy_{form}_d{dim}_hopper_forward_kernel")
    assert not [n for n in result.notices if re.search(r"C75\d\d|serialized", n)]
    # Between tiles, where 192 queries leave the fewest registers.
    assert result.spill_stores <= (16 if dim == 128 and form == "q192" else 0)
    loops = product_loops(machine_code(result), addresses=True)
    assert not any(spilled([i for _, i in loop]) for loop in loops)
    ways = [shortest_way(loop) for loop in loops]
    checked = [way for way in ways if any("STS" in i for i in way)]
    assert len(checked) >= 2
    for way in checked:
        # Nor is the output multiplied: what is left is for one row in each thread.
        assert sum("FMNMX" in i or "FMUL" in i for i in way) <= 8
        # Warps wait for each other between reports and reading, and before the next reports.
        order = [m[0] for i in way if (m := re.search(r"\b(STS|LDS|BAR\.SYNC)\b", i))]
        assert re.search("STS (BAR.SYNC )+LDS", " ".join([*order, *order]))
        assert re.search("LDS (BAR.SYNC )+STS", " ".join([*order, *order]))


def backward_loops(loops):
    """(loops of whole steps, the loop of a consumer without keys, which has one product)."""
    products = [sum("HGMMA" in i for i in loop) for loop in loops]
    whole = [loop for loop, n in zip(loops, products, strict=True) if n > 8]
    return whole, [loop for loop, n in zip(loops, products, strict=True) if n <= 8]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "form", ["broadcast_q64", "broadcast_q256", "self", "whole", "deterministic"]
)
def test_the_hopper_backward_neither_spills_nor_serializes_in_its_loops(form, dim):
    kernel = "hopper_shared_backward" if form == "broadcast_q64" else "hopper_backward"
    result = compiled(f"{form}_d{dim}_{kernel}_kernel")
    assert not [n for n in result.notices if re.search(r"C75\d\d|serialized", n)]
    # Between tiles numbers of a tile and addresses are spilled.
    most = 0 if form == "broadcast_q64" else {64: 16, 128: 48}[dim]
    assert max(result.spill_stores, result.spill_loads) <= most
    code = machine_code(result)
    loops, rest = backward_loops(product_loops(code))
    assert len(loops) == 2 and unmasked(loops) == loops  # one of each consumer
    # The second consumer has steps without keys, whose only product is that of dQ.
    assert len(rest) == (0 if form in ("broadcast_q64", "deterministic") else 1)
    assert not any(spilled(loop) for loop in [*loops, *rest])
    if form in ("broadcast_q256", "self", "whole"):
        # Before dQ; the compiler puts another one before the second consumer's scores. Those that
        # copy what consumers write have theirs.
        fences = sorted(sum("FENCE.VIEW" in i for i in loop) for loop in loops)
        assert fences == ([1, 1] if dim == 64 else [1, 2])
    # Warps of their own do all copies.
    assert traffic(loops + rest) == [(0, 0)] * len(loops + rest)
    # dK and dV of both consumers, 64 columns a copy. dQ of a step is added, to sums; in whole
    # samples these may be written instead, or dQ itself. Of few shared queries a consumer's dQ is
    # written once, in float32.
    columns, tiles = dim // 64, 128 // dim
    writes, added = 4 * columns, tiles
    if form == "whole":
        writes += tiles * (1 + columns)
    if form == "broadcast_q64":
        writes += 2
    if form in ("deterministic", "broadcast_q64"):
        added = 0
    assert traffic([[instruction for _, instruction in code]]) == [(added, writes)]


def traffic(loops):
    """(additions, writes) by TMA of each."""
    return [tuple(sum(x in i for i in loop) for x in ("UTMAREDG", "UTMASTG")) for loop in loops]


@pytest.mark.parametrize("dim", [64, 128])
def test_the_causal_hopper_backward_does_not_spill_where_nothing_is_masked(dim):
    result = compiled(f"causal_d{dim}_hopper_backward_kernel")
    assert not [n for n in result.notices if re.search(r"C75\d\d|serialized", n)]
    loops, _ = backward_loops(product_loops(machine_code(result)))
    plain = unmasked(loops)
    assert len(loops) == 4 and len(plain) == 2  # masked and not, of each consumer
    assert not any(spilled(loop) for loop in plain)


@pytest.mark.parametrize("kernel", ["keys", "partial_queries", "shared_queries"])
def test_triton_gradients_have_no_atomics_and_use_the_tensor_cores(kernel):
    queries = 64 if kernel == "shared_queries" else 256
    ptx = compiled(f"broadcast_q{queries}_d128_{kernel}_kernel").asm["ptx"]
    assert not re.search(r"\b(red|atom)\.(global|async)", ptx)
    assert "wgmma.mma_async" in ptx

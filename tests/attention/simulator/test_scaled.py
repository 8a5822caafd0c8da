"""8-bit floats, scaled products, copies to tensor memory and pairs of CTAs, against PyTorch."""

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import errors, simulate
from tests.attention.simulator import scaled_kernels as kernels

SEEDS = range(6)
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
PAIRS = {"ctas_per_cga": (2, 1, 1), "target": "sm_100"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def described(x, box):
    return TensorDescriptor.from_tensor(x, box)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_conversions_round_and_saturate(dtype):
    to = FP8[dtype]
    every = torch.arange(256, dtype=torch.uint8).view(to).float()
    between = torch.cat([(every[:-1] + every[1:]) / 2, torch.randn(256), every])
    x = torch.cat([between, torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf])])
    x = torch.cat([x, torch.full((1024 - len(x),), torch.nan)])
    bits, back = torch.zeros(1024, dtype=torch.uint8), torch.zeros(1024)
    simulate(kernels.convert_kernel, (1,), [x, bits, back], DTYPE=dtype, N=1024)
    most = torch.finfo(to).max
    expected = x.clamp(-most, most).to(to)
    assert torch.equal(back.nan_to_num(nan=7e7), expected.float().nan_to_num(nan=7e7))
    seen = ~expected.float().isnan()
    assert torch.equal(bits[seen], expected.view(torch.uint8)[seen])


def test_eight_bit_floats_have_no_arithmetic():
    args = [torch.zeros(64), torch.zeros(64, dtype=torch.uint8), torch.zeros(64)]
    with pytest.raises(errors.UnsupportedOperation, match="add of fp8e5, which has no arithmetic"):
        simulate(kernels.convert_kernel, (1,), args, DTYPE=tl.float8e5, N=64, KIND="arithmetic")


def eight_bit(one, other, k=64, **options):
    a, b = torch.randn(64, k).to(one), torch.randn(64, k).to(other)
    c = torch.full((64, 64), torch.nan)
    options = {"REGISTERS": False, "PLAIN": False, **options}
    args = [described(a, [64, k]), described(b, [64, k]), c]
    simulate(kernels.eight_bit_kernel, (1,), args, K=k, **options)
    return c, a.float() @ b.float().T


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("one", FP8.values(), ids=str)
@pytest.mark.parametrize("other", FP8.values(), ids=str)
def test_products_on_hopper(one, other, registers):
    c, expected = eight_bit(one, other, REGISTERS=registers)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-4)


def test_what_hopper_does_not_multiply():
    words = "numbers of 8 bits lie with those of one dot product side by side"
    with pytest.raises(errors.UnsupportedOperation, match=words):
        eight_bit(torch.float8_e5m2, torch.float8_e5m2, PLAIN=True)
    with pytest.raises(errors.UnsupportedOperation, match="32 for 8-bit floats"):
        eight_bit(torch.float8_e5m2, torch.float8_e5m2, k=16)


def packed(scales):
    """[rows, blocks] as `tcgen05.cp` takes them: 128 rows and 4 blocks to 512 bytes."""
    rows, blocks = scales.shape
    rows, blocks = -(-rows // 128), -(-blocks // 4)
    whole = torch.full((rows * 128, blocks * 4), 255, dtype=torch.uint8)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    out = torch.empty(rows, blocks, 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(blocks):
            for i in range(128):
                place = i % 32 * 16 + i // 32 * 4
                out[r, c, place : place + 4] = whole[r * 128 + i, c * 4 : c * 4 + 4]
    return out.view(1, rows, blocks, 2, 256)


def operand(form, rows, k):
    """(numbers [rows, k], as they lie in memory)."""
    if form == "e2m1":
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        return E2M1[codes.long()], codes[:, ::2] | codes[:, 1::2] << 4
    x = torch.randn(rows, k).to(torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2)
    return x.float(), x


def scaled(seed, fault="", where="tensor", n=128, k=128, blocks=2, forms=("e4m3", "e4m3")):
    a, a_bits = operand(forms[0], 128, k * blocks)
    b, b_bits = operand(forms[1], n, k * blocks)
    rows, columns = (torch.randint(118, 135, (x, k * blocks // 32)).byte() for x in (128, n))
    exact = [
        x.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1)
        for x, s in ((a, rows), (b, columns))
    ]
    # A tile's scales are padded to four blocks each.
    tiles = [torch.cat([packed(t) for t in s.split(k // 32, 1)], 2) for s in (rows, columns)]
    c = torch.full((128, n), torch.nan)
    pack = [1 + (form == "e2m1") for form in forms]
    b_bits = b_bits.T.contiguous()
    args = [
        described(a_bits, [128, k // pack[0]]),
        described(b_bits, [k // pack[1], n]),
        described(tiles[0], [1, 1, -(-k // 128), 2, 256]),
        described(tiles[1], [1, -(-n // 128), -(-k // 128), 2, 256]),
        c,
        blocks,
    ]
    options = {"N": n, "K": k, "A_FORMAT": forms[0], "B_FORMAT": forms[1], "WHERE": where}
    simulate(
        kernels.scaled_kernel, (1,), args, seeds=[seed], target="sm_100", FAULT=fault, **options
    )
    return c, exact[0] @ exact[1].T


@pytest.mark.parametrize("where", ["shared", "tensor"])
@pytest.mark.parametrize(
    ("n", "k", "forms"),
    [
        (128, 128, ("e4m3", "e4m3")),
        (256, 64, ("e5m2", "e4m3")),
        (64, 256, ("e4m3", "e5m2")),
        (128, 128, ("e2m1", "e4m3")),
        (128, 64, ("e4m3", "e2m1")),
        (128, 128, ("e2m1", "e2m1")),
    ],
)
def test_scaled_products(n, k, forms, where):
    for seed in (0, 1, 4):
        c, expected = scaled(seed, "", where, n, k, 2, forms)
        assert (c.double() - expected).norm() <= 1e-6 * expected.norm()
        assert (c.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


FAULTS = {
    "no copy": (errors.UninitialisedRead, "the product reads tb[0]"),
    "read while copied": (errors.AsyncConflict, "the load reads ta[0]"),
    "released early": (errors.AsyncConflict, "which the "),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_scaled_products(fault, seed):
    kind, words = FAULTS[fault]
    with pytest.raises(kind) as caught:
        scaled(seed, fault)
    assert words in str(caught.value)


def test_a_scale_that_is_no_number():
    a = torch.ones(128, 128).to(torch.float8_e4m3fn)
    rows, columns = (torch.full((128, 4), 127, dtype=torch.uint8) for _ in range(2))
    rows[5, 2], columns[9, 0] = 255, 255
    rows[6], columns[10] = 0, 254  # the smallest and the largest
    c = torch.zeros(128, 128)
    boxes = (([128, 128],) * 2, ([1, 1, 1, 2, 256],) * 2)
    args = [described(x, box) for x, box in zip((a, a), boxes[0], strict=True)]
    args += [described(packed(x), box) for x, box in zip((rows, columns), boxes[1], strict=True)]
    options = {"N": 128, "K": 128, "A_FORMAT": "e4m3", "B_FORMAT": "e4m3", "WHERE": "shared"}
    simulate(kernels.scaled_kernel, (1,), [*args, c, 1], target="sm_100", **options)
    assert c[5].isnan().all() and c[:, 9].isnan().all()
    assert c.isnan().sum() == 2 * 128 - 1
    assert c[0, 0] == 128 and c[6, 0] == 128 * 2.0**-127 and c[0, 10] == 128 * 2.0**127
    assert c[6, 10] == 128


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("64 rows", "M is 128 per CTA"),
        ("format", "async_dot_scaled of fp8e5 a[0] [128, 128] as numbers of e4m3"),
        ("unpacked", "packed scales of 128 rows and 4 blocks are bytes of shape [1, 1, 32, 16]"),
        ("few", "in tensor memory they are bytes of 128 rows and 4 columns"),
        ("copy", "rows are a multiple of 128, columns of 4"),
    ],
)
def test_what_blackwell_does_not_scale(kind, words):
    with pytest.raises(errors.UnsupportedOperation) as caught:
        simulate(kernels.unsupported_kernel, (1,), [], KIND=kind, target="sm_100")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["async_dot_scaled", "tmem_copy"])
def test_hopper_has_neither(name):
    words = f"{name} does not exist on sm_90"
    with pytest.raises(errors.UnsupportedOperation, match=words):
        simulate(kernels.hopper_kernel, (1,), [], KIND=name, target="sm_90")


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_to_tensor_memory(seed):
    x = torch.randn(128, 32)

    def run(fault=""):
        out = torch.zeros_like(x)
        simulate(kernels.copy_kernel, (1,), [x, out], FAULT=fault, seeds=[seed], target="sm_100")
        return out

    assert torch.equal(run(), x)
    for fault, kind, words in (
        ("no fence", errors.MissingFence, "the copy to tensor memory reads tile"),
        ("no wait", errors.AsyncConflict, "the load reads to"),
        ("written while copied", errors.AsyncConflict, "the store writes tile"),
        ("from tensor memory", errors.UnsupportedOperation, "from shared to tensor memory"),
        ("other shape", errors.UnsupportedOperation, "tmem_copy from fp32 tile"),
    ):
        with pytest.raises(kind) as caught:
            run(fault)
        assert words in str(caught.value)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_scales_in_tensor_memory(rows):
    x = torch.randint(0, 250, (rows, 8), dtype=torch.uint8)
    out = torch.zeros_like(x)
    simulate(kernels.scale_store_kernel, (1,), [x, out], ROWS=rows, target="sm_100")
    expected = x.clone()
    if rows == 128:
        expected[:, 4:] += 1
    assert torch.equal(out, expected)
    columns = 496 + 8 * (rows // 128 or 1)
    more = 12 * (rows // 128 or 1)
    with pytest.raises(errors.ResourceError, match=f"{columns + more} columns of tensor memory"):
        simulate(
            kernels.scale_store_kernel, (1,), [x, out], ROWS=rows, FAULT="too many", target="sm_100"
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows", [64, 128])
def test_pairs_of_ctas(rows, seed):
    a, b = torch.randn(2 * rows, 64).half(), torch.randn(64, 128).half()
    args = [described(a, [rows, 64]), described(b, [64, 64])]

    count = torch.zeros(2, dtype=torch.int32)

    def run(fault=""):
        c = torch.full((2 * rows, 128), torch.nan)
        options = {"ROWS": rows, "K": 64, "FAULT": fault, "seeds": [seed], **PAIRS}
        simulate(kernels.pair_kernel, (2,), [*args, c, count], **options)
        return c

    torch.testing.assert_close(run(), a.float() @ b.float(), rtol=1e-5, atol=1e-4)
    # Once each, although the run begins anew when it finds a pair of 64 rows.
    assert count.tolist() == [1, 1]
    with pytest.raises(errors.ResourceError, match="516 columns .*, but a CTA has 512") as caught:
        run("too many columns")
    assert caught.value.seed == seed and caught.value.cta is not None
    unready = (errors.Race, errors.UninitialisedRead)
    with pytest.raises(unready, match="the product reads [ab].* of CTA 1"):
        run("no word from the other")
    with pytest.raises(errors.Race, match=r"acc\[0\].* by task the program of CTA"):
        run("no wait")


def test_a_pairs_result_lies_in_all_lanes():
    """Lanes 64 to 127 have its right half of columns."""
    a, b = torch.randn(128, 64).half(), torch.randn(64, 128).half()
    args = [described(x, [64, 64]) for x in (a, b)]
    for seed in SEEDS:
        out = torch.full((2, 2, 64, 64), torch.nan)
        simulate(kernels.whole_kernel, (2,), [*args, out], WIDTH=64, seeds=[seed], **PAIRS)
        expected = (a.float() @ b.float()).view(2, 64, 2, 64).transpose(1, 2)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(errors.OverwrittenRead, match="tensor memory hold acc"):
        simulate(kernels.whole_kernel, (2,), [*args, out], WIDTH=32, **PAIRS)
    with pytest.raises(errors.UnsupportedOperation, match="a slice of acc"):
        simulate(kernels.whole_kernel, (2,), [*args, out], WIDTH=64, FAULT="slice", **PAIRS)


@pytest.mark.parametrize("seed", SEEDS)
def test_scaled_products_of_pairs(seed):
    (a, a_bits), (b, b_bits) = operand("e4m3", 256, 128), operand("e4m3", 128, 128)
    rows, columns = (torch.randint(120, 133, (n, 4)).byte() for n in (256, 128))
    c = torch.full((256, 128), torch.nan)
    args = [
        described(a_bits, [128, 128]),
        described(b_bits.T.contiguous(), [128, 64]),
        described(packed(rows), [1, 1, 1, 2, 256]),
        described(packed(columns), [1, 1, 1, 2, 256]),
        c,
    ]
    simulate(kernels.scaled_pair_kernel, (2,), args, seeds=[seed], **PAIRS)
    x, y = (
        n.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1)
        for n, s in ((a, rows), (b, columns))
    )
    assert (c.double() - x @ y.T).norm() <= 1e-6 * (x @ y.T).norm()

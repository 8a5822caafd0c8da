"""Blackwell's operations in small kernels, right ones and such with one fault."""

import functools

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import errors, simulate
from tests.attention.simulator import blackwell_kernels as kernels

SEEDS = range(6)
on_blackwell = functools.partial(simulate, target="sm_100")


def products(fault, seeds=SEEDS, blocks=5, stages=2):
    a, b = torch.randn(128, 64 * blocks).half(), torch.randn(64 * blocks, 64).half()
    c = torch.full((128, 64), torch.nan)
    boxes = ((a, [128, 64]), (b, [64, 64]))
    descriptors = [TensorDescriptor.from_tensor(x, box) for x, box in boxes]
    on_blackwell(
        kernels.product_kernel,
        (1,),
        [*descriptors, c, blocks],
        seeds=seeds,
        STAGES=stages,
        FAULT=fault,
    )
    return c, a.float() @ b.float()


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("how", ["", "half by half", "waited for one by one"])
def test_no_fault_no_report(stages, how):
    c, expected = products(how, range(12), 5, stages)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-4)


FAULTS = {
    "no wait": (errors.Race, "acc_tile[0]"),
    "not committed": (errors.AsyncConflict, "acc_tile[0] [128, 64], which the product at"),
    "no commit": (errors.Deadlock, "done[0] to end a phase of parity 0"),
    "no wait for full": ((errors.UninitialisedRead, errors.Race), "a_tiles[0]"),
    "early release": (errors.AsyncConflict, "which the product at"),
    "accumulates onto nothing": (
        errors.UninitialisedRead,
        "the product reads acc_tile[0] [128, 64], of which 32768 of 32768 bytes were never",
    ),
    "alias over the sum": (errors.OverwrittenRead, "columns of tensor memory hold alias"),
    "alias while in flight": (errors.Race, ""),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported_under_every_seed(fault, seed):
    kind, words = FAULTS[fault]
    with pytest.raises(kind) as caught:
        products(fault, [seed])
    assert words in str(caught.value)
    assert caught.value.seed == seed and caught.value.cta == (0, 0, 0)
    assert caught.value.task


def test_columns_of_tensor_memory():
    for num, more, rows in ((4, 0, 128), (3, 128, 128), (4, 0, 64)):
        on_blackwell(kernels.columns_kernel, (1,), [], NUM=num, MORE=more, ROWS=rows)
    words = r"513 columns .* \(a buffer 512, a buffer 1\), but a CTA has 512"
    with pytest.raises(errors.ResourceError, match=words):
        on_blackwell(kernels.columns_kernel, (1,), [], NUM=4, MORE=1, ROWS=128)
    with pytest.raises(errors.ResourceError, match="514 columns"):
        on_blackwell(kernels.columns_kernel, (1,), [], NUM=4, MORE=2, ROWS=64)
    with pytest.raises(errors.UnsupportedOperation, match="64 or 128 rows"):
        on_blackwell(kernels.columns_kernel, (1,), [], NUM=1, MORE=0, ROWS=256)


@pytest.mark.parametrize("kind", ["shared", "distinct"])
@pytest.mark.parametrize("fault", ["", "sum"])
def test_storage_aliases(kind, fault):
    out = torch.zeros(4 * 4096 + 256)

    def run(size=None):
        args = {"SIZE": size, "KIND": kind, "FAULT": fault}
        on_blackwell(kernels.aliases_kernel, (1,), [out], **args)

    if kind == "distinct" and not fault:
        run()
        assert torch.equal(out[: 4 * 4096].view(4, 4096).mean(1), torch.arange(4.0))
        assert torch.equal(out[4 * 4096 :].view(2, 128).mean(1), torch.tensor([10.0, 11.0]))
        run(2 * 64 * 4 * 128)
        with pytest.raises(errors.ResourceError, match="need 512 bytes of a specification for 511"):
            run(2 * 64 * 4 * 128 - 128)
        return
    life = "sums" if kind == "distinct" else "column" if not fault else "sums|column"
    with pytest.raises(errors.OverwrittenRead, match=f"tensor memory hold ({life}), by the store"):
        run()


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        ("left operand", "sm_90", "storage_kind.tmem does not exist on sm_90"),
        ("left operand", "sm_100", "its left operand in registers"),
        ("accumulator", "sm_100", "its accumulator in registers"),
        ("wait", "sm_100", "async_dot_wait does not exist on sm_100"),
        ("commit", "sm_90", "tcgen05_commit does not exist on sm_90"),
        ("launch control", "sm_90", "CLC does not exist on sm_90"),
        ("pair", "sm_100", "two_ctas in a cluster of 1"),
        ("copy", "sm_100", "in tensor memory"),
        ("transpose", "sm_100", "a transpose of"),
    ],
)
def test_what_the_target_does_not_have(kind, target, words):
    desc = TensorDescriptor.from_tensor(torch.zeros(64, 64).half(), [64, 64])
    with pytest.raises(errors.UnsupportedOperation) as caught:
        simulate(kernels.out_of_place_kernel, (1,), [desc], KIND=kind, target=target)
    assert words in str(caught.value)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("how", ["store", "copy", "asynchronous store"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ctas_of_a_cluster_reach_each_other(target, how, size):
    x, out = torch.randn(8, 64), torch.zeros(8, 64)
    for seed in SEEDS:
        out.zero_()
        simulate(
            kernels.neighbours_kernel,
            (8,),
            [x, out],
            HOW=how,
            ctas_per_cga=(size, 1, 1),
            seeds=[seed],
            target=target,
        )
        assert torch.equal(out.view(-1, size, 64), x.view(-1, size, 64).roll(1, 1))


NEIGHBOURS = [
    ("store", "no start", errors.Race, "which may not have started: no cluster_barrier"),
    ("store", "no end", (errors.Race, errors.UninitialisedRead), "got[0]"),
    ("store", "one goes alone", errors.SimulationError, ""),
    ("copy", "no start", errors.Race, "which may not have started"),
    ("copy", "no wait", (errors.AsyncConflict, errors.UninitialisedRead), "got[0]"),
    ("copy", "no fence", errors.MissingFence, "the remote copy reads own[0]"),
    ("copy", "no bytes", errors.Deadlock, "1 of 1 arrivals and -256 bytes outstanding"),
    ("asynchronous store", "no wait", (errors.AsyncConflict, errors.UninitialisedRead), "got[0]"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("how", "fault", "kind", "words"), NEIGHBOURS)
def test_faults_among_ctas(how, fault, kind, words, seed):
    x, out = torch.randn(128), torch.zeros(128)
    options = {"HOW": how, "FAULT": fault, "ctas_per_cga": (2, 1, 1), "seeds": [seed]}
    with pytest.raises(kind) as caught:
        on_blackwell(kernels.neighbours_kernel, (2,), [x, out], **options)
    assert words in str(caught.value)
    assert "of CTA" in str(caught.value)


def multicast(fault, seeds):
    x, out = torch.randn(32, 64), torch.zeros(2, 32, 64)
    args = [TensorDescriptor.from_tensor(x, [16, 64]), out]
    on_blackwell(
        kernels.multicast_kernel, (2,), args, FAULT=fault, ctas_per_cga=(2, 1, 1), seeds=seeds
    )
    return x, out


def test_multicast_copies_and_remote_arrivals():
    for seed in range(12):
        x, out = multicast("", [seed])
        assert torch.equal(out[0], x) and torch.equal(out[1], x)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_multicast(seed):
    with pytest.raises((errors.AsyncConflict, errors.UninitialisedRead), match=r"tiles\[1\]"):
        multicast("no wait", [seed])
    with pytest.raises(errors.Deadlock, match=r"of CTA 1 waits at .* for both\[0\]"):
        multicast("the other waits too", [seed])


def test_clusters_and_grids():
    x, out = torch.randn(192), torch.zeros(192)
    with pytest.raises(ValueError, match=r"grid is \(3, 1, 1\), which clusters of \(2, 1, 1\)"):
        on_blackwell(kernels.neighbours_kernel, (3,), [x, out], HOW="store", ctas_per_cga=(2, 1, 1))
    desc = TensorDescriptor.from_tensor(torch.zeros(64, 64).half(), [64, 64])
    with pytest.raises(errors.OutOfBounds, match="CTA 1 of a cluster of 1"):
        on_blackwell(kernels.out_of_place_kernel, (1,), [desc], KIND="rank")


@pytest.mark.parametrize(("size", "multi"), [(1, False), (1, True), (2, True), (4, True)])
@pytest.mark.parametrize("stages", [1, 2])
def test_launch_control_visits_every_tile_once(size, multi, stages):
    stolen = set()
    for seed in range(10):
        out = torch.zeros(16, dtype=torch.int32)
        counts = on_blackwell(
            kernels.count_kernel,
            (16,),
            [out],
            STAGES=stages,
            MULTI=multi,
            ctas_per_cga=(size, 1, 1),
            seeds=[seed],
        )
        assert torch.equal(out, torch.ones_like(out))
        assert counts.stolen * size + counts.programs == 16
        stolen.add(counts.stolen)
    assert {0, 16 // size - 1} < stolen


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("phase of the producer", errors.Deadlock, "empty[0] to end a phase of parity 0"),
        ("asks again", errors.BarrierMisuse, "a launch request after one that was refused"),
    ],
)
def test_faults_of_launch_control(fault, kind, words, seed):
    out = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(kind) as caught:
        on_blackwell(
            kernels.count_kernel, (4,), [out], STAGES=2, MULTI=False, FAULT=fault, seeds=[seed]
        )
    assert words in str(caught.value)


def test_arrivals_at_a_cta_that_has_ended():
    out = torch.zeros(16, dtype=torch.int32)
    options = {"STAGES": 2, "MULTI": True, "FAULT": "no end", "ctas_per_cga": (2, 1, 1)}
    with pytest.raises(errors.Race, match=r"at clc.empty\[\d\] reaches CTA 0, which has ended"):
        on_blackwell(kernels.count_kernel, (16,), [out], seeds=40, **options)

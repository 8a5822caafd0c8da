"""Every kind of report, by a small kernel with one fault."""

import re

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.attention.simulator import errors, simulate
from tests.attention.simulator import kernels

SEEDS = range(5)


def line_of(text, nth=0):
    """The number of the nth line of the kernels' file with this text."""
    with open(kernels.__file__) as f:
        return [i for i, line in enumerate(f, 1) if text in line][nth]


def products(fault, seeds=SEEDS, blocks=5, stages=2):
    a, b = torch.randn(64, 64 * blocks).half(), torch.randn(64 * blocks, 64).half()
    c = torch.full((64, 64), torch.nan)
    descriptors = [TensorDescriptor.from_tensor(x, [64, 64]) for x in (a, b, c)]
    simulate(
        kernels.product_kernel,
        (1,),
        [*descriptors, blocks],
        seeds=seeds,
        STAGES=stages,
        FAULT=fault,
    )
    return c, a.float() @ b.float()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_no_fault_no_report(stages):
    c, expected = products("", range(12), 5, stages)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-4)


UNREADY = (errors.UninitialisedRead, errors.Race)
EARLY = (errors.AsyncConflict, errors.OverArrival)
FAULTS = {
    "no wait for empty": (EARLY, "[0]"),
    "no wait for full": (UNREADY, "a_tiles[0]"),
    "wrong phase of the producer": (errors.Deadlock, "nobody goes on: default waits"),
    "wrong phase of the consumer": (UNREADY, "a_tiles[0]"),
    "phase of 2": (errors.BarrierMisuse, "a wait for phase 2 of full[0], not 0 or 1"),
    "no arrive": (errors.Deadlock, "empty[0] to end a phase of parity 0"),
    "count of two": (errors.Deadlock, "1 of 2 arrivals and 0 bytes outstanding"),
    "arrive twice": (errors.OverArrival, "2 arrivals at empty[0]"),
    "expected twice": (errors.OverArrival, "expected of full[0]"),
    "too few bytes": ((errors.AsyncConflict, errors.WrongBytes), ""),
    "too many bytes": (errors.WrongBytes, "full[0] still expects 8192 bytes"),
    "early release": (errors.AsyncConflict, "writes a_tiles[0]"),
    "one product in flight": (errors.AsyncConflict, "an asynchronous operation may still read"),
    "read before the wait": (errors.UnwaitedResult, "has not been waited for"),
    "copied to the same buffer": (errors.AsyncConflict, "writes a_tiles[0]"),
    "one buffer for all": (errors.AsyncConflict, "b_tiles[0]"),
    "index outside": (errors.OutOfBounds, "b_tiles[2], but b_tiles has 2"),
    "no store": (errors.UninitialisedRead, "16384 of 16384 bytes were never written"),
    "half a store": (errors.UninitialisedRead, "8192 of 16384 bytes were never written"),
    "no fence": (errors.MissingFence, "no fence('async_shared') comes between it and the store"),
    "store over a store": (errors.AsyncConflict, "which the asynchronous store at"),
    "no store wait": (errors.UnwaitedResult, "1 asynchronous store that it has not waited for"),
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


def test_a_report_names_line_and_task():
    with pytest.raises(errors.AsyncConflict) as caught:
        products("early release", [0])
    text = str(caught.value)
    copy = line_of("async_descriptor_load(desc_a")
    assert f"kernels.py:{copy}, task default, program (0, 0, 0), seed 0: the copy" in text
    task = line_of("async_task(num_warps=4, registers=232)")
    dot = line_of("acc = tlx.async_dot(a_tiles")
    assert f"the product at kernels.py:{dot} by task task at line {task} may still read" in text


def test_a_deadlock_names_who_waits_where_and_who_arrived():
    with pytest.raises(errors.Deadlock) as caught:
        products("no arrive", [0])
    text = str(caught.value)
    assert f"default waits at kernels.py:{line_of('barrier_wait(empty[st], phase)')}" in text
    assert "it is in phase 0 (parity 0), 1 of 1 arrivals and 0 bytes outstanding" in text
    assert "nobody has arrived at it so far" in text
    waits = rf"waits at kernels.py:{line_of('barrier_wait(full[st], phase)')} for full\[0\]"
    assert re.search(waits, text)
    assert re.search(r"so far arrived: default \(1 times, last at kernels.py:\d+\)", text)


HAND_OVER = {
    "wait for each other": (errors.Deadlock, "named barrier 2: 128 of 256 threads are there"),
    "arrive again": (errors.OverArrival, "128 threads of default come to named barrier 1"),
    "nobody comes": (errors.Deadlock, "named barrier 1"),
    "other count": (errors.BarrierMisuse, "named barrier 1 for"),
    "no wait": (UNREADY, "tile[0]"),
}


def hand_over(fault, seeds):
    x, out = torch.randn(128), torch.full((128,), torch.nan)
    simulate(kernels.hand_over_kernel, (1,), [x, out], seeds=seeds, FAULT=fault)
    return x, out


def test_named_barriers_and_the_tasks_own_copies():
    x, out = hand_over("", range(10))
    assert torch.equal(out[:64], x[:64])
    # The default task's count is 6; that of the program stays 5.
    torch.testing.assert_close(out[64:], x[64:] + 6 + 5)


@pytest.mark.parametrize("fault", HAND_OVER)
def test_faults_of_named_barriers(fault):
    kind, words = HAND_OVER[fault]
    with pytest.raises(kind) as caught:
        hand_over(fault, SEEDS)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"NUM": 8}, "262144 bytes of shared memory are needed (a buffer 262144), but"),
        ({"REGISTERS": 240, "REPLICAS": 3}, "the tasks ask for 92160 registers"),
        ({"REGISTERS": 236}, "236 registers per thread, not a multiple of 8"),
        ({"WARPS": 8, "REPLICAS": 4, "REGISTERS": 32}, "1152 threads of all tasks"),
    ],
    ids=str,
)
def test_resources(options, words):
    options = {"NUM": 7, "WARPS": 4, "REGISTERS": 232, "REPLICAS": 2, **options}
    with pytest.raises(errors.ResourceError) as caught:
        simulate(kernels.resources_kernel, (1,), [], **options)
    assert words in str(caught.value)


def test_resources_that_there_are():
    simulate(kernels.resources_kernel, (1,), [], NUM=7, WARPS=4, REGISTERS=232, REPLICAS=2)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("load", errors.OutOfBounds, "the load reaches byte 256 of X, which has 256"),
        ("tensor memory", errors.UnsupportedOperation, "does not exist on sm_90"),
        ("unknown", errors.UnsupportedOperation, "does not know tl.sort"),
        ("spin", errors.EndlessLoop, "it reads no memory, which nobody changes"),
    ],
)
def test_what_is_out_of_place(kind, error, words):
    x, out = torch.randn(64), torch.zeros(64)
    with pytest.raises(error) as caught:
        simulate(
            kernels.outside_kernel, (1,), [x, out], LAST=1, KIND=kind, seeds=[5], step_limit=1000
        )
    assert words in str(caught.value)


def test_masked_lanes_may_be_outside():
    x, out = torch.randn(64), torch.zeros(64)
    simulate(kernels.outside_kernel, (1,), [x, out], LAST=1, KIND="masked")
    assert torch.equal(out, torch.cat([x[1:], torch.tensor([-1.0])]))

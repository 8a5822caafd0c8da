"""GPU time by part, from a trace made by hand."""

import pytest

from bench.trace import busy_ms, by_part, kernels, longest


def operator(name, begin, length, thread=1, kind="cpu_op"):
    where = {"ph": "X", "pid": 7, "tid": thread, "cat": kind, "name": name}
    return where | {"ts": begin, "dur": length, "args": {}}


def launch(begin, correlation, thread=1, kind="cuda_runtime"):
    made = operator("cudaLaunchKernel", begin, 1, thread, kind)
    return made | {"args": {"correlation": correlation}}


def work(name, begin, length, correlation, kind="kernel"):
    where = {"ph": "X", "pid": 0, "tid": 7, "cat": kind, "name": name}
    return where | {"ts": begin, "dur": length, "args": {"correlation": correlation}}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 7},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 1000, "id": 1},
        # Out of order, as kineto writes them.
        launch(25, 1, kind="cuda_driver"),
        operator("gem::attention", 20, 20),
        operator("aten::sum", 30, 5),
        launch(31, 2),
        operator("aten::linear", 50, 20),
        operator("aten::addmm", 50, 15),
        launch(52, 3),
        operator("aten::gelu", 80, 5),
        launch(82, 4),
        # The backward runs on a thread of its own, at the same time.
        operator("autograd::engine::evaluate_function: GemAttention", 80, 30, thread=2),
        operator("gem::attention_backward", 81, 20, thread=2),
        launch(82, 5, thread=2),
        operator("Optimizer.step#AdamW.step", 100, 20, kind="user_annotation"),
        operator("aten::mm", 105, 5),
        launch(106, 6),
        operator("aten::copy_", 130, 5),
        launch(131, 7),
        operator("fbgemm::split_embedding_codegen_lookup", 140, 9),
        launch(141, 8),
        launch(160, 9),
        work("flash", 1000, 400, 1),
        work("reduce", 1400, 100, 2),
        work("gemm", 1500, 1000, 3),
        work("gelu", 2400, 200, 4),
        work("flash_backward", 3000, 800, 5),
        work("adamw", 3800, 50, 6),
        work("Memcpy HtoD (Pinned -> Device)", 3900, 10, 7, "gpu_memcpy"),
        work("lookup", 4000, 30, 8),
        work("gelu", 4100, 20, 9),
        work("unknown", 4200, 7, 77, "gpu_memset"),
        {**work("Optimizer.step#AdamW.step", 3800, 50, 6), "cat": "gpu_user_annotation"},
    ]
}


def test_kernels_go_to_the_operator_that_launched_them():
    assert by_part(kernels(TRACE)) == pytest.approx(
        {
            "attention": 1.3,
            "dense products": 1.0,
            "elementwise, norms, gathers": 0.227,
            "optimizer": 0.05,
            "copies to and from the host": 0.01,
            "embedding tables": 0.03,
        }
    )


def test_work_side_by_side_counts_once():
    assert busy_ms(kernels(TRACE)) == pytest.approx((2617 - 100) / 1e3)


def test_the_longest_are_first_and_calls_of_one_name_add_up():
    first, second, *_, last = longest(kernels(TRACE), 4)
    assert (first["name"], second["part"]) == ("gemm", "attention")
    assert last == {
        "name": "gelu",
        "part": "elementwise, norms, gathers",
        "ms": pytest.approx(0.22),
        "calls": 2,
    }

"""What only an accelerator can show: no copies back to the host, and the same results there."""

import pytest
import torch

from gem.attention import BroadcastAttention, JaggedAttention, JaggedLayout
from gem.attention.testing import assert_close_to_reference, attend, random_problem

pytestmark = pytest.mark.gpu

LENGTHS = [12, 9, 300, 15, 0, 11, 700]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "options"),
    [(LENGTHS, {}), (LENGTHS, {"causal": True}), (LENGTHS, {"window": (32, 8)}), (6, {})],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_against_the_reference(q_lengths, options, dtype, backend):
    problem = random_problem(
        q_lengths,
        LENGTHS,
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=dtype,
        device="cuda",
        spare=3,
        **options,
    )
    assert_close_to_reference(attend(problem, backend), problem)


def test_a_step_copies_nothing_to_the_host():
    layout = JaggedLayout.from_lengths(LENGTHS, "cuda")
    x = torch.randn(layout.rows, 64, device="cuda", requires_grad=True)
    local = JaggedAttention(64, 2, window=(32, 0), device="cuda")
    pool = BroadcastAttention(64, 2, 4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        longer = layout.prepend(2)
        blocks = layout.split(64)
        pool(local(x, layout) + local(x, blocks), layout).sum().backward()
        assert longer.rows == layout.rows + 2 * len(LENGTHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()

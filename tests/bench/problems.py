"""Small problems of every kind that routes are tried on."""

import torch

from gem.attention.testing import random_problem

PROBLEMS = {
    "broadcast": ((7, [5, 0, 30, 11]), {"heads": 4, "kv_heads": 2}),
    "broadcast_equal": ((7, [9, 9]), {}),
    "self": (([5, 0, 30, 11],), {"heads": 4, "kv_heads": 2}),
    "equal": (([16, 16],), {}),
    "causal": (([5, 0, 30, 11],), {"causal": True}),
    "equal_causal": (([16, 16],), {"causal": True}),
    "window": (([5, 0, 30, 11],), {"window": (4, 2)}),
    "left": (([5, 0, 30, 11],), {"window": (4, None)}),
}


def problem_of(name, dtype=torch.bfloat16):
    lengths, options = PROBLEMS[name]
    return random_problem(*lengths, dtype=dtype, **options)


def results_of(route):
    out = route.forward()
    route.prepare_backward()
    grads = route.backward()
    return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

"""Compiled dense blocks give the same numbers and are compiled once for all batch sizes."""

import copy

import torch
import torch._dynamo
from torch import nn

from gem.model.heads import TaskHeads
from gem.model.wukong import WukongLayer
from gem.train.compiling import compile_dense


def test_dense_blocks_compile_once():
    torch.manual_seed(0)
    plain = nn.Sequential(
        WukongLayer(6, 16, 2, 3, 2, [16]), nn.Identity(), TaskHeads([0.1, 0.2], 5, 16, [8], 0.0)
    )
    compiled = copy.deepcopy(plain)
    names = list(dict(compiled.named_parameters()))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert compile_dense(compiled, backend="eager") == 2
    assert list(dict(compiled.named_parameters())) == names
    for rows in (3, 5, 8, 2):
        x = torch.randn(rows, 6, 16)
        torch.testing.assert_close(compiled(x), plain(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]

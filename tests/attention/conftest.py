import pytest

from gem.attention.backends import torch_


@pytest.fixture(autouse=True)
def _poison(nan_poison):
    """Unwritten memory is NaN in every test of attention, scratch memory included."""
    for memory in torch_._workspace.kept.values():
        memory.fill_(float("nan"))

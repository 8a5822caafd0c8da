import pytest

from gem.attention.backends import torch_


@pytest.fixture
def unpoisoned():
    """For tests that compile: a compiler would take the patched functions for user code."""


@pytest.fixture(autouse=True)
def _poison(request):
    """Unwritten memory is NaN in every test of attention, scratch memory included."""
    if "unpoisoned" in request.fixturenames:
        return
    request.getfixturevalue("nan_poison")
    for memory in torch_._workspace.kept.values():
        memory.fill_(float("nan"))

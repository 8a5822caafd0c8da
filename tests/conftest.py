"""Fixtures that every room's tests may use."""

import pytest
import torch


@pytest.fixture
def nan_poison():
    """Fills what torch.empty and its like return with NaN, so that unwritten memory shows.

    PyTorch does so itself in its deterministic mode, below Python and for every device; patching
    torch.empty instead would leak into the tables that torch builds from its own names.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)

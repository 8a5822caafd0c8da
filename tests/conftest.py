"""Fixtures that every room's tests may use."""

import pytest
import torch


def _poisoned(make):
    def make_poisoned(*args, **kwargs):
        x = make(*args, **kwargs)
        if x.is_floating_point() and x.device.type != "meta":
            x.detach().fill_(torch.nan)
        return x

    return make_poisoned


@pytest.fixture
def nan_poison(monkeypatch):
    """Fills what torch.empty and its like return with NaN, so that unwritten memory shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))

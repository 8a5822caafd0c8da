"""Settings of every test run; fixtures are in tests/conftest.py."""

import os

# Tests work on small tensors, some on several ranks at once, where more threads only contend.
# torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


def pytest_collection_modifyitems(config, items):
    if os.environ.get("GEM_LONG") != "1" and "long" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set GEM_LONG=1 or give -m long"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))

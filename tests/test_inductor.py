"""gem keeps Inductor in its caller's process where fbtriton would let its workers fail."""

import importlib.metadata
import os
import sys
import types

import pytest

from gem.inductor import VARIABLE, compile_in_process


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A folder with a GPU's device file; nothing in the environment speaks of threads."""
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "nvidia0").touch()
    return tmp_path


def threads():
    return os.environ[VARIABLE]


def test_one_thread_where_fbtriton_meets_a_gpu(device, monkeypatch):
    config = types.SimpleNamespace(compile_threads=8)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    monkeypatch.setattr(importlib.metadata, "version", {"fbtriton": "3.7.4"}.__getitem__)
    compile_in_process(device)
    assert threads() == "1" and config.compile_threads == 1


def test_the_environment_is_stronger(device, monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    compile_in_process(device)
    assert threads() == "4"


def test_nothing_changes_without_a_gpu(device):
    (device / "nvidia0").rename(device / "nvidiactl")
    compile_in_process(device)
    assert threads() == ""


def test_nothing_changes_beside_stock_triton(device, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    compile_in_process(device)
    assert threads() == ""

"""Runs `test_kernels` in Triton's interpreter, on a CPU.

TRITON_INTERPRET acts when a kernel is defined, so that this needs a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_triton_backend_in_the_interpreter():
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/attention/test_kernels.py",
        ],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > 70, run.stdout[-2000:]
    print(run.stdout.splitlines()[-1])

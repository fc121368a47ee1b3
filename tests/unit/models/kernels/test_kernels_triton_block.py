"""Triton kernels in Triton's interpreter, if Triton is installed, against torch operations.

Torch for CPUs does not include Triton. If it is installed, this test needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).parents[3] / "kernel_cases.py"


def test_kernels_match_torch_operations():
    """The dtype is float32. A subprocess is used because Triton reads the variable on import."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run(
        [sys.executable, CASES], env=environment, capture_output=True, text=True, check=False
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in ended.stderr:
        pytest.skip("the interpreter of Triton 3.6 makes integers of arrays, which numpy refuses since 2.4")
    assert ended.returncode == 0, ended.stderr
    assert "cross_entropy and scale" in ended.stdout
    assert len(ended.stdout.splitlines()) == 30

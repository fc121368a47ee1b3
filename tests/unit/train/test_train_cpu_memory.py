"""A CPU rank keeps freed memory, unless the user has tuned malloc."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.train.cpu_memory import TUNED_BY, keep_freed_memory

COUNT_FAULTS = """
import resource, sys
import numpy as np
from meshwright.train.cpu_memory import keep_freed_memory

assert keep_freed_memory() == (sys.argv[1] == "keep")
for _ in range(2):
    np.empty(64 << 20, np.uint8).fill(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.empty(64 << 20, np.uint8).fill(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""A child: the setting holds for the process."""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(("mode", "tuned"), [("keep", {}), ("leave", {"GLIBC_TUNABLES": ""})])
def test_large_blocks_are_used_again_without_page_faults(monkeypatch, mode, tuned):
    for name in TUNED_BY:
        monkeypatch.delenv(name, raising=False)
    for name, value in tuned.items():
        monkeypatch.setenv(name, value)
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, mode], capture_output=True, text=True, check=True, timeout=60
    )
    faults = int(ran.stdout)
    assert faults < 10 if mode == "keep" else faults > 30, "or huge pages of 2 MiB each"


@pytest.mark.parametrize("name", TUNED_BY)
def test_malloc_that_the_user_has_tuned_is_left_alone(name):
    assert not keep_freed_memory({name: "1"})

"""The supervisor's own parts, without ranks."""

import signal
import subprocess
import sys

import pytest

STARTED = """
from multiprocessing import forkserver
from pathlib import Path
from meshwright.launch import local

local._start_forkserver()
print(Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_fork_server_is_born_deaf_to_group_signals():
    """Ctrl-C reaches the whole group: an interpreter that is only just starting must not answer it."""
    status = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True
    ).stdout
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert blocked >> (number - 1) & 1, number

"""A run folder has one writer; the lock is released when its process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from meshwright.core.errors import UserError
from meshwright.launch.lock import RunLock

HOLD = """
import sys, signal
from pathlib import Path
from meshwright.launch.lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_a_second_command_is_refused_with_the_process_of_the_first(tmp_path):
    with RunLock.take(tmp_path), pytest.raises(UserError) as caught:
        RunLock.take(tmp_path)
    assert caught.value.problems[0].code == "run-busy"
    assert str(os.getpid()) in str(caught.value)


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError):
            RunLock.take(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with RunLock.take(tmp_path):
        pass

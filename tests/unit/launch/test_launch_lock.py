"""A run folder has one writer; the lock is released when its process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

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


def test_the_lock_of_checkpoints_is_that_of_the_folder_however_it_is_spelled(tmp_path, monkeypatch):
    """A link to the folder, a relative path, and one with dots."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    spellings = (folder, Path("checkpoints"), tmp_path / "link", folder / ".." / "checkpoints")
    for first in spellings:
        with RunLock.take_checkpoints(first):
            for second in spellings:
                with pytest.raises(UserError) as caught:
                    RunLock.take_checkpoints(second)
                assert caught.value.problems[0].code == "checkpoint-dir-busy"
                assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """It would be truncated: a folder of somebody else must not choose which file is overwritten."""
    (tmp_path / "precious").write_text("text")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock.take(tmp_path)
    assert (tmp_path / "precious").read_text() == "text"


def test_a_file_of_another_program_with_the_name_of_the_lock_is_not_overwritten(tmp_path):
    (tmp_path / "lock").write_text("yarn")
    with pytest.raises(OSError, match="is a file of another program"):
        RunLock.take_checkpoints(tmp_path)
    assert (tmp_path / "lock").read_text() == "yarn"
    (tmp_path / "lock").write_text("1234 on some-host.example\n")
    with RunLock.take(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} on {socket.gethostname()}\n"

"""Ports and clocks of real processes: found, disturbed and shifted."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from meshwright.elastic.faults.clock import ShiftedClocks, build_clock_library
from meshwright.elastic.faults.hostile import attack
from meshwright.elastic.faults.processes import Port, Resources, list_ports

PRINT_CLOCKS = """
import os, sys, time
print(os.getpid(), flush=True)
for _ in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_listening_ports_of_a_process_are_found_with_their_address(listener):
    port = listener.getsockname()[1]
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        found = {one.port: one.is_loopback for one in list_ports([os.getpid()])}
        assert found[port] is True
        assert found[open_to_all.getsockname()[1]] is False
    with subprocess.Popen([sys.executable, "-c", PRINT_CLOCKS], stdin=subprocess.PIPE) as other:
        assert list_ports([other.pid]) == []


def test_ipv6_loopback_is_loopback():
    assert Port("::1", 1, 1).is_loopback
    assert not Port("::", 1, 1).is_loopback


def test_hostile_connections_are_made_and_a_leak_is_measured(listener):
    """A server that never closes its connections leaks a file for each."""
    kept = []

    def accept():
        while True:
            try:
                kept.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    gc.collect()  # files that nobody holds would be closed during the attack
    found = attack([os.getpid()], None, 50, seed=1)
    assert found.connections == 50
    deadline = time.monotonic() + 10
    while len(kept) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found.file_growth([os.getpid()]) >= 50
    for one in kept:
        one.close()
    assert found.file_growth([os.getpid()]) <= 1
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_process_that_is_gone_has_no_resources():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert Resources.read(ended.pid) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wall_clock_of_one_process_is_shifted_and_its_monotonic_clock_is_not(tmp_path):
    library = build_clock_library(tmp_path)
    clocks = ShiftedClocks(library, tmp_path / "table")
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_CLOCKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**clocks.environment},
    ) as process:
        pid = int(process.stdout.readline())

        def read():
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        assert [abs(value) < 30 for value in read()] == [True, True]
        for by_s in (-3600, 3600):
            clocks.shift(pid, by_s)
            wall, monotonic = read()
            assert abs(wall - by_s) < 30
            assert abs(monotonic) < 30
        process.stdin.close()


def test_without_a_compiler_the_reason_is_returned(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_clock_library(tmp_path) == "there is no C compiler: cc was not found"

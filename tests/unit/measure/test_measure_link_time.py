"""How long real TCP connections were busy sending."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from meshwright.measure.link_time import LinkMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO of Linux")


@pytest.fixture
def pair():
    """A connection between two addresses of this host."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.3", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0)) as here:
            there, _ = listener.accept()
            with there:
                yield here, there


def send(here, there, count, pause_s=0.0):
    def read():
        time.sleep(pause_s)
        left = count
        while left > 0:
            left -= len(there.recv(2**20))

    reader = threading.Thread(target=read)
    reader.start()
    here.sendall(bytes(count))
    reader.join()


def test_bytes_are_counted_since_the_last_report(pair):
    meter = LinkMeter()
    assert meter.take() == {}  # found now, and counted from now on
    send(*pair, 3_000_000)
    time.sleep(0.05)  # until all is acknowledged
    seconds, sent = meter.take()["127.0.0.2>127.0.0.3"]
    assert sent == 3_000_000
    assert 0 <= seconds < 1
    assert meter.take() == {}


def test_a_receiver_that_does_not_read_is_not_the_network(pair):
    """That rank is late by itself; the connection to it is not slow."""
    meter = LinkMeter()
    meter.take()
    send(*pair, 20_000_000, pause_s=0.5)
    time.sleep(0.05)
    seconds, sent = meter.take()["127.0.0.2>127.0.0.3"]
    assert sent == 20_000_000
    assert seconds < 0.4


def test_connections_stay_open_and_closed_ones_are_forgotten(pair):
    meter = LinkMeter()
    meter.take()
    here, there = pair
    here.close()
    assert there.recv(1) == b"", "the meter holds no copy of the connection"
    assert meter.take() == {}
    with socket.socket() as other:  # may have the same descriptor
        assert meter.take() == {}
        assert other.fileno() >= 0


def test_connections_inside_the_host_do_not_count():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as here,
        listener.accept()[0] as there,
    ):
        meter = LinkMeter()
        meter.take()
        send(here, there, 1_000_000)
        assert meter.take() == {}

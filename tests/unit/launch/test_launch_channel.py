"""Messages between processes: split, joined, too long, not JSON."""

from __future__ import annotations

import socket
import struct

import pytest

from meshwright.launch.channel import MAX_BYTES, Channel


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    yield Channel(here), there
    here.close()
    there.close()


def test_messages_arrive_whole_however_they_are_split(pair):
    channel, there = pair
    sender = Channel(there)
    channel.setblocking(False)
    assert channel.receive() == []
    content = struct.pack("!I", 8) + b'{"a": 1}'
    there.sendall(content[:6])
    assert channel.receive() == []
    there.sendall(content[6:])
    sender.send({"b": [2]})
    assert channel.receive() == [{"a": 1}, {"b": [2]}]


def test_queued_output_waits_for_a_slow_reader(pair):
    """The agent never waits for a supervisor that is stopped."""
    channel, there = pair
    channel.setblocking(False)
    message = {"text": "x" * 2**20}
    channel.queue(message)
    assert channel.has_output
    reader, received = Channel(there), []
    while not received:
        channel.flush()
        received += reader.receive()
    assert received == [message]
    assert not channel.has_output


@pytest.mark.parametrize(
    "content",
    [struct.pack("!I", MAX_BYTES + 1), struct.pack("!I", 3) + b"abc", struct.pack("!I", 2) + b"[]", b""],
)
def test_anything_else_closes_the_channel(pair, content):
    """Too long, not JSON, not an object, closed."""
    channel, there = pair
    there.sendall(content)
    there.close()
    with pytest.raises(EOFError):
        channel.receive()

"""Agents join with a token that is never sent. Hostile connections change nothing and leak nothing."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from file_limits import no_free_fd
from meshwright.core.errors import RunFailedError, UserError
from meshwright.launch import join as join_module
from meshwright.launch.channel import Channel
from meshwright.launch.join import MOST_PENDING, JoinListener, join
from meshwright.launch.network import Address, find_interface
from meshwright.launch.token_file import create_token, read_token

TOKEN = b"a token of the run, long enough"


@pytest.fixture
def listener():
    opened = JoinListener(Address("127.0.0.1", 0), TOKEN)
    yield opened
    opened.close()


def accept_one(listener, limit_s=10):
    """Serve the listener until an agent has joined."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.select(0.1)
        if joined := listener.accept():
            return joined[0]
    return None


def connect(listener):
    return socket.create_connection((listener.address.host, listener.address.port), timeout=10)


def send_frame(connection, content):
    connection.sendall(struct.pack("!I", len(content)) + content)


def read_frame(connection):
    (length,) = struct.unpack("!I", read_exactly(connection, 4))
    return read_exactly(connection, length)


def read_exactly(connection, count):
    content = b""
    while len(content) < count:
        content += (part := connection.recv(count - len(content)))
        assert part, "closed"
    return content


def join_in_thread(listener, token=TOKEN):
    found: list[object] = []

    def run():
        try:
            found.append(join(listener.address, token, 5.0))
        except (UserError, RunFailedError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_an_agent_with_the_token_joins_and_messages_are_signed(listener):
    thread, found = join_in_thread(listener)
    supervisor = accept_one(listener)
    thread.join()
    (agent,) = found
    agent.send({"is": "join"})
    supervisor.setblocking(True)
    assert supervisor.receive() == [{"is": "join"}]
    supervisor.send({"do": "prepare"})
    assert agent.receive() == [{"do": "prepare"}]
    agent.socket.sendall(struct.pack("!I", 40) + b"0" * 32 + b'{"a": 1}')
    with pytest.raises(EOFError, match="wrong signature"):
        supervisor.receive()
    agent.close()
    supervisor.close()


def test_a_wrong_token_is_refused_on_both_ends(listener):
    thread, found = join_in_thread(listener, b"another token, also long enough")
    assert accept_one(listener, 2) is None
    thread.join()
    (error,) = found
    assert error.problems[0].code == "node-token"
    assert listener.refused == 1


def test_an_agent_obeys_no_supervisor_without_the_token():
    """A false supervisor accepts any proof and answers with a random one."""
    false = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = false.accept()
        with connection:
            send_frame(connection, json.dumps({"meshwright": 1, "nonce": "00"}).encode())
            read_frame(connection)
            send_frame(connection, json.dumps({"proof": secrets.token_hex(32)}).encode())
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(UserError) as caught:
        join(Address("127.0.0.1", false.getsockname()[1]), TOKEN, 5.0)
    thread.join()
    false.close()
    assert caught.value.problems[0].code == "node-token"


def test_nobody_at_the_address_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(RunFailedError) as caught:
        join(Address("127.0.0.1", port), TOKEN, 0.0)
    assert caught.value.problems[0].code == "node-no-supervisor"


def record_handshake(listener):
    """What a real agent sends."""
    thread, found = join_in_thread(listener)
    sent = []
    original = Channel.send

    def recording(self, message):
        sent.append(message)
        original(self, message)

    Channel.send = recording
    try:
        channel = accept_one(listener)
        thread.join()
    finally:
        Channel.send = original
    channel.close()
    found[0].close()
    return json.dumps(sent[0]).encode()


def hostile_contents(recorded):
    """What strangers send: nothing, noise, a huge length, half a message, nesting, a replay, a command."""
    yield b""
    yield os.urandom(64)
    yield struct.pack("!I", 2**31) + b"x" * 100
    yield struct.pack("!I", 900) + b"{"
    yield struct.pack("!I", 1000) + b"[" * 1000
    yield struct.pack("!I", len(recorded)) + recorded
    command = json.dumps({"do": "start", "rank": 0, "entry": "os:system"}).encode()
    yield struct.pack("!I", len(command)) + command
    proof = json.dumps({"nonce": "0", "proof": ["not", "a", "string"]}).encode()
    yield struct.pack("!I", len(proof)) + proof
    proof = json.dumps({"nonce": "0", "proof": "é" * 64}).encode()
    yield struct.pack("!I", len(proof)) + proof


def count_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_listener_without_free_file_descriptors_does_not_wake_the_supervisor(listener):
    """The agent waits, and joins when there is a file descriptor again."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        with socket.socket() as stranger, no_free_fd():
            stranger.connect(("127.0.0.1", listener.address.port))
            assert selector.select(10), "a connection waits"
            assert listener.accept() == []
            assert selector.select(0) == []
    thread, found = join_in_thread(listener)
    channel = accept_one(listener)
    thread.join()
    assert channel is not None
    for one in (channel, *found):
        one.close()


def test_600_hostile_connections_leave_nothing_behind(listener, monkeypatch):
    monkeypatch.setattr(join_module, "HANDSHAKE_S", 0.3)
    recorded = record_handshake(listener)
    contents = list(hostile_contents(recorded))
    fds, rss = count_fds(), rss_bytes()
    for batch in range(6):
        strangers = []
        for number in range(100):
            strangers.append(connect(listener))
            assert listener.accept() == []
            with contextlib.suppress(OSError):  # closed: too many are in the handshake
                strangers[-1].sendall(contents[(batch + number) % len(contents)])
        assert len(listener._pending) <= MOST_PENDING
        deadline = time.monotonic() + 10
        while listener._pending and time.monotonic() < deadline:
            assert listener.accept() == [], "a stranger has joined"
        for stranger in strangers:
            stranger.close()
    assert listener.refused >= 600
    assert count_fds() == fds
    assert rss_bytes() - rss < 50e6
    thread, found = join_in_thread(listener)
    channel = accept_one(listener)
    thread.join()
    assert channel is not None, "an agent with the token still joins"
    channel.close()
    found[0].close()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    path.write_text("0" * 64)
    path.chmod(mode)
    with pytest.raises(UserError) as caught:
        read_token(path)
    assert caught.value.problems[0].code == "token-file-mode"


def test_a_token_is_created_once_with_mode_0600(tmp_path):
    path = tmp_path / "token"
    token = create_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) == 64
    assert create_token(path) == read_token(path) == token
    with pytest.raises(UserError) as caught:
        read_token(tmp_path / "other")
    assert caught.value.problems[0].code == "token-file-missing"
    path.write_text("short")
    with pytest.raises(UserError) as caught:
        read_token(path)
    assert caught.value.problems[0].code == "token-file-short"


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:70000"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(UserError) as caught:
        Address.parse(text, "join")
    assert caught.value.problems[0].code == "node-address"


def test_addresses_are_read_and_written():
    assert str(Address.parse("[::1]:29500", "join")) == "[::1]:29500"
    assert Address.parse("10.0.0.1:29500", "join") == Address("10.0.0.1", 29500)
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.7") is None

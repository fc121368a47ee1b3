"""The status server: answers with the token only, survives hostile clients, holds nothing for long."""

from __future__ import annotations

import http.client
import os
import socket
import time
from http import HTTPStatus
from pathlib import Path

import pytest

from file_limits import no_free_fd
from meshwright.launch import status_server
from meshwright.launch.network import Address
from meshwright.launch.status_server import JSON, MOST_CONNECTIONS, Reply, StatusServer

TOKEN = b"0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN.decode()}"}


@pytest.fixture
def server():
    def broken():
        raise RuntimeError("a page with a bug")

    pages = {"/health": lambda: Reply(HTTPStatus.OK, '{"ok":true}\n', JSON), "/broken": broken}
    found = StatusServer(Address("127.0.0.1", 0), TOKEN, pages)
    yield found
    found.close()


def count_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def get(server, path="/health", headers=BEARER, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=10)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def send(server, content):
    """Send bytes; returns all that comes back."""
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=10) as raw:
        try:
            raw.sendall(content)
            raw.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: raw.recv(4096), b""))
        except OSError:  # the server has closed the connection
            return b""


def status_of(content):
    return int(content.split()[1]) if content else None


def test_a_page_is_served_with_the_token(server):
    reply, body = get(server)
    assert (reply.status, body) == (200, b'{"ok":true}\n')
    assert reply.getheader("Content-Type") == JSON
    assert reply.getheader("Cache-Control") == "no-store"
    assert reply.getheader("Connection") == "close"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer 0123456789abcdeX"},
        {"Authorization": "Bearer 0123456789abcdef0"},
        {"Authorization": "Basic 0123456789abcdef"},
        {"Authorization": "0123456789abcdef"},
        {"Authorization": "Bearer \xff\xfe"},
    ],
)
def test_another_token_is_refused(server, headers):
    reply, body = get(server, headers=headers)
    assert reply.status == 401
    assert reply.getheader("WWW-Authenticate") == "Bearer"
    assert TOKEN not in body
    assert b"true" not in body


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("localhost", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example:{port}", 403),
        ("127.0.0.1:1", 403),
        ("", 403),
    ],
)
def test_the_host_must_be_this_machine(server, host, status):
    reply, _ = get(server, headers={**BEARER, "Host": host.format(port=server.address.port)})
    assert reply.status == status


def test_a_request_of_a_page_in_a_browser_is_refused(server):
    assert get(server, headers={**BEARER, "Origin": "http://evil.example"})[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_allowed(server, method):
    assert get(server, method=method)[0].status in (400, 405)


@pytest.mark.parametrize("path", ["/", "/health/", "/health?x=1", "/../health", "//health", "/etc/passwd"])
def test_other_paths_are_not_found(server, path):
    assert get(server, path)[0].status == 404


def test_a_page_with_an_error_does_not_end_the_server(server, capfd):
    assert get(server, "/broken")[0].status == 500
    assert "a page with a bug" in capfd.readouterr().err
    assert get(server)[0].status == 200


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + TOKEN


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), None),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"\r\nHost: localhost\r\n\r\n", 400),
        (HEAD + b"\r\nno colon\r\n\r\n", 400),
        (HEAD + b"\r\n folded: x\r\n\r\n", 400),
        (HEAD + b"\r\nContent-Length: 5\r\n\r\nhello", 400),
        (HEAD + b"\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"\r\n\r\n" + HEAD + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 9000, 431),
        (b"GET /" + b"a" * 100_000, 431),
        (HEAD + b"\r\n\r\n", 200),
    ],
)
def test_hostile_requests(server, content, status):
    assert status_of(send(server, content)) in (status, None if status == 431 else status)
    assert get(server)[0].status == 200


def test_clients_that_send_nothing_do_not_block_others(server, monkeypatch):
    """More than the server holds: the rest is closed, and after the deadline it answers again."""
    monkeypatch.setattr(status_server, "CONNECTION_S", 0.3)
    before = count_files()
    idle = [socket.create_connection(("127.0.0.1", server.address.port)) for _ in range(2 * MOST_CONNECTIONS)]
    for one in idle:
        one.settimeout(10)
        assert one.recv(1) == b"", "closed by the server"
        one.close()
    assert get(server)[0].status == 200
    assert count_files() <= before + 1


def test_a_slow_sender_is_cut_off(server, monkeypatch):
    """One byte at a time does not extend the deadline."""
    monkeypatch.setattr(status_server, "CONNECTION_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=0.05) as slow:
        ended = False
        for byte in HEAD * 10:
            try:
                slow.send(bytes([byte]))
                ended = slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            if ended:
                break
        assert ended


def test_random_bytes_change_nothing(server):
    for _ in range(100):
        send(server, os.urandom(200) + b"\r\n\r\n")
    assert get(server)[0].status == 200


def test_a_server_without_free_file_descriptors_does_not_spin(server, monkeypatch):
    """The client waits, and gets its reply when there is a file descriptor again."""
    rounds = []
    select = server._selector.select
    monkeypatch.setattr(server._selector, "select", lambda *timeout: rounds.append(1) or select(*timeout))
    with socket.socket() as client:
        client.settimeout(10)
        with no_free_fd():
            client.connect(("127.0.0.1", server.address.port))
            client.sendall(HEAD + b"\r\n\r\n")
            time.sleep(0.3)  # lets a loop that spins do so
            assert len(rounds) < 10
        assert status_of(client.recv(4096)) == 200


def test_an_address_in_use_is_an_error(server):
    with pytest.raises(OSError, match="in use"):
        StatusServer(server.address, TOKEN, {})

"""gloo connects through a store whose requests are relayed to one server, as on several nodes."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import threading
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.launch.channel import Channel
from meshwright.launch.requests import Requests
from meshwright.launch.store_server import MOST_VALUE_BYTES, StoreServer
from meshwright.parallel.relayed_store import RelayedStore

LIMIT = timedelta(seconds=60)


class Link:
    """A rank's end: reads replies in a thread, as the link to an agent does."""

    def __init__(self, connection):
        self.channel = Channel(connection)
        self.requests = Requests(self.channel)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        while True:
            for message in self.channel.receive():
                self.requests.answer(message["reply"])


def run_rank(rank, world_size, connection, work, results):
    try:
        results.put((rank, work(rank, world_size, RelayedStore(Link(connection), 3, LIMIT))))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def serve(connections, processes):
    """Answer the requests of all ranks until they have exited."""
    server, selector = StoreServer(), selectors.DefaultSelector()
    server.begin(3)
    channels = [Channel(connection) for connection in connections]
    for rank, channel in enumerate(channels):
        selector.register(channel, selectors.EVENT_READ, rank)
    while any(process.is_alive() for process in processes):
        for key, _ in selector.select(0.1):
            try:
                requests = channels[key.data].receive()
            except EOFError:
                selector.unregister(key.fileobj)
                continue
            for request in requests:
                for rank, reply in server.handle(key.data, request):
                    channels[rank].send({"reply": reply})
    for channel in channels:
        channel.close()


def run_ranks(world_size, work):
    """The results of ``work(rank, world_size, store)``, by rank."""
    context = multiprocessing.get_context("fork")
    pairs, results = [socket.socketpair() for _ in range(world_size)], context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, world_size, pairs[rank][1], work, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for _, there in pairs:
        there.close()
    serve([here for here, _ in pairs], processes)
    found = dict(results.get(timeout=60) for _ in processes)
    results.close()
    return [found[rank] for rank in range(world_size)]


def all_reduce(rank, world_size, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    pair = dist.new_group([0, 1], timeout=LIMIT)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    if rank < 2:
        dist.all_reduce(value, group=pair)
    dist.destroy_process_group()
    return value.item()


def use_store(rank, world_size, store):
    store.set(f"key-{rank}", b"\x00value")
    store.wait([f"key-{other}" for other in range(world_size)], LIMIT)
    counted = store.add("sum", rank + 1)
    store.append("text", "ab")
    store.set(f"done-{rank}", "")
    store.wait([f"done-{other}" for other in range(world_size)])
    refused = ""
    try:
        store.set("large", b"x" * (MOST_VALUE_BYTES + 1))
    except Exception as error:
        refused = str(error)
    return {
        "get": store.get("key-0"),
        "sum": store.add("sum", 0),
        "counted": counted,
        "missing": store.check(["nothing"]),
        "text": store.get("text"),
        "swapped": store.compare_set(f"own-{rank}", "", "new"),
        "kept": store.compare_set(f"own-{rank}", "old", "newer"),
        "deleted": (store.delete_key(f"own-{rank}"), store.delete_key(f"own-{rank}")),
        "refused": refused,
    }


def test_gloo_all_reduces_over_a_relayed_store():
    assert run_ranks(3, all_reduce) == [12.0, 12.0, 6.0]


def test_the_store_follows_torch():
    first, second = run_ranks(2, use_store)
    for found in (first, second):
        assert isinstance(found, dict), found
        assert (found["get"], found["sum"], found["text"]) == (b"\x00value", 3, b"abab")
        assert (found["swapped"], found["kept"], found["deleted"]) == (b"new", b"new", (True, False))
        assert not found["missing"]
        assert "the store takes" in found["refused"]
    assert sorted((first["counted"], second["counted"]))[-1] == 3


def test_a_request_of_another_generation_is_refused():
    server = StoreServer()
    server.begin(4)
    request = {"id": 1, "generation": 3, "op": "set", "keys": ["a"], "values": ["eA=="]}
    ((rank, reply),) = server.handle(0, request)
    assert (rank, reply["id"]) == (0, 1)
    assert "generation 3 is over" in reply["error"]


@pytest.mark.parametrize(
    "request_fields",
    [
        {"op": "exec", "keys": ["a"]},
        {"op": "set", "keys": ["a" * 2000], "values": ["eA=="]},
        {"op": "set", "keys": ["a"], "values": ["not base64!"]},
        {"op": "set", "keys": ["a"], "values": []},
        {"op": "add", "keys": ["a"], "amount": "many"},
        {"op": "get", "keys": 5},
        {},
    ],
)
def test_a_malformed_request_is_answered_with_an_error(request_fields):
    server = StoreServer()
    server.begin(0)
    ((_, reply),) = server.handle(0, {"id": 7, "generation": 0, **request_fields})
    assert reply["error"]

"""Backup replicas: the board of finished slices."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.parallel import backup_replicas
from meshwright.parallel.backup_replicas import SliceBoard


def boards(count, slices, monkeypatch):
    """The boards of some replicas, over one real store."""
    monkeypatch.setattr(backup_replicas, "POLL_S", 0.0)
    store = dist.HashStore()
    found = [SliceBoard(store, slices) for _ in range(count)]
    for board in found:
        board.begin(1)
    return store, found


def test_the_first_replica_holds_a_slice(monkeypatch):
    _, (first, second, third) = boards(3, 2, monkeypatch)
    assert not third.is_finished(0)
    assert first.finish(0)
    assert not second.finish(0)
    assert third.is_finished(0)
    assert not third.are_all_finished()
    assert second.finish(1)
    assert third.are_all_finished()


def test_steps_are_apart_and_old_keys_are_deleted(monkeypatch):
    store, (first, second) = boards(2, 2, monkeypatch)
    for step in range(2, 50):
        assert first.finish(0)
        assert second.finish(1)
        first.begin(step)
        second.begin(step)
        assert not first.are_all_finished()
    assert store.num_keys() <= 4


class LostStore:
    """A store whose supervisor is gone."""

    def __init__(self):
        self.questions = 0

    def _ask(self, *_):
        self.questions += 1
        raise dist.DistStoreError("Timed out")

    add = check = delete_key = _ask


def test_without_the_store_every_replica_finishes_its_slice(monkeypatch):
    """And it does not ask again for a while: each question takes its time limit."""
    monkeypatch.setattr(backup_replicas, "POLL_S", 0.0)
    store = LostStore()
    board = SliceBoard(store, 2)
    board.begin(1)
    assert not board.are_all_finished()
    assert board.finish(0)
    assert not board.is_finished(1)
    assert store.questions == 1

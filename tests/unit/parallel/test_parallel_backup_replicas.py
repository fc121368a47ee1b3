"""Backup replicas: the finished slices of a step, in a store."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.parallel import backup_replicas
from meshwright.parallel.backup_replicas import FinishedSlices


def replica_views(count, slices, monkeypatch):
    """The finished slices as some replicas see them, over one real store."""
    monkeypatch.setattr(backup_replicas, "POLL_S", 0.0)
    store = dist.HashStore()
    found = [FinishedSlices(store, slices) for _ in range(count)]
    for view in found:
        view.begin(1)
    return store, found


def test_the_first_replica_holds_a_slice(monkeypatch):
    _, (first, second, third) = replica_views(3, 2, monkeypatch)
    assert not third.is_finished(0)
    assert first.add(0)
    assert not second.add(0)
    assert third.is_finished(0)
    assert not third.are_all_finished()
    assert second.add(1)
    assert third.are_all_finished()


def test_steps_are_apart_and_old_keys_are_deleted(monkeypatch):
    store, (first, second) = replica_views(2, 2, monkeypatch)
    for step in range(2, 50):
        assert first.add(0)
        assert second.add(1)
        first.begin(step)
        second.begin(step)
        assert not first.are_all_finished()
    assert store.num_keys() <= 4


class LostStore:
    """A store whose supervisor is gone."""

    def __init__(self):
        self.queries = 0

    def _fail(self, *_):
        self.queries += 1
        raise dist.DistStoreError("Timed out")

    add = check = delete_key = _fail


def test_without_the_store_every_replica_finishes_its_slice(monkeypatch):
    """And it does not query the store again for a while: each query takes its time limit."""
    monkeypatch.setattr(backup_replicas, "POLL_S", 0.0)
    store = LostStore()
    finished_slices = FinishedSlices(store, 2)
    finished_slices.begin(1)
    assert not finished_slices.are_all_finished()
    assert finished_slices.add(0)
    assert not finished_slices.is_finished(1)
    assert store.queries == 1

"""Checkpoints in an object store, and copies in several stores by quorum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from checkpoint_files import TENSORS, build_write, manifest_of, save
from meshwright.checkpoint import store_lock
from meshwright.checkpoint.copying import copy_checkpoint
from meshwright.checkpoint.drafts import finish_drafts, list_drafts, new_draft
from meshwright.checkpoint.manifest import (
    MANIFEST,
    best_checkpoint,
    list_checkpoints,
    mark_best,
    read_manifest,
    rotate,
)
from meshwright.checkpoint.replicated_write import ReplicatedWrite
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.store_lock import StoreLock
from meshwright.checkpoint.stores import CheckpointStores, find_newest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import UserError
from meshwright.core.object_path import ObjectPath, StoreError, parse_location


@pytest.fixture
def bucket(s3):
    found = parse_location(s3)
    assert isinstance(found, ObjectPath)
    return found


class Killed(BaseException):
    """Stands for SIGKILL of a process that talks to the store."""


def save_again(root, step, attempt):
    """Save a step in another attempt of the run."""
    write = build_write(root, step=step)
    write.draft = new_draft(root, step, 0, attempt)
    write.start()
    write.wait()
    assert write.error is None
    return write.path


def require_equal(checkpoint):
    saved = CheckpointReader(checkpoint)
    for name, tensor in TENSORS.items():
        assert torch.equal(saved.read(name), tensor), name


def test_ranks_save_to_an_object_store_and_any_part_is_read_back(bucket):
    path = save(bucket, ranks=2, small_files={"tokenizer.json": b"{}"})
    assert read_manifest(path).world_size == 2
    require_equal(path)
    assert sorted(path.list_sizes()) == [
        MANIFEST,
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "tokenizer.json",
    ]


def test_a_changed_object_is_found(bucket):
    path = save(bucket, ranks=2)
    shard = path / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(UserError, match="checksum of rank-00001"):
        read_manifest(path)


class KillAtRequest:
    """Kills the thread of one rank at its n-th request that changes the store: it does nothing more."""

    def __init__(self, monkeypatch, victim, when):
        self.victim, self.when, self.count, self.dead = f"rank {victim}", when, 0, False
        for name in ("write_bytes", "create", "unlink", "remove_below"):
            monkeypatch.setattr(ObjectPath, name, self._wrap(getattr(ObjectPath, name)))

    def _wrap(self, original):
        def request(path, *args, **kwargs):
            if threading.current_thread().name == self.victim:
                self.dead = self.dead or self.count == self.when
                self.count += 1
                if self.dead:
                    raise Killed
            return original(path, *args, **kwargs)

        return request


def save_with_kill(root, monkeypatch, victim, when):
    """Save step 2 on two ranks, one of which is killed; then let a successor finish what is there."""
    save(root, step=1)
    writes = [build_write(root, rank, 2, 2) for rank in range(2)]
    with monkeypatch.context() as patched:
        kill = KillAtRequest(patched, victim, when)
        for rank, write in enumerate(writes):
            write._thread.name = f"rank {rank}"
            write.start()
        writes[victim].wait()
        if kill.dead:  # the supervisor ends the generation
            writes[1 - victim].cancel()
        writes[1 - victim].wait()
    finish_drafts(root)
    return kill.dead


@pytest.mark.parametrize("victim", [0, 1])
def test_a_participant_may_be_killed_at_every_request(bucket, monkeypatch, victim):
    """The new checkpoint is whole or absent; the earlier one stays. Both ends occur for the coordinator."""
    counts = set()
    for when in range(20):
        root = bucket / str(when)
        dead = save_with_kill(root, monkeypatch, victim, when)
        assert not list_drafts(root)
        newest, refused = find_newest(root)
        assert not refused
        require_equal(newest)
        counts.add(len(list_checkpoints(root)))
        if not dead:
            break
    assert not dead, "it was killed at every request"
    assert counts == {1, 2}


def test_a_step_that_is_saved_again_replaces_nothing_until_it_is_committed(bucket):
    old = save_again(bucket, 4, attempt=1)
    new = save_again(bucket, 4, attempt=2)
    assert old != new
    assert find_newest(bucket)[0] == new
    rotate(bucket, Retention(1), new)
    assert list_checkpoints(bucket) == [new]


def test_rotation_keeps_the_newest_and_the_best(bucket):
    paths = [save_again(bucket, step, attempt=1) for step in (1, 2, 3, 4)]
    mark_best(bucket, paths[1])
    assert best_checkpoint(bucket) == paths[1].name
    rotate(bucket, Retention(1), paths[3])
    assert list_checkpoints(bucket) == [paths[1], paths[3]]


def build_stores(*roots, quorum, read="primary"):
    return CheckpointStores(tuple(roots), quorum, read)


def save_to(stores, step=1, saved_at=1.0):
    writes = [build_write(root, step=step) for root in stores.roots]
    for write in writes:
        write.manifest = replace(write.manifest, saved_at=saved_at)
    write = ReplicatedWrite(writes, stores.quorum)
    write.start()
    write.wait()
    return write


@pytest.fixture
def broken_store(monkeypatch):
    """A store whose bucket does not exist."""
    return parse_location("s3://no-such-bucket/x")


def test_a_checkpoint_is_committed_when_a_quorum_has_it(bucket, tmp_path, broken_store):
    write = save_to(build_stores(tmp_path / "one", bucket, broken_store, quorum=2))
    assert write.error is None
    assert write.path == tmp_path / "one" / "step-00000001"
    assert [str(copy) for copy in write.copies] == [
        str(tmp_path / "one/step-00000001"),
        f"{bucket}/step-00000001",
    ]
    assert write.failures == {
        "s3://no-such-bucket/x": "s3://no-such-bucket/x/step-00000001: the bucket does not exist"
    }


def test_without_a_quorum_it_is_not_committed(bucket, broken_store):
    write = save_to(build_stores(bucket, broken_store, quorum=2))
    assert write.path is None
    assert "1 of 2 stores have it, and the quorum is 2" in str(write.error)


@pytest.mark.parametrize("read", ["primary", "any", "nearest"])
def test_the_newest_good_copy_of_any_store_is_read(bucket, tmp_path, read):
    """The first store missed the last save; the second one's copy of it is damaged."""
    first, second, third = tmp_path / "one", bucket, tmp_path / "three"
    save_to(build_stores(first, second, third, quorum=2), step=1)
    save_to(build_stores(second, third, quorum=2), step=2, saved_at=2.0)
    (second / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    found, refused = build_stores(first, second, third, quorum=2, read=read).find_newest()
    assert found == third / "step-00000002"
    assert all("step-00000002" in sentence and str(second) in sentence for sentence in refused)


def test_the_read_strategies_choose_among_good_copies(bucket, tmp_path, monkeypatch):
    far, near = bucket, tmp_path / "near"
    save_to(build_stores(far, near, quorum=2))
    original = ObjectPath.glob
    monkeypatch.setattr(ObjectPath, "glob", lambda self, pattern: _slowly(original(self, pattern)))
    assert build_stores(far, near, quorum=2, read="primary").find_newest()[0].parent == far
    assert build_stores(far, near, quorum=2, read="nearest").find_newest()[0].parent == near
    stores = build_stores(far, near, quorum=2, read="any")
    monkeypatch.setattr(ObjectPath, "glob", original)
    assert {stores.find_newest()[0].parent for _ in range(30)} == {far, near}


def _slowly(found):
    time.sleep(0.05)  # the distance
    return found


def test_nothing_is_resumed_when_unreached_stores_may_hold_a_newer_checkpoint(bucket, tmp_path, broken_store):
    save_to(build_stores(tmp_path, bucket, quorum=2))
    found, refused = build_stores(tmp_path, bucket, broken_store, quorum=2).find_newest()
    assert found.parent == tmp_path
    assert refused == ["s3://no-such-bucket/x: s3://no-such-bucket/x: the bucket does not exist"]
    with pytest.raises(UserError, match=r"1 of 3 .*\[store-unreachable\]"):
        build_stores(tmp_path, bucket, broken_store, quorum=1).find_newest()


def test_opening_stores_needs_a_quorum(tmp_path, broken_store):
    opened = build_stores(tmp_path / "one", tmp_path / "two", broken_store, quorum=2).open()
    with opened.locks:
        assert opened.locked == [str(tmp_path / "one"), str(tmp_path / "two")]
        (sentence,) = opened.notes
        assert "gets no copies until the run is resumed" in sentence
    with pytest.raises(UserError) as refused:
        build_stores(tmp_path / "one", broken_store, quorum=2).open()
    assert refused.value.problems[0].code == "store-unreachable"


def test_a_store_that_does_not_answer_is_not_damage(bucket, monkeypatch):
    """An older checkpoint must not be used because the newest one could not be read."""
    save_again(bucket, 1, attempt=1)
    newest = save_again(bucket, 2, attempt=1)
    original = ObjectPath.read_range

    def time_out(path, start, size):
        if path.parent == newest:
            raise StoreError(f"{path}: the server cannot be reached")
        return original(path, start, size)

    monkeypatch.setattr(ObjectPath, "read_range", time_out)
    with pytest.raises(UserError) as refused:
        find_newest(bucket)
    assert refused.value.problems[0].code == "store-unreachable"


def test_a_draft_with_all_votes_stays_where_the_store_does_not_answer(bucket, monkeypatch):
    draft = new_draft(bucket, 3, 0)
    draft.propose(manifest_of(step=3))
    draft.vote(0, {})
    with monkeypatch.context() as patched:
        patched.setattr(ObjectPath, "create", _fail)
        assert draft.finish() is None
    assert [left.step for left in list_drafts(bucket)] == [3]


def test_errors_after_the_commit_do_not_remove_the_checkpoint(bucket):
    """Neither the removal of votes nor the rotation can fail a checkpoint that is committed."""

    def fail(path):
        raise StoreError("the server cannot be reached")

    write = build_write(bucket, on_commit=fail)
    write.start()
    write.wait()
    assert write.error is None
    require_equal(write.path)
    write.draft.discard()
    require_equal(write.path)


def test_a_vote_whose_answer_was_lost_keeps_its_files(bucket, monkeypatch):
    """The coordinator may have read the vote already: the files that it names stay."""
    write, original = build_write(bucket), ObjectPath.write_bytes

    def lose_answer(path, content):
        original(path, content)
        if path.name.endswith(".vote") and b'refused": ""' in content:
            raise StoreError("the answer was lost")

    monkeypatch.setattr(ObjectPath, "write_bytes", lose_answer)
    write._write_and_vote()
    assert (write.draft.folder / "rank-00000.safetensors").is_file()


def test_copies_are_verified_and_made_once(bucket, tmp_path):
    source = save(tmp_path / "here", ranks=2)
    copy = copy_checkpoint(source, bucket)
    require_equal(copy)
    assert read_manifest(copy) == read_manifest(source)
    assert copy_checkpoint(source, bucket) is None
    back = copy_checkpoint(copy, tmp_path / "back")
    require_equal(back)
    shard = source / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(UserError, match="checksum of rank-00001"):
        copy_checkpoint(source, tmp_path / "damaged")
    assert not list((tmp_path / "damaged").iterdir())


TAKE_LOCK = """
import os, sys
from meshwright.checkpoint.store_lock import StoreLock
from meshwright.core.object_path import parse_location
StoreLock.take(parse_location(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_the_lock_names_its_owner_and_is_reclaimed_after_a_kill(bucket, monkeypatch):
    owner = subprocess.Popen(
        [sys.executable, "-c", TAKE_LOCK, str(bucket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(owner.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"process {pid} on {os.uname().nodename}") as busy:
            StoreLock.take(bucket)
        assert busy.value.problems[0].code == "checkpoint-dir-busy"
    finally:
        owner.kill()
        owner.communicate()
    with StoreLock.take(bucket):
        assert json.loads((bucket / "lock.json").read_bytes())["pid"] == os.getpid()
    assert not (bucket / "lock.json").exists()


def test_the_lock_of_another_machine_is_reclaimed_when_it_is_not_renewed(bucket, monkeypatch):
    monkeypatch.setattr(store_lock, "LEASE_S", 0.5)
    monkeypatch.setattr(store_lock, "POLL_S", 0.05)
    content = {"pid": 1, "host": "elsewhere", "boot": "other", "pid_namespace": "other", "nonce": "x"}
    (bucket / "lock.json").create(json.dumps(content).encode())
    with StoreLock.take(bucket):
        assert json.loads((bucket / "lock.json").read_bytes())["host"] == os.uname().nodename


def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lock(bucket, monkeypatch):
    monkeypatch.setattr(store_lock, "RENEW_S", 3600)
    with StoreLock.take(bucket) as held:
        held._path.replace_version(held._content(), held._tag)  # the tag of the answer is not kept
        assert held._holds_lock()
        held._path.replace_version(held._content(), held._tag)
        held._path.write_bytes(b'{"nonce": "of another process"}')
        assert not held._holds_lock()


def test_the_lock_of_another_machine_that_is_renewed_is_kept(bucket, monkeypatch):
    monkeypatch.setattr(store_lock, "RENEW_S", 0.05)
    monkeypatch.setattr(store_lock, "POLL_S", 0.05)
    held = StoreLock.take(bucket)
    monkeypatch.setattr(store_lock, "_is_here", lambda owner: False)
    with held, pytest.raises(UserError, match="checkpoint-dir-busy"):
        StoreLock.take(bucket)


def test_a_store_that_is_gone_votes_against_and_names_itself(bucket, monkeypatch):
    write = build_write(bucket)
    monkeypatch.setattr(ObjectPath, "create", _fail)
    write.start()
    write.wait()
    assert isinstance(write.error, StoreError)
    assert write.path is None
    assert not bucket.exists()


def _fail(self, content):
    raise StoreError(f"{self}: the server cannot be reached")

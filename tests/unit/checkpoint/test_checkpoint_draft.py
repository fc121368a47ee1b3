"""Two-phase commit: a checkpoint is complete or absent, whichever rank is killed at whichever call."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from checkpoint_files import TENSORS, build_write, manifest_of, save, split_rows
from meshwright.checkpoint import drafts as drafts_module
from meshwright.checkpoint import writer as writer_module
from meshwright.checkpoint.draft import Draft, DraftError
from meshwright.checkpoint.drafts import finish_drafts, new_draft, remove_older_drafts
from meshwright.checkpoint.manifest import FileFacts, list_checkpoints, read_manifest, rotate
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.stores import find_newest
from meshwright.checkpoint.tensor_files import CheckpointReader, write_tensors

RANKS = 3


def assert_whole(path):
    saved = CheckpointReader(path, read_manifest(path))
    assert all(torch.equal(saved.read(name), tensor) for name, tensor in TENSORS.items())


def write_part(draft: Draft, rank: int) -> None:
    """All that a rank does before the commit."""
    draft.open()
    if rank == 0:
        draft.propose(manifest_of(world_size=RANKS, step=draft.step))
    name = f"rank-{rank:05d}.safetensors"
    draft.vote(
        rank, {name: write_tensors(draft.folder / name, split_rows(TENSORS, rank, RANKS), lambda *_: None)}
    )


def test_a_coordinator_that_dies_after_the_votes_is_completed_by_its_successor(tmp_path):
    draft = new_draft(tmp_path, 4, 0)
    for rank in range(RANKS):
        write_part(draft, rank)
    assert not list_checkpoints(tmp_path)
    assert [path.name for path in finish_drafts(tmp_path)] == ["step-00000004"]
    assert_whole(tmp_path / "step-00000004")
    assert finish_drafts(tmp_path) == []


def test_a_draft_without_all_votes_is_removed(tmp_path):
    save(tmp_path, RANKS, step=2)
    draft = new_draft(tmp_path, 4, 0)
    for rank in range(RANKS - 1):
        write_part(draft, rank)
    assert finish_drafts(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_vote_against_ends_the_save_and_names_the_rank(tmp_path):
    draft = new_draft(tmp_path, 4, 0)
    write_part(draft, 0)
    write_part(draft, 2)
    draft.refuse(1, "No space left on device")
    votes = draft.wait_for_votes(range(RANKS), lambda seconds: False)
    assert [vote.refused for vote in votes.values() if vote.refused] == ["No space left on device"]
    assert finish_drafts(tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_with_a_full_disk_costs_the_checkpoint_and_leaves_nothing(tmp_path, monkeypatch, full):
    """The coordinator waits for all votes, so that a late rank does not create the draft again."""
    original = writer_module.write_tensors

    def write(path, parts, check):
        if path.name == f"rank-{full:05d}.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, parts, check)

    monkeypatch.setattr(writer_module, "write_tensors", write)
    writes = [build_write(tmp_path, rank, RANKS) for rank in range(RANKS)]
    for write in writes:
        write.start()
    for write in writes:
        write.wait()
    assert "No space left on device" in str(writes[0].error)
    assert f"rank {full}" in str(writes[0].error) or full == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["replace_bytes", "sync_path"])
def test_a_commit_that_fails_leaves_nothing(tmp_path, monkeypatch, call):
    """All ranks have voted, and the manifest cannot be written, or the folder not be flushed."""
    original = getattr(drafts_module, call)

    def fail(path, *args, **kwargs):
        if path.name == "manifest.json" or call == "sync_path":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(drafts_module, call, fail)
    write = build_write(tmp_path)
    write._run()
    assert write.path is None
    assert "No space left on device" in str(write.error)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_no_wait_for_votes(tmp_path):
    """The folder of the checkpoints is a file: no rank can vote, and the coordinator does not wait."""
    (tmp_path / "root").write_text("")
    write = build_write(tmp_path / "root", 0, RANKS)
    write._cancelled = SimpleNamespace(is_set=bool, wait=lambda seconds: pytest.fail("it waits"))
    write._run()
    assert isinstance(write.error, OSError)
    assert write.path is None


def test_a_coordinator_that_waits_gives_up_when_told(tmp_path):
    draft = new_draft(tmp_path, 4, 0)
    write_part(draft, 0)
    with pytest.raises(DraftError, match="generation ended"):
        draft.wait_for_votes(range(RANKS), lambda seconds: True)
    assert draft.folder.exists(), "the next generation decides"


def test_a_coordinator_gives_up_when_nothing_grows(tmp_path, monkeypatch):
    draft = new_draft(tmp_path, 4, 0)
    monkeypatch.setattr(draft, "stalled_s", 0.0)
    write_part(draft, 1)
    with pytest.raises(DraftError, match=r"no vote of ranks \[0, 2\]"):
        draft.wait_for_votes(range(RANKS), lambda seconds: False)


def test_a_step_that_is_saved_again_becomes_a_new_revision(tmp_path):
    """Nothing is replaced: until the second one is committed, the first one is intact."""
    first = save(tmp_path)
    second = save(tmp_path, tensors={"w": torch.ones(2)})
    assert (first.name, second.name) == ("step-00000001", "step-00000001.1")
    assert find_newest(tmp_path) == (second, [])
    assert_whole(first)


def test_a_revision_comes_after_all_others_of_its_step(tmp_path):
    """Rotation removes the first revision; the third save must not take its name, which is an older one."""
    first, second = save(tmp_path), save(tmp_path)
    rotate(tmp_path, Retention(1), second)
    assert not first.exists()
    third = save(tmp_path)
    assert third.name == "step-00000001.2"
    assert find_newest(tmp_path) == (third, [])


def test_a_truncated_file_of_a_complete_draft_is_not_committed(tmp_path):
    """Power loss after the votes: a file may be shorter than its vote says."""
    draft = new_draft(tmp_path, 4, 0)
    for rank in range(RANKS):
        write_part(draft, rank)
    with (draft.folder / "rank-00001.safetensors").open("r+b") as file:
        file.truncate(10)
    assert finish_drafts(tmp_path) == []


def test_drafts_of_later_saves_and_of_other_generations_stay(tmp_path):
    """A rank may be writing the next checkpoint while rank 0 commits this one."""
    attempt = 1_763_433_600_000
    for step, generation in ((2, 1), (4, 1), (6, 1), (2, 0)):
        new_draft(tmp_path, step, generation, attempt).open()
    remove_older_drafts(new_draft(tmp_path, 4, 1, attempt))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".step-00000002.0.part", ".step-00000004.1.part", ".step-00000006.1.part"]


def kill_at_call(number: int, work) -> bool:
    """Run in a child process, killed before its file-changing call ``number``; returns whether it was."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    calls = itertools.count()

    def hook(event, args):
        opens = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wxa+")
        if (opens or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("killed", range(RANKS))
def test_a_rank_that_is_killed_at_any_step_leaves_whole_checkpoints_only(tmp_path, killed):
    """SIGKILL before every call that changes files: each checkpoint that is there is whole.

    The older one is always there. The successor commits or removes the draft, and nothing else is left.
    """
    committed = set()
    for number in range(100):
        root = tmp_path / f"{number}"
        save(root, RANKS, step=2)
        was_killed = False
        for rank in (1, 2, 0):  # rank 0 commits what the others have written
            write = build_write(root, rank, RANKS, step=4)
            if rank == killed:
                was_killed = kill_at_call(number, write._run)
            elif rank == 0:
                write._cancelled = SimpleNamespace(
                    is_set=bool, wait=lambda seconds: True
                )  # no waiting for votes
                write._run()
            else:
                write._run()
        before = list_checkpoints(root)
        assert before[0].name == "step-00000002"
        for path in before:
            assert_whole(path)
        finish_drafts(root)
        found = find_newest(root)
        assert found is not None
        assert not found[1]
        assert_whole(found[0])
        committed.add(found[0].name)
        assert {path.name for path in root.iterdir()} <= {"step-00000002", "step-00000004"}
        shutil.rmtree(root)
        if not was_killed:
            assert number > 3
            assert committed == {"step-00000002", "step-00000004"}
            return
    pytest.fail("the protocol has no end")


def test_a_vote_that_was_changed_does_not_count(tmp_path):
    draft = new_draft(tmp_path, 4, 0)
    write_part(draft, 0)
    (path,) = draft.folder.glob("*.vote")
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"rank": 0', b'"rank": 1'))
    assert draft.read_votes() == {}
    path.write_text(json.dumps({"rank": 0}))
    assert draft.read_votes() == {}


def test_a_draft_that_is_a_link_is_removed_and_not_followed(tmp_path):
    """A folder that somebody else made must not choose where ranks write."""
    outside = tmp_path / "outside"
    for rank in range(RANKS):
        write_part(new_draft(outside, 4, 0), rank)
    root, (draft,) = tmp_path / "root", outside.iterdir()
    root.mkdir()
    (root / draft.name).symlink_to(draft)
    before = sorted(path.name for path in draft.iterdir())
    assert finish_drafts(root) == []
    assert sorted(path.name for path in draft.iterdir()) == before
    assert not list(root.iterdir())


def test_a_name_outside_the_folder_is_not_committed(tmp_path):
    draft = new_draft(tmp_path / "root", 4, 0)
    draft.open()
    draft.propose(manifest_of(world_size=1, step=4))
    (tmp_path / "secret").write_bytes(b"1")
    draft.vote(0, {"../../secret": FileFacts(1, "")})
    assert finish_drafts(tmp_path / "root") == []
    assert os.listdir(tmp_path / "root") == []  # noqa: PTH208
    assert (tmp_path / "secret").exists()

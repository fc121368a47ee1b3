"""Bugs that other frameworks had in their checkpoints, each as a test or with the test that covers it.

| bug | what happened | test |
|---|---|---|
| torchtitan#930, pytorch#144657 | an asynchronous save wrote values of later updates | here |
| Megatron-Bridge#3267 | it wrote the step number of a later step | here |
| KempnerForge#102 | `latest` was moved, and the old one removed, before the save was durable | here |
| tnt#559 | an error of the asynchronous save was lost, and the metadata were missing | here |
| Lightning#688, #19970, #20012 | files were written under their final names | here; fault tests 10, 11 |
| diffusion-pipe#159 | after a power loss a renamed checkpoint had no content | here |
| DeepSpeed#5405 | files of some ranks stayed in a temporary folder; the checkpoint was used | here |
| Megatron-LM#659 | a checkpoint of 2 nodes loaded on 4, not on 3 | here; fault test 18 |
| AReaL#1468 | the optimizer's moments were dropped at the load | here; fault test 18 |
| Megatron-LM#4378 | shards were dropped silently | here, `test_missing_elements_are_named` |
| metaseq#53 | empty shards of the newest checkpoint were loaded | fault test 12 |
| torchtitan#1729 | a corrupt checkpoint ended the run | `test_a_damaged_checkpoint_is_skipped` |
| torchtitan#811, DeepSpeed#2898 | a checkpoint of fewer ranks did not load | fault test 18 |
| Megatron-LM#761 | the loss of an MoE model jumped at the resume | `test_expert_parallel.py`: two tests |
| Megatron-LM#1570 | losses after a resume differed | `test_a_resumed_run_is_bit_identical` |
| pytorch#135712 | a restarted group read addresses of the attempt before | `test_regroup.py` |

Fault tests 10 to 12 are in ``tests/faults/test_checkpoint_faults.py``, 18 in
``tests/multiproc/test_resharding.py``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoint_files
from checkpoint_files import TENSORS, build_saver, build_write, manifest_of, save, split_rows
from meshwright.checkpoint import writer as writer_module
from meshwright.checkpoint.drafts import finish_drafts, new_draft
from meshwright.checkpoint.manifest import (
    MANIFEST,
    best_checkpoint,
    encode_checked,
    list_checkpoints,
    read_manifest,
)
from meshwright.checkpoint.stores import find_newest
from meshwright.checkpoint.tensor_files import CheckpointReader, write_tensors
from meshwright.core.errors import UserError
from meshwright.layout.state_chunks import TensorSlice


@pytest.fixture
def disk(monkeypatch) -> threading.Event:
    """A disk that writes no tensors before the event is set."""
    ready = threading.Event()
    monkeypatch.setattr(writer_module, "write_tensors", lambda *args: ready.wait(30) and write_tensors(*args))
    return ready


def live_tensors(monkeypatch) -> dict[str, torch.Tensor]:
    """Tensors that a saver saves, and that training may change."""
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    monkeypatch.setattr(checkpoint_files, "TENSORS", tensors)
    return tensors


def test_async_save_does_not_see_later_updates_torchtitan_930(tmp_path, monkeypatch, disk):
    """Nor the step of a later one (Megatron-Bridge#3267)."""
    tensors = live_tensors(monkeypatch)
    saver = build_saver(tmp_path, [], every_steps=1)
    saver.state.counters.advance(1)
    saver.after_step(False, None, False)
    for tensor in tensors.values():
        tensor.zero_()
    saver.state.counters.advance(1)
    assert not list_checkpoints(tmp_path)
    disk.set()
    saver._collect(wait=True)
    (path,) = list_checkpoints(tmp_path)
    saved = CheckpointReader(path, read_manifest(path))
    assert (path.name, read_manifest(path).step) == ("step-00000001", 1)
    assert all(torch.equal(saved.read(name), tensor) for name, tensor in TENSORS.items())


def test_nothing_is_marked_or_removed_before_the_commit_kempnerforge_102(tmp_path, monkeypatch, disk):
    saver = build_saver(tmp_path, [], every_steps=1, on_best=True, keep_last=1)
    for step, loss in ((1, 3.0), (2, 2.0)):
        saver.state.counters.advance(1)
        saver.after_step(False, loss, False)
        names = [path.name for path in list_checkpoints(tmp_path)]
        before = "step-00000001" if step == 2 else None
        assert names == ([before] if before else []), "the one before stays while this one is written"
        assert best_checkpoint(tmp_path) == before
        disk.set()
        saver._collect(wait=True)
        disk.clear()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert best_checkpoint(tmp_path) == "step-00000002"


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError(5, "Input/output error")])
def test_an_error_of_the_writer_thread_is_reported_and_leaves_no_checkpoint_tnt_559(
    tmp_path, monkeypatch, error
):
    """A disk error is an event, and training goes on. Any other error ends the run."""

    def fail(*args):
        raise error

    events: list = []
    saver = build_saver(tmp_path, events, every_steps=1)
    monkeypatch.setattr(writer_module, "write_tensors", fail)
    saver.state.counters.advance(1)
    saver.after_step(False, None, False)
    if isinstance(error, OSError):
        saver._collect(wait=True)
        ((name, fields),) = events
        assert name == "checkpoint_failed"
        assert "Input/output error" in fields["reason"]
    else:
        with pytest.raises(RuntimeError, match="no memory"):
            saver._collect(wait=True)
    finish_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_under_the_name_of_a_checkpoint_lightning_19970(tmp_path):
    """All files are written into the draft; only its rename makes a checkpoint."""
    written: list[str] = []

    def hook(event, args):
        if active and event == "open" and isinstance(args[1], str) and set(args[1]) & set("wxa+"):
            written.append(os.fspath(args[0]))

    active = [True]
    sys.addaudithook(hook)  # it cannot be removed
    save(tmp_path, ranks=2, small_files={"tokenizer.json": b"{}"})
    save(tmp_path, ranks=2)
    active.clear()
    inside = [Path(name).relative_to(tmp_path).parts[0] for name in written if str(tmp_path) in name]
    assert len(inside) >= 10
    assert set(inside) == {".step-00000001.0.part"}


def test_every_file_is_flushed_before_the_rename_diffusion_pipe_159(tmp_path, monkeypatch):
    """First the files, then the manifest and the folder, then the rename, then the folder above."""
    done: list[str] = []
    flush, rename = os.fsync, Path.rename

    def record_flush(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    def record_rename(path, target):
        done.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(Path, "rename", record_rename)
    build_write(tmp_path, small_files={"tokenizer.json": b"{}"})._run()
    place = done.index("rename .step-00000001.0.part step-00000001")
    flushed = [name.removeprefix(".").partition(f".{os.uname().nodename}")[0] for name in done[:place]]
    files = ["proposal.json", "tokenizer.json", "rank-00000.safetensors", "rank-00000.vote", MANIFEST]
    assert flushed == [*files, "step-00000001.0.part"]
    assert done[place + 1 :] == [tmp_path.name]


def test_a_draft_without_the_files_of_a_rank_is_not_committed_deepspeed_5405(tmp_path):
    for rank in (1, 0):
        draft = new_draft(tmp_path, 4, 0)
        draft.open()
        draft.propose(manifest_of(world_size=2, step=4))
        name = f"rank-{rank:05d}.safetensors"
        parts = split_rows(TENSORS, rank, 2)
        draft.vote(rank, {name: write_tensors(draft.folder / name, parts, lambda *_: None)})
    (draft.folder / "rank-00001.safetensors").unlink()
    assert finish_drafts(tmp_path) == []
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_loads_what_any_other_saved_megatron_659(tmp_path, ranks):
    """Seven rows, which no number divides."""
    tensor = torch.arange(21.0).reshape(7, 3)
    path = save(tmp_path, ranks, tensors={"w": tensor})
    for readers in (1, 2, 3, 5, 7):
        for rank in range(readers):
            first, stop = 7 * rank // readers, 7 * (rank + 1) // readers
            tensor_slice = TensorSlice.full((7, 3)).rows(first, stop)
            assert torch.equal(
                CheckpointReader(path, prefer=rank).read("w", tensor_slice), tensor[first:stop]
            )


def test_missing_moments_are_an_error_areal_1468(tmp_path):
    """Not a fresh optimizer."""
    path = save(tmp_path, tensors={"w": torch.ones(4), "w:exp_avg": torch.ones(4)})
    with pytest.raises(UserError, match=r"w:exp_avg_sq.*\[checkpoint-broken\]"):
        CheckpointReader(path).read("w:exp_avg_sq")


def test_a_shard_that_was_dropped_is_found_by_verification_megatron_4378(tmp_path):
    """Its manifest has a right checksum; the previous checkpoint is used."""
    old, new = save(tmp_path, ranks=2, step=2), save(tmp_path, ranks=2, step=4)
    manifest = read_manifest(new)
    kept = {
        name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in manifest.files.items() if "00000" in name
    }
    content = json.loads((new / MANIFEST).read_bytes())
    (new / MANIFEST).write_bytes(encode_checked({**content, "files": kept}))
    assert replace(manifest, files={}) == replace(read_manifest(new, verify=False), files={})
    found = find_newest(tmp_path)
    assert found is not None
    assert found[0] == old
    assert "bytes of tensors in its files" in found[1][0]

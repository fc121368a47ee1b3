"""Folders that cannot be resumed, folders with two writers (fault test 17), a disk that fails in a run."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.runs.faults.checks.failing_disk import check_training_with_failing_fsync
from meshwright.runs.faults.checks.malicious import read_tree as tree
from meshwright.runs.faults.checks.two_writers import check_two_writers

RESUME = ("train", "job.toml", "--resume")


def make_empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def make_missing(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint.parent)


def make_foreign(checkpoint: Path) -> None:
    """A folder of other programs, which use some of the same names."""
    root = checkpoint.parent
    shutil.rmtree(checkpoint)
    (root / "lock").write_text("of another program")
    (root / "best").write_bytes(b"\xff\x00")
    (root / "step-12").mkdir()
    (root / "step-12" / MANIFEST).write_text("{}")
    (root / ".step-x.part").mkdir()
    (root / ".step-x.part" / "notes.txt").write_text("text")


def make_web_site(checkpoint: Path) -> None:
    """The manifest of a web page, in a folder with a checkpoint's name."""
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text('{"name": "site", "version": 2, "icons": []}')


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (make_empty, "resume-nothing"),
        (make_missing, "resume-nothing"),
        (make_foreign, "resume-nothing"),
        (make_web_site, "checkpoint-none-good"),
        (lambda c: (c / "rank-00001.safetensors").unlink(), "checkpoint-none-good"),
        (lambda c: (c / "tokenizer.json").unlink(), "checkpoint-none-good"),
        (lambda c: (c / MANIFEST).unlink(), "resume-nothing"),
        (lambda c: (shutil.rmtree(c.parent), c.parent.write_text("a file")), "resume-nothing"),
    ],
    ids=[
        "empty",
        "missing",
        "foreign",
        "web site",
        "without a shard",
        "without a tokenizer",
        "without a manifest",
        "file",
    ],
)
def test_a_folder_without_a_whole_checkpoint_is_refused_and_left_as_it_was(checkpoint, run, spoil, code):
    """No file is added or changed, in the folder or beside it."""
    spoil(checkpoint)
    before = tree(Path())
    for command in (RESUME, ("generate", "root"), ("checkpoint", "export", "root", "exported")):
        status, said = run(*command)
        assert status == 2, said
        assert f"[{code}]" in said or command is not RESUME, said
        assert tree(Path()) == before, command
    status, said = run("checkpoint", "verify", "root")
    assert status in (2, 3), said
    assert tree(Path()) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.hidden_size=16", "model.hidden_size is 8 in the checkpoint and 16 in the job"),
        ("model.num_layers=2", "model.num_layers is 1 in the checkpoint and 2 in the job"),
        ("model.vocab_size=300", "model.vocab_size is 257 in the checkpoint and 300 in the job"),
        (
            "model.tied_embeddings=false",
            "model.tied_embeddings is True in the checkpoint and False in the job",
        ),
        ("train.optimizer=lion", "train.optimizer is adamw in the checkpoint and lion in the job"),
    ],
)
def test_another_model_is_refused_and_the_folder_is_left_as_it_was(checkpoint, run, change, says):
    """Another shape, a grown vocabulary, and another optimizer."""
    before = tree(Path())
    status, said = run(*RESUME, change)
    assert status == 2, said
    assert says in " ".join(said.split())
    assert "[resume-mismatch]" in said
    assert tree(Path()) == before


def test_17_a_folder_that_another_process_writes_is_refused_and_left_as_it_was(checkpoint, run):
    """The error names process and host."""
    Path("run").mkdir()
    with CheckpointStores.single(checkpoint.parent).open(Path("run")).locks:
        before = tree(Path())
        status, said = run(*RESUME)
        assert status == 2, said
        assert "[checkpoint-dir-busy]" in said
        assert f"process {os.getpid()} on {socket.gethostname()}" in " ".join(said.split())
        assert tree(Path()) == before


@pytest.mark.slow
def test_17_a_second_run_is_refused_until_the_first_is_killed(check):
    check_two_writers(check)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("rank", [0, 1])
def test_15_training_continues_when_a_disk_fails(command, job_file, tmp_path, rank):
    """An fsync of a rank fails with EIO. That checkpoint is lost, the next ones are written."""
    check_training_with_failing_fsync(command, job_file, tmp_path / "run", rank)

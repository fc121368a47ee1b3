"""Checkpoints that somebody else made: each is refused by a ``UserError`` with a reason.

The commands are tested in ``tests/faults/test_malicious_checkpoints.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_files import save
from meshwright.checkpoint.manifest import (
    BEST_FILE,
    MANIFEST,
    best_checkpoint,
    encode_checked,
    read_manifest,
)
from meshwright.checkpoint.stores import find_newest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"
RANK_0 = "rank-00000.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of two ranks with a tokenizer."""
    return save(tmp_path / "root", ranks=2, step=4, small_files={"tokenizer.json": b"{}"})


def edit_manifest(checkpoint: Path, change) -> None:
    """Change the content of a manifest; its checksum is right, as whoever made it wrote it."""
    content = json.loads((checkpoint / MANIFEST).read_bytes())
    change(content)
    (checkpoint / MANIFEST).write_bytes(encode_checked(content))


def refusal(checkpoint: Path) -> str:
    """Why a checkpoint is refused."""
    with pytest.raises(UserError) as caught:
        read_manifest(checkpoint)
    (problem,) = caught.value.problems
    assert problem.code == "checkpoint-broken"
    return problem.rule


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "..", ".", "", "a/b", "x" * 300, "null\0", "lone\ud800", "sub", "pipe"],
)
def test_a_listed_file_must_be_a_plain_file_of_the_folder(checkpoint, name):
    """Paths, names that no file system takes, a folder, and a pipe, which would block its reader."""
    (checkpoint / "sub").mkdir()
    os.mkfifo(checkpoint / "pipe")
    (checkpoint.parent / "secret").write_bytes(b"")
    edit_manifest(checkpoint, lambda c: c["files"].update({name: {"bytes": 0, "sha256": ""}}))
    assert "is missing or has another size" in refusal(checkpoint)


@pytest.mark.parametrize("name", [RANK_0, "tokenizer.json", MANIFEST])
def test_a_link_is_no_file_of_a_checkpoint(checkpoint, tmp_path, name):
    """Also one to a file with the right content: it may change after the check."""
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    assert ("not a plain file" if name == MANIFEST else f"{name} is missing") in refusal(checkpoint)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_manifest_that_is_no_plain_file_is_not_opened(checkpoint, kind):
    """A pipe would block, and ``/dev/zero`` has no end."""
    (checkpoint / MANIFEST).unlink()
    if kind == "pipe":
        os.mkfifo(checkpoint / MANIFEST)
    elif kind == "device":
        (checkpoint / MANIFEST).symlink_to("/dev/zero")
    else:
        (checkpoint / MANIFEST).mkdir()
    assert "not a plain file" in refusal(checkpoint)
    with pytest.raises(UserError, match="checkpoint-none-good"):
        find_newest(checkpoint.parent)


@pytest.mark.parametrize("name", ["hf_source.zip", "chat_template.jinja", "tokenizer_config.json"])
def test_a_file_without_a_checksum_is_refused_if_readers_would_use_it(checkpoint, name):
    (checkpoint / name).write_bytes(b"")
    assert f"does not list: {name}" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "model.pt", "rank-00009.safetensors"])
def test_other_files_are_ignored(checkpoint, name):
    (checkpoint / name).write_bytes(b"\x80\x04")
    assert read_manifest(checkpoint).step == 4


def test_a_file_that_cannot_be_read_is_named_and_the_previous_checkpoint_is_used(checkpoint, monkeypatch):
    """A disk error during the check (EIO)."""
    newer = save(checkpoint.parent, step=6)
    original = Path.open

    def fail(path, *args, **kwargs):
        if path == newer / RANK_0:
            raise OSError(5, "Input/output error", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    found = find_newest(checkpoint.parent)
    assert found is not None
    assert found[0] == checkpoint
    assert "Input/output error" in found[1][0]
    assert RANK_0 in found[1][0]


def set_value(*keys, value):
    """``set_value("step", value=-1)``: a change of a manifest."""

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_value("step", value=-1), "step"),
        (set_value("step", value=2**60), "step"),
        (set_value("position", value=-5), "position"),
        (set_value("position", value=10**400), "position"),
        (set_value("world_size", value=0), "world_size"),
        (set_value("world_size", value=2**62), "world_size"),
        (set_value("files", RANK_0, "bytes", value=-1), "files"),
        (set_value("tensors", "count", "shape", value=[-1]), "tensors"),
        (set_value("tensors", "count", "shape", value=[1] * 10**4), "tensors"),
        (set_value("tensors", "count", "shape", value=[2**60]), "tensors"),
        (set_value("tensors", "low", "shape", value=[2**40]), "more tensors than its files can hold"),
        (set_value("tensors", "low", "shape", value=[2**52] * 8), "more tensors than its files can hold"),
        (set_value("tensors", "low", "dtype", value="O"), "more tensors than its files can hold"),
    ],
)
def test_numbers_that_no_checkpoint_has_are_refused(checkpoint, change, says):
    """Sizes in the manifest must not decide about memory: the files bound them."""
    edit_manifest(checkpoint, change)
    assert says in refusal(checkpoint)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "without a usable model"),
        ({"num_layers": 10**9}, "fewer tensors than its model has layers"),
        ({"architecture": "resnet", "blocks": [10**9], "num_classes": 2}, "fewer tensors"),
        ({"architecture": "resnet", "blocks": 7}, "without a usable model"),
        ({"hidden_size": 2**40}, "with the shape (257, 8); its model has (257, 1099511627776)"),
        ({"vocab_size": 258}, "with the shape (257, 8); its model has (258, 8)"),
        ({"num_heads": 0}, "without a usable model"),
        ({"ffn_size": -1}, "without a usable model"),
        ({"unknown": 1}, "without a usable model"),
    ],
)
def test_a_model_that_is_not_that_of_the_tensors_is_refused(section, says):
    """It is built from the manifest: an embedding of 2^40 columns must not be allocated first."""
    manifest = read_manifest(GOLDEN)
    CheckpointReader(GOLDEN, manifest).read_model()
    replaced = replace(manifest, model={**manifest.model, **section} if section else {})
    with pytest.raises(UserError) as caught:
        CheckpointReader(GOLDEN, replaced).read_model()
    assert caught.value.problems[0].code == "checkpoint-broken"
    assert says in caught.value.problems[0].rule


def replace_file(checkpoint: Path, content: bytes, name: str = RANK_0) -> None:
    """Give a file other content, with the right size and checksum in the manifest."""
    (checkpoint / name).write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(checkpoint, set_value("files", name, value=facts))


def tensor_file(header: dict, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, end: int, dtype: str = "BF16", begin: int = 0) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("code-ran",))


PAD = b"\0" * 200
"""Room for the tensors that the manifest lists."""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Payload()) + PAD, "not a safetensors file"),
        ((2**62).to_bytes(8, "little") + b"{}" + PAD, "not a safetensors file"),
        ((2**63).to_bytes(8, "little") + PAD, "not a safetensors file"),
        (b"".ljust(200, b"\0"), "not a safetensors file"),
        (tensor_file({"low": entry([2**60], 2**61)}, PAD), "truncated"),
        (tensor_file({"low": entry([2**60], 200)}, PAD), "header cannot be read"),
        (tensor_file({"low": entry([-1, -100], 200)}, PAD), "header cannot be read"),
        (tensor_file({"low": entry([100.0], 200)}, PAD), "header cannot be read"),
        (tensor_file({"low": {"dtype": "BF16", "shape": [100]}}, PAD), "header cannot be read"),
        (tensor_file({"low": entry([100], 200), "count": entry([100], 200)}, PAD), "overlap"),
        (tensor_file({"low": entry([100], 200)}, PAD), "not a part of a tensor of the manifest"),
        (tensor_file({"low": entry([3, 1], 6), "z": entry([97], 200, begin=6)}, PAD), "not a part"),
        (tensor_file({"low@2": entry([3], 6), "z": entry([97], 200, begin=6)}, PAD), "not a part"),
        (tensor_file({"low": entry([50], 200, "F32")}, PAD), "not a part of a tensor of the manifest"),
        (b"\0" * 8 + b"[" * 10**5, "not a safetensors file"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5 + PAD, "header cannot be read"),
    ],
)
def test_a_file_of_tensors_with_any_content_is_refused(checkpoint, monkeypatch, tmp_path, content, says):
    """Pickles, header lengths and shapes of 2^60, and entries that the manifest does not list."""
    monkeypatch.chdir(tmp_path)
    replace_file(checkpoint, content)
    assert "bytes of tensors" in refusal(checkpoint) or says in refusal(checkpoint)
    with pytest.raises(UserError) as caught:
        CheckpointReader(checkpoint).read("low")
    assert caught.value.problems[0].code == "checkpoint-broken"
    assert says in caught.value.problems[0].rule
    assert RANK_0 in caught.value.problems[0].rule
    assert not Path("code-ran").exists()


def test_elements_that_are_there_twice_are_refused(checkpoint):
    """Two chunks with three elements in all do not make a tensor of three, if they overlap."""
    replace_file(checkpoint, tensor_file({"low@0": entry([2], 4)}, b"\0" * 4))
    replace_file(checkpoint, tensor_file({"low@1": entry([1], 2)}, b"\0" * 2), "rank-00001.safetensors")
    edit_manifest(checkpoint, set_value("tensors", value={"low": {"dtype": "BF16", "shape": [3]}}))
    read_manifest(checkpoint)  # as many bytes as it must have
    with pytest.raises(UserError, match="has elements of low twice, in rank-00001"):
        CheckpointReader(checkpoint).read("low")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"../../step-00000004\n", b""])
def test_any_content_of_the_file_that_names_the_best_is_harmless(checkpoint, content):
    (checkpoint.parent / BEST_FILE).write_bytes(content)
    assert best_checkpoint(checkpoint.parent) != checkpoint.name
    (checkpoint.parent / BEST_FILE).unlink()
    (checkpoint.parent / BEST_FILE).symlink_to("/dev/zero")
    assert best_checkpoint(checkpoint.parent) is None

"""The shard format: round trip, errors for damaged files, and atomic replacement of folders."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder, is_prepared_folder
from meshwright.data.staging import staged_folder
from meshwright.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_document


class WideTokenizer(ByteTokenizer):
    """A tokenizer with more tokens than 16 bits can number."""

    vocab_size = 70_000


def write(folder, train, held_out=(), shard_tokens=100, tokenizer=None):
    """Write a prepared folder with these documents."""
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder, tokenizer or ByteTokenizer(), shard_tokens) as writer:
        for split, documents in (("train", train), ("eval", held_out)):
            for document in documents:
                writer.add(split, np.asarray(document, dtype=np.uint32))
        return writer.finish()


def listed(folder) -> list[str]:
    """The sorted names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def codes(error) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in error.value.problems]


@pytest.fixture
def prepared(tmp_path):
    """A prepared folder with two train shards and one eval shard."""
    folder = tmp_path / "prepared"
    write(folder, [range(30), range(50), range(60)], [range(5)])
    return folder


@given(
    documents=st.lists(st.lists(st.integers(0, 255), max_size=12), min_size=1, max_size=12),
    limit=st.integers(1, 30),
)
def test_documents_round_trip_through_shards(documents, limit, tmp_path_factory):
    """Each document ends with the end-of-document token.

    No document spans shards, and shards are as full as possible.
    """
    folder = tmp_path_factory.mktemp("shards")
    write(folder, documents, shard_tokens=limit)
    opened = ShardFolder.open(folder)
    opened.verify()
    found, sizes = [], []
    for shard in opened.index.splits.train.shards:
        tokens, starts = opened.map_tokens(shard), opened.map_documents(shard).astype(int).tolist()
        assert starts[0] == 0
        pieces = [tokens[a:b].tolist() for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        assert all(piece[-1] == END for piece in pieces)
        assert shard.tokens <= limit or len(pieces) == 1
        if sizes:
            assert sizes[-1] + len(pieces[0]) > limit, "the document would have fitted into the shard before"
        found += [piece[:-1] for piece in pieces]
        sizes.append(shard.tokens)
    assert found == documents


def test_tokens_are_little_endian_uint16_or_uint32(tmp_path):
    assert write(tmp_path / "narrow", [[1, 258]]).dtype == "uint16"
    assert (tmp_path / "narrow/train-00000.bin").read_bytes() == b"\x01\x00\x02\x01\x00\x01"
    assert write(tmp_path / "wide", [[69_999]], tokenizer=WideTokenizer()).dtype == "uint32"
    assert (tmp_path / "wide/train-00000.bin").read_bytes() == b"\x6f\x11\x01\x00\x00\x01\x00\x00"


def test_index_version_1_is_read():
    """A change that cannot read this index needs a new version."""
    entry = {"file": "train-00000.bin", "tokens": 2, "sha256": "0" * 64}
    entry |= {"documents_file": "train-00000.docs.u64", "documents": 1, "documents_sha256": "1" * 64}
    tokenizer = {"name": "byte", "vocab_size": 257, "end_of_document": 256, "sha256": "2" * 64}
    splits = {"train": {"shards": [entry]}, "eval": {"shards": []}}
    index = {"version": 1, "dtype": "uint16", "tokenizer": tokenizer, "splits": splits}
    from meshwright.data.shards import _INDEX

    read = _INDEX.validate_json(json.dumps(index), strict=True)
    assert json.loads(read.to_bytes()) == index


def test_intact_folder_passes_verification(prepared):
    opened = ShardFolder.open(prepared)
    opened.verify()
    assert [s.tokens for s in opened.index.splits.train.shards] == [82, 61]
    assert (opened.index.splits.eval.tokens, opened.index.splits.train.documents) == (6, 3)
    with pytest.raises(ValueError, match="split 'test' is not one of train, eval"):
        opened.index.split("test")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i.update(version=2), "has version 2; this meshwright reads version 1"),
        (lambda i: i.pop("version"), "is corrupt at version"),
        (lambda i: i.update(version="1"), "is corrupt at version"),
        (lambda i: i.update(dtype="float16"), "is corrupt at dtype"),
        (lambda i: i["splits"].pop("eval"), "is corrupt at splits.eval"),
        (
            lambda i: i["splits"]["train"]["shards"][0].update(file="../secret"),
            "is corrupt at splits.train.shards.0.file",
        ),
        (
            lambda i: i["splits"]["train"]["shards"][0].update(tokens=-1),
            "is corrupt at splits.train.shards.0.tokens",
        ),
    ],
)
def test_invalid_index_is_refused(change, says, prepared):
    index = json.loads((prepared / "index.json").read_text())
    change(index)
    (prepared / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as error:
        ShardFolder.open(prepared)
    assert codes(error) == ["data-shards-broken"]
    assert f"{prepared / 'index.json'} {says}" in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_missing_or_unparsable_index_is_refused(content, prepared):
    (prepared / "index.json").unlink()
    if content is not None:
        (prepared / "index.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        ShardFolder.open(prepared)
    assert codes(error) == ["data-shards-broken"]
    assert str(prepared / "index.json") in str(error.value)


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00000.docs.u64", "eval-00000.bin"])
@pytest.mark.parametrize("damage", ["short", "long", "gone"])
def test_file_of_the_wrong_size_is_refused(name, damage, prepared):
    file = prepared / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "short" else file.read_bytes() + b"x")
    with pytest.raises(UserError) as error:
        ShardFolder.open(prepared)
    assert codes(error) == ["data-shards-broken"]
    assert str(file) in str(error.value)


def test_verify_reports_all_damaged_files(prepared):
    for name in ("train-00000.bin", "eval-00000.docs.u64", "tokenizer.json"):
        data = bytearray((prepared / name).read_bytes())
        data[0] ^= 1
        (prepared / name).write_bytes(data)
    opened = ShardFolder.open(prepared)
    with pytest.raises(UserError) as error:
        opened.verify()
    assert codes(error) == ["data-shards-broken"] * 3
    assert "train-00000.bin is damaged" in str(error.value)


def test_missing_folder_is_refused(tmp_path):
    for name in ("nope", "x" * 300, "a\0b"):
        with pytest.raises(UserError) as error:
            ShardFolder.open(tmp_path / name)
        assert codes(error) == ["data-path-missing"]


def stage(out, failure=None):
    """Write a folder through staged_folder, optionally with a failure."""
    with staged_folder(out, is_prepared_folder) as folder:
        (folder / "index.json").write_text("new")
        seen = out / "index.json"
        assert not seen.exists() or seen.read_text() == "old", "visible before it was complete"
        if failure is not None:
            raise failure


def test_staged_folder_appears_complete(tmp_path):
    stage(tmp_path / "deep/out")
    assert listed(tmp_path / "deep") == ["out"]
    assert listed(tmp_path / "deep/out") == ["index.json"]


def test_prepared_and_empty_folders_are_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    stage(tmp_path / "out")
    (tmp_path / "out/index.json").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    stage(tmp_path / "link")
    assert (tmp_path / "out/index.json").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    assert listed(tmp_path) == ["link", "out"]


@pytest.mark.parametrize("there", ["file", "other folder", "prepared with notes"])
def test_other_files_and_folders_are_never_replaced(there, tmp_path):
    out = tmp_path / "out"
    if there == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        if there == "prepared with notes":
            (out / "index.json").write_text("{}")
    with pytest.raises(UserError) as error:
        stage(out)
    assert codes(error) == ["data-out-exists"]
    assert (out if there == "file" else out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_failure_keeps_the_old_folder_and_no_partial_one(failure, tmp_path):
    stage(tmp_path / "out")
    (tmp_path / "out/index.json").write_text("old")
    with pytest.raises(failure):
        stage(tmp_path / "out", failure=failure)
    assert listed(tmp_path) == ["out"]
    assert (tmp_path / "out/index.json").read_text() == "old"


def test_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    stage(tmp_path / "out")
    (tmp_path / "out/index.json").write_text("old")
    rename = type(tmp_path).rename

    def refuse(path, target):
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    with pytest.raises(UserError):
        stage(tmp_path / "out")
    assert listed(tmp_path) == ["out"]
    assert (tmp_path / "out/index.json").read_text() == "old"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, "data-not-writable"),
        (errno.EROFS, "data-not-writable"),
        (errno.ENOSPC, "data-disk-full"),
        (errno.EDQUOT, "data-disk-full"),
    ],
)
def test_storage_errors_have_codes(number, code, tmp_path, monkeypatch):
    """A patched fsync raises the errors, because tests may run as root and must not fill disks."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    out = tmp_path / "out"
    with (
        pytest.raises(UserError) as error,
        staged_folder(out, is_prepared_folder) as folder,
        ShardWriter(folder, ByteTokenizer(), shown=out) as writer,
    ):
        writer.finish()
    assert codes(error) == [code]
    assert str(error.value).startswith(f"{out} cannot be written")
    assert listed(tmp_path) == []


def test_full_disk_during_a_write_is_reported(tmp_path, monkeypatch):
    """/dev/full fails every write, also the one at closing."""
    folder = tmp_path / "out"
    folder.mkdir()
    path_open = type(tmp_path).open

    def full(path, mode="r", *args, **options):
        target, mode = (Path("/dev/full"), "wb") if mode == "xb" else (path, mode)
        return path_open(target, mode, *args, **options)

    monkeypatch.setattr(type(tmp_path), "open", full)
    with pytest.raises(UserError) as error, ShardWriter(folder, ByteTokenizer()) as writer:
        writer.add("train", np.zeros(10**7))
    assert codes(error) == ["data-disk-full"]


def test_folder_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        stage(tmp_path / "file/out")
    assert codes(error) == ["data-not-writable"]

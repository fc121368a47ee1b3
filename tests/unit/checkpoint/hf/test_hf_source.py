"""The files of a Hugging Face folder that a checkpoint keeps."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import zipfile

import pytest

from meshwright.checkpoint.hf.source import MAX_FILE_BYTES, SOURCE_FILE, load_source
from meshwright.core.errors import UserError

LOAD = """
import resource, sys
from pathlib import Path
from meshwright.checkpoint.hf.source import load_source
from meshwright.core.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_source(Path(sys.argv[1]))
except UserError as error:
    print(error.problems[0].rule)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def refusal(folder) -> str:
    with pytest.raises(UserError) as caught:
        load_source(folder)
    assert caught.value.problems[0].code == "checkpoint-broken"
    return caught.value.problems[0].rule


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json", "a/../../config.json", "run.sh"])
def test_archive_with_a_file_outside_the_kept_kinds_is_refused(tmp_path, name):
    """Export writes these files: a name must not lead out of its folder."""
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "w") as archive:
        archive.writestr(".tensors.json", "{}")
        archive.writestr("config.json", "{}")
    assert load_source(tmp_path).files == {"config.json": b"{}"}
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "a") as archive:
        archive.writestr(name, "x")
    assert "has a file that no checkpoint keeps" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, ".tensors.json"),
        ({".tensors.json": "[]"}, "values"),
        ({".tensors.json": '{"a": 1}'}, "the table of its tensors"),
        ({".tensors.json": "[" * 10**5}, "recursion"),
        ({".tensors.json": "{"}, "cannot be used"),
    ],
)
def test_an_archive_without_a_table_of_tensors_is_refused(tmp_path, entries, says):
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert says in refusal(tmp_path)


@pytest.mark.parametrize("damage", ["text", "cut", "content", "lzma"])
def test_a_damaged_or_foreign_archive_is_refused(tmp_path, damage):
    kind = zipfile.ZIP_LZMA if damage == "lzma" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "w", kind) as archive:
        archive.writestr(".tensors.json", json.dumps({"w": "F32"}))
    content = (tmp_path / SOURCE_FILE).read_bytes()
    changed = {
        "text": b"not an archive",
        "cut": content[: len(content) // 2],
        "content": content.replace(b'"w"', b'"v"'),  # its CRC differs
        "lzma": content,
    }[damage]
    (tmp_path / SOURCE_FILE).write_bytes(changed)
    refusal(tmp_path)


def test_an_archive_that_grows_a_thousandfold_is_not_unpacked(tmp_path):
    """A zip bomb: 3 GB in less than 1 MB, each entry below the limit of one file. Memory stays low."""
    one = b"\0" * MAX_FILE_BYTES
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(".tensors.json", "{}")
        archive.writestr("0.txt", one)
        first = archive.getinfo("0.txt")
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "a") as archive:  # further names for the same bytes
        for number in range(1, 50):
            copy = zipfile.ZipInfo(f"{number}.txt")
            for field in ("compress_type", "compress_size", "file_size", "CRC", "header_offset", "flag_bits"):
                setattr(copy, field, getattr(first, field))
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive._didModify = True
    assert (tmp_path / SOURCE_FILE).stat().st_size < 10**6
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9,) * 2),
    )
    reason, grown_kb = ran.stdout.splitlines()
    assert reason == "cannot be used: its files are larger than the checkpoint"
    assert int(grown_kb) < 30_000

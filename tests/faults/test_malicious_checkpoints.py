"""Checkpoints that were made to harm, and the commands that read them: fault test 16.

No code of theirs runs, nothing is written or overwritten, memory is bounded, and the command ends with a
reason. ``tests/unit/checkpoint/test_checkpoint_hostile_files.py`` has more variants, without commands.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_job import tree
from running_command import PROGRAM

from meshwright.checkpoint.hf.source import SOURCE_FILE
from meshwright.checkpoint.manifest import MANIFEST, encode_checked

RANK_0 = "rank-00000.safetensors"
COMMANDS = {
    "verify": ("checkpoint", "verify", "root"),
    "generate": ("generate", "root", "--prompt", "a", "--tokens", "2"),
    "export": ("checkpoint", "export", "root", "exported"),
    "copy": ("checkpoint", "copy", "root", "copied"),
    "resume": ("train", "job.toml", "--resume"),
}


def edit_manifest(checkpoint: Path, *keys: str, value: object) -> None:
    """Set a value of the manifest, whose checksum is right."""
    whole = content = json.loads((checkpoint / MANIFEST).read_bytes())
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value
    (checkpoint / MANIFEST).write_bytes(encode_checked(whole))


def put(checkpoint: Path, name: str, content: bytes) -> None:
    """Add or replace a file, with its size and checksum in the manifest."""
    (checkpoint / name).write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(checkpoint, "files", name, value=facts)


class Payload:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("code-ran",))


PICKLE = pickle.dumps(Payload())


def pack(files: dict[str, bytes | None]) -> bytes:
    """An archive of the files of a Hugging Face folder; None leaves one out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {".tensors.json": b"{}", "config.json": b"{}", **files}.items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


def link(checkpoint: Path, name: str, target: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(target)


def shape_of_2_to_60(checkpoint: Path) -> None:
    header = json.dumps({"embed.weight": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}})
    content = len(header).to_bytes(8, "little") + header.encode()
    put(checkpoint, RANK_0, content.ljust((checkpoint / RANK_0).stat().st_size, b"\0"))


READERS = ("generate", "export")
ALL = (*READERS, "verify", "resume", "copy")
ATTACKS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pickle for tensors": (lambda c: put(c, RANK_0, PICKLE.ljust(50_000, b"\0")), ALL),
    "pickle for a tokenizer": (lambda c: put(c, "tokenizer.json", PICKLE), READERS),
    "pickle for a manifest": (lambda c: (c / MANIFEST).write_bytes(PICKLE), ALL),
    "path to the parent": (lambda c: edit_manifest(c, "files", "../../secret", value=SECRET), ALL),
    "absolute path": (lambda c: edit_manifest(c, "files", "/etc/hostname", value=SECRET), ALL),
    "link for tensors": (lambda c: link(c, RANK_0, "../../../secret"), ALL),
    "link for a manifest": (lambda c: link(c, MANIFEST, "../../../secret"), ALL),
    "device for a manifest": (lambda c: link(c, MANIFEST, "/dev/zero"), ALL),
    "2^60 elements in a file": (shape_of_2_to_60, ALL),
    "2^60 elements in the manifest": (
        lambda c: edit_manifest(c, "tensors", "embed.weight", "shape", value=[2**60]),
        ALL,
    ),
    "2^30 x 2^30 elements in the manifest": (
        lambda c: edit_manifest(c, "tensors", "embed.weight", "shape", value=[2**30, 2**30]),
        ALL,
    ),
    "header of 2^62 bytes": (lambda c: put(c, RANK_0, (2**62).to_bytes(8, "little") + b"\0" * 50_000), ALL),
    "deeply nested manifest": (lambda c: (c / MANIFEST).write_bytes(b'{"a":' * 10**6), ALL),
    "deeply nested tokenizer": (lambda c: put(c, "tokenizer.json", b"[" * 10**6), READERS),
    "10^9 layers": (lambda c: edit_manifest(c, "model", "num_layers", value=10**9), (*READERS, "resume")),
    "2^40 columns": (lambda c: edit_manifest(c, "model", "hidden_size", value=2**40), (*READERS, "resume")),
    "2^50 tokens in a sample": (lambda c: edit_manifest(c, "seq_len", value=2**50), ALL),
    "path for a chat template": (lambda c: edit_manifest(c, "template", value="../../secret"), ALL),
    "archive without a list": (lambda c: (c / SOURCE_FILE).write_bytes(pack({})), ALL),
    "archive with a path": (lambda c: put(c, SOURCE_FILE, pack({"../x.json": b""})), ("export",)),
    "archive that is a bomb": (lambda c: put(c, SOURCE_FILE, BOMB), ("export",)),
    "archive that is a pickle": (lambda c: put(c, SOURCE_FILE, PICKLE), ("export",)),
    "archive without a config": (
        lambda c: put(c, SOURCE_FILE, pack({"config.json": None})),
        ("export",),
    ),
    "archive with a nested config": (
        lambda c: put(c, SOURCE_FILE, pack({"config.json": b"[" * 10**5})),
        ("export",),
    ),
    "archive of other tensors": (
        lambda c: put(c, SOURCE_FILE, pack({".tensors.json": b'{"x": "F32"}'})),
        ("export",),
    ),
    "archive of another dtype": (
        lambda c: put(c, SOURCE_FILE, pack({".tensors.json": b'{"model.norm.weight": "O"}'})),
        ("export",),
    ),
}
SECRET = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
BOMB = pack({f"{number}.txt": b"\0" * 2**25 for number in range(4)})
"""128 MB in 128 kB."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_16_a_malicious_checkpoint_is_refused_with_a_reason(checkpoint, tmp_path, run, attack):
    """Each command that would use the harmful part ends with status 2 (``verify``: 3); none crashes."""
    harm, refusing = ATTACKS[attack]
    (tmp_path / "secret").write_bytes(b"secret")
    harm(checkpoint)
    before = tree(tmp_path)
    for name, arguments in COMMANDS.items():
        if name == "resume" and name not in refusing:
            continue  # it would train
        status, said = run(*arguments)
        if name in refusing:
            assert status == (3 if name == "verify" else 2), f"{name}: {said}"
            assert re.search(r"\[[a-z-]+\]$", said, re.MULTILINE), "no reason"
        assert status in (0, 2, 3), f"{name}: {said}"
        assert "Traceback" not in said
        for made in ("exported", "copied"):
            shutil.rmtree(made, ignore_errors=True)
    assert tree(tmp_path) == before, "files were changed, or left"
    assert not list(tmp_path.rglob("code-ran"))


def test_16_files_that_no_command_reads_do_no_harm(checkpoint, run):
    """Pickles under the names that other programs load."""
    for name in (".metadata", "pytorch_model.bin", "optimizer.pt", "rank-00009.safetensors"):
        (checkpoint / name).write_bytes(PICKLE)
    assert [run(*COMMANDS[name])[0] for name in ("verify", "generate", "export")] == [0, 0, 0]
    assert not Path("code-ran").exists()
    assert not list(Path("exported").glob("*.bin"))


def peak_bytes(name: str) -> tuple[int, int]:
    """Exit status and peak memory of a command in its own process."""
    child = subprocess.Popen(
        [*PROGRAM, *COMMANDS[name]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * 1024


@pytest.mark.slow
def test_16_memory_is_at_most_that_of_a_good_checkpoint_and_twice_the_files(checkpoint, tmp_path):
    """Of each command, in a process of its own, against the same command with the good checkpoint."""
    good = {name: peak_bytes(name) for name in ("verify", "generate", "export")}
    assert [status for status, _ in good.values()] == [0, 0, 0]
    shutil.rmtree("exported")
    shutil.copytree(checkpoint, tmp_path / "good")
    slack = 16 * 2**20  # peaks of one command differ by a few MB from run to run
    for attack in (name for name in ATTACKS if "2^" in name or "10^" in name or "bomb" in name):
        harm, refusing = ATTACKS[attack]
        harm(checkpoint)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        for name in set(refusing) & set(good):
            status, peak = peak_bytes(name)
            assert status in (2, 3)
            assert peak <= good[name][1] + 2 * size + slack, f"{attack}: {name} took {peak} bytes"
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "good", checkpoint)

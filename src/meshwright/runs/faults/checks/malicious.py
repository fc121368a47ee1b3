"""Fault test 16: checkpoints that were made to harm, and the commands that read them.

No code of theirs runs, nothing is written or overwritten, memory is bounded, and the command ends with a
reason.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.hf.source import SOURCE_FILE
from meshwright.checkpoint.manifest import MANIFEST, encode_checked
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.forked_commands import ForkedCommands
from meshwright.runs.faults.checks.running_command import commands
from meshwright.runs.faults.job import TinyJob

Run = Callable[..., tuple[int, str]]
"""Runs a command in the folder of the checkpoints' parent; returns its status and its messages."""
RANK_0 = "rank-00000.safetensors"
COMMANDS = {
    "verify": ("checkpoint", "verify", "root"),
    "generate": ("generate", "root", "--prompt", "a", "--tokens", "2"),
    "export": ("checkpoint", "export", "root", "exported"),
    "copy": ("checkpoint", "copy", "root", "copied"),
    "resume": ("train", "job.toml", "--resume"),
}
RAN = "code-ran"
PICKLE = f"cos\nmkdir\n(S'{RAN}'\ntR.".encode()
"""Creates a folder when it is unpickled."""
READERS = ("generate", "export")
ALL = (*READERS, "verify", "resume", "copy")
SECRET: dict[str, Any] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
MEMORY_SLACK_MB = 16.0
"""Peaks of one command differ by a few MB from run to run."""


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


def pack(files: Mapping[str, bytes | None]) -> bytes:
    """An archive of the files of a Hugging Face folder; None leaves one out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {".tensors.json": b"{}", "config.json": b"{}", **files}.items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


def _link(checkpoint: Path, name: str, target: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(target)


def _shape_of_2_to_60(checkpoint: Path) -> None:
    header = json.dumps({"embed.weight": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}})
    content = len(header).to_bytes(8, "little") + header.encode()
    put(checkpoint, RANK_0, content.ljust((checkpoint / RANK_0).stat().st_size, b"\0"))


def _bomb() -> bytes:
    """128 MB in 128 kB."""
    return pack({f"{number}.txt": b"\0" * 2**25 for number in range(4)})


def _write(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)


def _set(*keys: str, value: object) -> Callable[[Path], None]:
    return lambda checkpoint: edit_manifest(checkpoint, *keys, value=value)


def _archive(files: Mapping[str, bytes | None]) -> Callable[[Path], None]:
    return lambda checkpoint: put(checkpoint, SOURCE_FILE, pack(files))


ATTACKS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pickle for tensors": (lambda c: put(c, RANK_0, PICKLE.ljust(50_000, b"\0")), ALL),
    "pickle for a tokenizer": (lambda c: put(c, "tokenizer.json", PICKLE), READERS),
    "pickle for a manifest": (lambda c: _write(c, MANIFEST, PICKLE), ALL),
    "path to the parent": (_set("files", "../../secret", value=SECRET), ALL),
    "absolute path": (_set("files", "/etc/hostname", value=SECRET), ALL),
    "link for tensors": (lambda c: _link(c, RANK_0, "../../../secret"), ALL),
    "link for a manifest": (lambda c: _link(c, MANIFEST, "../../../secret"), ALL),
    "device for a manifest": (lambda c: _link(c, MANIFEST, "/dev/zero"), ALL),
    "2^60 elements in a file": (_shape_of_2_to_60, ALL),
    "2^60 elements in the manifest": (_set("tensors", "embed.weight", "shape", value=[2**60]), ALL),
    "2^30 x 2^30 elements in the manifest": (
        _set("tensors", "embed.weight", "shape", value=[2**30, 2**30]),
        ALL,
    ),
    "header of 2^62 bytes": (lambda c: put(c, RANK_0, (2**62).to_bytes(8, "little") + b"\0" * 50_000), ALL),
    "deeply nested manifest": (lambda c: _write(c, MANIFEST, b'{"a":' * 10**6), ALL),
    "deeply nested tokenizer": (lambda c: put(c, "tokenizer.json", b"[" * 10**6), READERS),
    "10^9 layers": (_set("model", "num_layers", value=10**9), (*READERS, "resume")),
    "2^40 columns": (_set("model", "hidden_size", value=2**40), (*READERS, "resume")),
    "2^50 tokens in a sample": (_set("seq_len", value=2**50), ALL),
    "path for a chat template": (_set("template", value="../../secret"), ALL),
    "archive without a list": (lambda c: _write(c, SOURCE_FILE, pack({})), ALL),
    "archive with a path": (_archive({"../x.json": b""}), ("export",)),
    "archive that is a bomb": (lambda c: put(c, SOURCE_FILE, _bomb()), ("export",)),
    "archive that is a pickle": (lambda c: put(c, SOURCE_FILE, PICKLE), ("export",)),
    "archive without a config": (_archive({"config.json": None}), ("export",)),
    "archive with a nested config": (_archive({"config.json": b"[" * 10**5}), ("export",)),
    "archive of other tensors": (_archive({".tensors.json": b'{"x": "F32"}'}), ("export",)),
    "archive of another dtype": (_archive({".tensors.json": b'{"model.norm.weight": "O"}'}), ("export",)),
}
"""What is done to a good checkpoint, and the commands that must refuse it."""
LARGE = tuple(name for name in ATTACKS if "2^" in name or "10^" in name or "bomb" in name)


def check_malicious(check: CheckRun, attacks: tuple[str, ...] = tuple(ATTACKS)) -> None:
    """All attacks on the checkpoint of a run of two ranks."""
    checkpoint = _train(check.folder)
    shutil.copytree(checkpoint, check.folder / "good")
    with ForkedCommands.started(checkpoint.parents[1]) as run:
        for attack in attacks:
            refuse_attack(check.folder, checkpoint, attack, run)
            _restore(check.folder / "good", checkpoint)
        growth = measure_memory(check.folder / "good", checkpoint, run)
    check.count("attacks refused", len(attacks))
    check.limit(
        "memory beside that of a good checkpoint and twice the files", growth / 1e6, MEMORY_SLACK_MB, "MB"
    )


def _train(folder: Path) -> Path:
    """A checkpoint of two ranks, in ``inside/root``, beside a job that can resume it."""
    job, inside = TinyJob.write(folder), folder / "inside"
    inside.mkdir()
    text = job.file.read_text(encoding="utf-8").replace("[checkpoint]", '[checkpoint]\ndir = "root"')
    (inside / "job.toml").write_text(text, encoding="utf-8")
    with commands(inside) as start:
        status, _, err = start(
            "train", "job.toml", "layout.dp_shard=2", "train.steps=2", "run_dir=run"
        ).finish()
    require(status == 0, f"the run to attack failed: {err}")
    shutil.rmtree(inside / "run")
    return next((inside / "root").glob("step-*"))


def _restore(good: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(good, checkpoint)


def refuse_attack(outer: Path, checkpoint: Path, attack: str, run: Run) -> None:
    """Each command that would use the harmful part ends with status 2 (``verify``: 3); none crashes.

    Args:
        outer: Above the folder of the commands; nothing there may change.
        checkpoint: In ``root`` of the folder of the commands; it is changed.
        attack: Of ``ATTACKS``.
        run: Runs a command.
    """
    harm, refusing = ATTACKS[attack]
    (outer / "secret").write_bytes(b"secret")
    harm(checkpoint)
    before = read_tree(outer)
    for name, arguments in COMMANDS.items():
        if name == "resume" and name not in refusing:
            continue  # it would train
        status, output = run(*arguments)
        what = f"{attack}: {name} ended with status {status}: {output}"
        if name in refusing:
            require(status == (3 if name == "verify" else 2), what)
            require(re.search(r"\[[a-z-]+\]$", output, re.MULTILINE), f"no reason: {what}")
        require(status in (0, 2, 3), what)
        require("Traceback" not in output, what)
        for made in ("exported", "copied"):
            shutil.rmtree(checkpoint.parents[1] / made, ignore_errors=True)
    require(read_tree(outer) == before, f"{attack}: files were changed, or left")
    require(not list(outer.rglob(RAN)), f"{attack}: code ran")


def read_tree(folder: Path) -> dict[str, bytes | str]:
    """All files below a folder with their content."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def measure_memory(good: Path, checkpoint: Path, run: ForkedCommands) -> float:
    """Memory of the commands that refuse large sizes, beyond a good checkpoint's and twice the files."""
    names = ("verify", "generate", "export")
    peaks = {name: run.run(COMMANDS[name]) for name in names}
    require(all(ended.status == 0 for ended in peaks.values()), f"a good checkpoint is refused: {peaks}")
    shutil.rmtree(checkpoint.parents[1] / "exported")
    growth = 0.0
    for attack in LARGE:
        harm, refusing = ATTACKS[attack]
        harm(checkpoint)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        for name in (name for name in names if name in refusing):
            ended = run.run(COMMANDS[name])
            require(ended.status in (2, 3), f"{attack}: {name} ended with status {ended.status}")
            growth = max(growth, ended.peak_bytes - peaks[name].peak_bytes - 2 * size)
        _restore(good, checkpoint)
    return growth

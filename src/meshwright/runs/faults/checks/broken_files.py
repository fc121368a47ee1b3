"""Fault tests 12 to 14: files that are truncated, have a wrong bit, or belong to another checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.checkpoint.stores import find_newest
from meshwright.core.errors import UserError
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.small_checkpoints import fill_tensors, read_value, save

PARTS = (0.0, 0.5, 0.999)
TRIALS = 200


def _save_two(root: Path, tokenizer: bytes) -> Path:
    """Steps 2 and 4; returns the latter."""
    save(root, 2, step=2, tensors=fill_tensors(2.0))
    return save(root, 2, step=4, tensors=fill_tensors(4.0), small_files={"tokenizer.json": tokenizer})


def _require_fallback(root: Path, newest: Path, name: str, what: str) -> None:
    """The previous checkpoint is found, and the broken one is named."""
    found = find_newest(root)
    require(found is not None and found[0].name == "step-00000002", f"{what} was not found")
    assert found is not None, "required before"
    sentence = found[1][0]
    require(newest.name in sentence, f"{what}: the checkpoint is not named: {sentence}")
    require(name in sentence, f"{what}: the file is not named: {sentence}")


def _require_refused(checkpoint: Path, says: str) -> None:
    try:
        read_manifest(checkpoint)
    except UserError as error:
        require(says in str(error), f"{says!r} is not in: {error}")
    else:
        require(False, f"not refused: {says}")


def check_truncation(check: CheckRun, parts: tuple[float, ...] = PARTS) -> None:
    """Each file, to a part of its size: refused by name, and the previous checkpoint is used."""
    root = check.folder / "root"
    newest, trials = _save_two(root, b"{}" * 999), 0
    for part in parts:
        for name in read_manifest(newest).files:
            content = (newest / name).read_bytes()
            (newest / name).write_bytes(content[: int(len(content) * part)])
            _require_refused(newest, f"{name} is missing or has another size")
            _require_fallback(root, newest, name, f"{name} truncated to {part:.1%}")
            (newest / name).write_bytes(content)
            trials += 1
    require(read_value(newest) == 4.0, "the repaired checkpoint is another one")
    check.count("truncated files", trials)


def check_flipped_bits(check: CheckRun, trials: int = TRIALS) -> None:
    """Random bits, in all files alike: found before a tensor is read."""
    root = check.folder / "root"
    newest = _save_two(root, b"{}")
    files = sorted(newest.iterdir())
    require(len(files) == 4, "two shards, a tokenizer and a manifest")
    for trial in range(trials):
        path = files[trial % len(files)]
        content = path.read_bytes()
        flipped, bit = bytearray(content), check.random.randrange(8 * len(content))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        name = path.name if path.name != MANIFEST else ""  # a broken manifest may be named by its fields
        _require_fallback(root, newest, name, f"bit {bit} of {path.name}")
        path.write_bytes(content)
    require(read_value(newest) == 4.0, "the repaired checkpoint is another one")
    check.count("found", 100.0, 100.0, "%")
    check.count("flipped bits", trials)


def check_mixed_files(check: CheckRun) -> None:
    """An old manifest with new shards, a new one with old shards, and shards of two ranks swapped."""
    root = check.folder / "root"
    old, new = (save(root, 2, step=4, tensors=fill_tensors(value)) for value in (2.0, 4.0))
    for manifest, shards in ((old, new), (new, old)):  # the sizes are equal, the checksums are not
        mixed = check.folder / "mixed"
        shutil.copytree(shards, mixed)
        shutil.copy(manifest / MANIFEST, mixed / MANIFEST)
        _require_refused(mixed, "the checksum of rank-0000")
        shutil.rmtree(mixed)
    checkpoint = save(check.folder / "swapped", 2, tensors={"w": torch.arange(8.0)})
    one, other = (checkpoint / f"rank-0000{rank}.safetensors" for rank in range(2))
    require(one.stat().st_size == other.stat().st_size, "shards of another size test nothing")
    one.rename(check.folder / "aside")
    other.rename(one)
    (check.folder / "aside").rename(other)
    _require_refused(checkpoint, "the checksum of rank-00000.safetensors differs")
    check.count("refused", 3)

"""Folders with other data have another fingerprint, without all of them being read."""

from __future__ import annotations

import shutil

from meshwright.data.fingerprint import MISSING, fingerprint_folder
from meshwright.data.mixture import MixedSource, write_mixture


def test_a_copy_has_the_same_fingerprint_and_changes_are_seen(prepared, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    before = fingerprint_folder(prepared)
    assert fingerprint_folder(copy) == before
    shard = next(copy.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    assert fingerprint_folder(copy) != before
    shard.unlink()
    assert fingerprint_folder(copy) != before


def test_a_missing_folder_and_a_file():
    from pathlib import Path

    assert fingerprint_folder(Path("nowhere")) == MISSING
    assert fingerprint_folder(Path(__file__)) != MISSING


def test_a_mixture_has_the_fingerprint_of_its_sources(prepared, tmp_path):
    source, mixture = tmp_path / "source", tmp_path / "mixture"
    shutil.copytree(prepared, source)
    mixture.mkdir()
    write_mixture(mixture, [MixedSource("a", str(source), 1.0)])
    before = fingerprint_folder(mixture)
    (source / "more.json").write_text("{}")
    assert fingerprint_folder(mixture) != before

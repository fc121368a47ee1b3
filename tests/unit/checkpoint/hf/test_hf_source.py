"""The files of a Hugging Face folder that a checkpoint keeps."""

from __future__ import annotations

import zipfile

import pytest

from meshwright.checkpoint.hf.source import SOURCE_FILE, load_source
from meshwright.core.errors import UserError


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json", "a/../../config.json", "run.sh"])
def test_archive_with_a_file_outside_the_kept_kinds_is_refused(tmp_path, name):
    """Export writes these files: a name must not lead out of its folder."""
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "w") as archive:
        archive.writestr(".tensors.json", "{}")
        archive.writestr("config.json", "{}")
    assert load_source(tmp_path).files == {"config.json": b"{}"}
    with zipfile.ZipFile(tmp_path / SOURCE_FILE, "a") as archive:
        archive.writestr(name, "x")
    with pytest.raises(UserError) as caught:
        load_source(tmp_path)
    assert caught.value.problems[0].code == "checkpoint-broken"

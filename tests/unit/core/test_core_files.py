"""Files are replaced atomically: old or new content, no temporary file left."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.files import replace_text


def test_a_file_is_replaced_without_leftovers(tmp_path):
    file = tmp_path / "page.html"
    for text in ("old", "n\u00e9w"):
        replace_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_file_and_no_temporary_file(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    replace_text(file, "old")

    def half(path, content):
        with path.open("wb") as half_written:
            half_written.write(content[:1])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space left"):
        replace_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_as_parent_folder_is_a_not_a_directory_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError):
        replace_text(tmp_path / "taken" / "page.html", "new")

"""Reading a corpus: fixed order, unreadable documents are quarantined, every document is counted."""

from __future__ import annotations

import json
import os

import pytest

from meshwright.core.errors import UserError
from meshwright.data.corpus import MAX_NAMED, CorpusStats, ReadOptions, iter_corpus


def names(source, base, **options) -> list[str]:
    """The names of the documents of one source."""
    return [document.name for document in iter_corpus([source], base, **options)]


def codes(error) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in error.value.problems]


@pytest.fixture
def tree(tmp_path):
    """A folder with text files, hidden files and caches."""
    for path in ("b.txt", "a.txt", "z/1.md", "m/2.txt", "m/.hidden", ".git/x", "m/__pycache__/y.txt"):
        file = tmp_path / "tree" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text of {path}\r\n")
    return tmp_path


def test_folder_is_read_in_a_fixed_order(tree, monkeypatch):
    expected = ["tree/a.txt", "tree/b.txt", "tree/m/2.txt", "tree/z/1.md"]
    assert names("tree", tree) == expected
    walk = os.walk

    def reversed_walk(top, **options):
        for folder, subfolders, files in walk(top, **options):
            subfolders.reverse()
            files.reverse()
            yield folder, subfolders, files

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert names("tree", tree) == expected


def test_text_is_read_unchanged(tree):
    assert [d.text for d in iter_corpus(["tree/a.txt"], tree)] == ["text of a.txt\r\n"]


def test_globs_and_absolute_paths(tree):
    assert names("tree/*.txt", tree) == ["tree/a.txt", "tree/b.txt"]
    assert names("tree/**/*.txt", tree) == [
        "tree/a.txt",
        "tree/b.txt",
        "tree/m/2.txt",
        "tree/m/__pycache__/y.txt",
    ], "a glob also matches caches"
    assert len(names(str(tree / "tree"), tree.parent)) == 4
    (tree / "tree/odd[1].txt").write_text("odd")
    assert names("tree/odd[1].txt", tree) == ["tree/odd[1].txt"], "an existing path is not a glob"


def test_excluded_folders_are_not_read(tree):
    assert names("tree", tree, exclude=[tree / "tree/m"]) == ["tree/a.txt", "tree/b.txt", "tree/z/1.md"]
    assert names("tree/**/*.txt", tree, exclude=[tree / "tree/m"]) == ["tree/a.txt", "tree/b.txt"]


def test_jsonl_gives_one_document_per_line(tmp_path):
    lines = [
        json.dumps({"body": "one"}),
        "",
        json.dumps({"body": "two\n"}),
        json.dumps({"text": "no"}),
        "{broken",
    ]
    lines += ['{"body": 5}', "[1]", '{"body": "\\ud800"}', "[" * 100_000, '{"body": ""}', '{"body": "one"}']
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines))
    tally = CorpusStats()
    documents = list(iter_corpus(["a.jsonl"], tmp_path, options=ReadOptions(text_field="body"), tally=tally))
    assert [(d.name, d.text) for d in documents] == [("a.jsonl:1", "one"), ("a.jsonl:3", "two\n")]
    assert (tally.documents_in, tally.quarantined, tally.empty, tally.duplicates) == (10, 6, 1, 1)
    assert tally.quarantined_names[0] == "a.jsonl:4: no field 'body'; its fields are text"


def test_unreadable_files_are_quarantined_with_a_reason(tmp_path):
    (tmp_path / "good.txt").write_text("good é")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "wb") as file:  # noqa: PTH123 - a name that is not UTF-8
        file.write(b"\xff")
    tally = CorpusStats()
    assert [d.text for d in iter_corpus([str(tmp_path)], tmp_path, tally=tally)] == ["good é"]
    assert tally.quarantined == 5
    named = "\n".join(tally.quarantined_names)
    for part in (
        "latin.txt: not UTF-8 at byte 3",
        "picture.png: files of the kind .png",
        "gone.txt: a broken link",
        "pipe.txt: not a",
    ):
        assert part in named
    assert named.encode(), "names can be printed"


def test_file_without_permission_is_quarantined(tree, monkeypatch):
    """Path.open is patched, because root ignores permissions."""
    opened = type(tree).open

    def refuse(path, *mode):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *mode)

    monkeypatch.setattr(type(tree), "open", refuse)
    tally = CorpusStats()
    assert len(list(iter_corpus(["tree"], tree, tally=tally))) == 3
    assert tally.quarantined_names == ["tree/b.txt: Permission denied"]


def test_folder_that_cannot_be_listed_is_quarantined(tree, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/m"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    tally = CorpusStats()
    assert len(list(iter_corpus(["tree"], tree, tally=tally))) == 3
    assert tally.quarantined_names == ["tree/m: Permission denied"]


def test_duplicates_are_dropped_across_sources(tree):
    tally = CorpusStats()
    documents = list(iter_corpus(["tree/b.txt", "tree"], tree, tally=tally))
    assert [d.name for d in documents] == ["tree/b.txt", "tree/a.txt", "tree/m/2.txt", "tree/z/1.md"]
    assert (tally.documents_in, tally.documents_out, tally.duplicates) == (5, 4, 1)
    assert tally.text_bytes == sum(len(d.text.encode()) for d in documents)


def test_quarantined_names_are_bounded_but_the_count_is_not():
    tally = CorpusStats()
    for number in range(MAX_NAMED + 5):
        tally.quarantine(str(number), "bad")
    assert (tally.quarantined, len(tally.quarantined_names)) == (MAX_NAMED + 5, MAX_NAMED)


def test_all_missing_sources_are_reported_before_reading(tree):
    with pytest.raises(UserError) as error:
        iter_corpus(["tree", "nope", "nope/*.txt", "", "builtin:everything", "a\0b", "~nobody-here/x"], tree)
    assert codes(error) == [
        "data-path-missing",
        "data-path-missing",
        "data-path-missing",
        "data-source-unknown",
        "data-path-missing",
        "data-path-missing",
    ]
    assert f"nope does not exist; relative paths start from {tree}." in str(error.value)


@pytest.mark.parametrize("kind", ["permission", "device", "long name"])
def test_unreadable_source_is_refused(kind, tree, monkeypatch):
    source = {"permission": "tree/a.txt", "device": "/dev/null", "long name": "x" * 300}[kind]
    if kind == "permission":

        def refuse(path, *_):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(type(tree), "open", refuse)
    with pytest.raises(UserError) as error:
        iter_corpus([source], tree)
    assert codes(error) == ["data-path-unreadable"]


@pytest.mark.parametrize("content", [b"", b"\0", b"\xff"])
def test_corpus_without_text_is_refused(content, tmp_path):
    (tmp_path / "only.txt").write_bytes(content)
    with pytest.raises(UserError) as error:
        list(iter_corpus(["only.txt"], tmp_path))
    assert codes(error) == ["data-corpus-empty"]
    assert "only.txt has no text: of 1 document, " in str(error.value)


def test_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        list(iter_corpus(["empty"], tmp_path))
    assert codes(error) == ["data-corpus-empty"]


def test_builtin_python_stdlib_is_a_corpus(tmp_path):
    tally = CorpusStats()
    read = names("builtin:python-stdlib", tmp_path, tally=tally)
    assert "python-stdlib/json/decoder.py" in read
    assert len(read) > 300
    assert tally.text_bytes > 5_000_000
    parts = {part for name in read for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert all(name.endswith(".py") for name in read)

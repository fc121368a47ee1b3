"""``meshwright prepare``: written shards, documents that were left out, errors in the corpus file."""

from __future__ import annotations

import pytest


def test_prepare_writes_shards_and_one_object(cli, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(f"document {number}\n" * 9)
    (tmp_path / "corpus.toml").write_text('sources = ["text"]\nout = "shards"\neval_fraction = 0.2\n')
    ran = cli("prepare", "corpus.toml", "--json")
    assert ran.status == 0
    keys = "engine documents_in documents_out duplicates quarantined tokens shards sha256 seconds bytes_per_s"
    assert set(keys.split()) <= set(ran.json)
    assert (tmp_path / "shards").is_dir()


def test_prepare_names_the_first_quarantined_documents_and_counts_the_others(cli, tmp_path):
    (tmp_path / "text").mkdir()
    lines = [f'{{"text": "document {number} of a corpus"}}' for number in range(20)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join([*lines, *["{torn"] * 8]))
    (tmp_path / "corpus.toml").write_text('sources = ["text"]\nout = "shards"\n')
    shown = cli("prepare", "corpus.toml").out.splitlines()
    named = [line for line in shown if line.startswith("  left out: text/a.jsonl:")]
    assert [line.split(":")[2] for line in named] == ["21", "22", "23", "24", "25"]
    assert shown[-1] == "  and 3 more; --json names them"
    assert "left out: 0 duplicates, 8 unreadable" in shown[0]


def test_prepare_counts_empty_documents_and_names_a_small_vocabulary(cli, tmp_path):
    for name, text in (("a", "to be or not to be"), ("b", ""), ("c", "to be or not to be"), ("d", "or not")):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "own.toml").write_text('sources = ["*.txt"]\nout = "shards"\ntokenizer = "bpe:32000"\n')
    ran = cli("prepare", "own.toml")
    assert "left out: 1 duplicate, 1 empty, 0 unreadable" in ran.out
    assert "bpe:32000 reached a vocabulary of" in ran.err
    (tmp_path / "own.toml").write_text(
        'sources = "*.txt"\nout = "shards"\nnear_duplicates = "yes"\nseeds = 1\n'
    )
    ran = cli("prepare", "own.toml")
    assert "Unknown key seeds in own.toml" in ran.err
    assert "near_duplicates" in ran.err
    assert "CORPUS.toml is missing" in cli("prepare").err


def test_prepare_reports_all_errors_of_a_corpus_file(cli, tmp_path):
    (tmp_path / "corpus.toml").write_text('source = ["text"]\nout = 5\n')
    ran = cli("prepare", "corpus.toml", "--json")
    assert ran.status == 2
    assert sorted(ran.codes) == ["corpus-bad-value", "corpus-missing-key", "corpus-unknown-key"]
    assert len(ran.json["errors"]) == 3


def test_engines_give_one_checksum_and_a_report(cli, tmp_path):
    """``--engine`` changes who does the work, not the bytes."""
    pytest.importorskip("duckdb")
    (tmp_path / "a.txt").write_text("to be or not to be " * 40)
    (tmp_path / "b.txt").write_text("that is the question " * 50)
    (tmp_path / "corpus.toml").write_text('sources = ["a.txt", "b.txt"]\nout = "out"\n')
    found = {}
    for engine in ("reference", "embedded"):
        ran = cli("prepare", "corpus.toml", "--engine", engine, "--report", "page.html", "--json")
        assert ran.status == 0
        found[engine] = ran.json["sha256"]
        assert ran.json["engine"] == engine
    assert found["reference"] == found["embedded"]
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("page", ["missing/page.html", "folder"])
def test_a_report_that_cannot_be_written_fails_before_the_preparation(cli, tmp_path, page):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "corpus.toml").write_text('sources = ["a.txt"]\nout = "out"\n')
    ran = cli("prepare", "corpus.toml", "--report", page, "--json")
    assert ran.status != 0
    assert ran.codes == ["report-not-writable"]
    assert not (tmp_path / "out").exists()


def test_wordcount_prints_the_top_words(cli, tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 40)
    ran = cli("wordcount", "a.txt", "--top", "2", "--engine", "reference", "--json")
    assert ran.status == 0
    assert (ran.json["distinct"], ran.json["total"], ran.json["top"]) == (4, 240, [["be", 80], ["to", 80]])
    assert "          80  be" in cli("wordcount", "a.txt", "--engine", "reference").out
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    assert "  left out: b.png: files of the kind .png" in cli("wordcount", "?.*", "--engine", "reference").out
    assert cli("wordcount", "b.png", "--engine", "reference", "--json").codes == ["data-file-kind"]
    ran = cli("wordcount", "a.txt", "--engine", "dask", "--json")
    assert ran.status == 2
    assert ran.json["errors"][0]["path"] == "--engine"

"""``meshwright prepare``: written shards, documents that were left out, errors in the corpus file."""

from __future__ import annotations


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
    assert shown[-1] == "  and 3 more"


def test_prepare_reports_all_errors_of_a_corpus_file(cli, tmp_path):
    (tmp_path / "corpus.toml").write_text('source = ["text"]\nout = 5\n')
    ran = cli("prepare", "corpus.toml", "--json")
    assert ran.status == 2
    assert sorted(ran.codes) == ["corpus-bad-value", "corpus-missing-key", "corpus-unknown-key"]
    assert len(ran.json["errors"]) == 3

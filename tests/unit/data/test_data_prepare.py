"""Preparing a corpus: deterministic, complete, split by document; every error in CORPUS.toml is reported."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.corpus import Document
from meshwright.data.prepare import CorpusSpec, load_corpus_spec, prepare_corpus
from meshwright.data.shards import ShardFolder
from meshwright.data.split import assign_splits, split_document, split_hash
from meshwright.data.tokenizer import BpeTokenizer, load_tokenizer


def listed(folder) -> list[str]:
    """The sorted names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def codes(error) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in error.value.problems]


def texts_of(folder, split) -> list[str]:
    """The decoded documents of a split."""
    opened = ShardFolder.open(folder)
    tokenizer = load_tokenizer(folder)
    found = []
    for shard in opened.index.split(split).shards:
        tokens, starts = opened.map_tokens(shard), opened.map_documents(shard).astype(int).tolist()
        found += [
            tokenizer.decode(tokens[a:b]) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)
        ]
    return found


@pytest.fixture
def corpus(tmp_path):
    """60 documents, one duplicate, one that is not UTF-8 and one empty file."""
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / f"text/{number:02d}.txt").write_text(f"document {number} é\n" * (number + 1))
    (tmp_path / "text/again.txt").write_text("document 0 é\n")
    (tmp_path / "text/bad.txt").write_bytes(b"\xff")
    (tmp_path / "text/empty.txt").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_all_documents_are_prepared_and_counted(corpus, tokenizer):
    if tokenizer != "byte":
        pytest.importorskip("tokenizers")
    seen = []
    spec = CorpusSpec(sources=("text",), out="out", tokenizer=tokenizer, eval_fraction=0.2, shard_tokens=2000)
    report = prepare_corpus(
        spec, corpus, lambda phase, tally: seen.append((tally.documents_in, tally.text_bytes))
    )
    train, held_out = texts_of(corpus / "out", "train"), texts_of(corpus / "out", "eval")
    expected = [(corpus / f"text/{n:02d}.txt").read_text() for n in range(60)]
    assert sorted(train + held_out) == sorted(expected)
    assert (report.documents_in, report.documents_out, report.duplicates) == (63, 60, 1)
    assert (report.quarantined, report.quarantined_names) == (1, ("text/bad.txt: not UTF-8 at byte 0",))
    assert (report.train_documents, report.eval_documents, report.empty) == (len(train), len(held_out), 1)
    opened = ShardFolder.open(corpus / "out")
    opened.verify()
    assert report.shards == len(opened.index.shards) > 2
    assert report.tokens == sum(s.tokens for s in opened.index.shards)
    assert seen[-1] == (63, sum(len(t.encode()) for t in expected))
    assert json.loads(json.dumps(report.as_dict()))["engine"] == "reference"
    assert listed(corpus) == ["out", "text"]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_preparing_is_deterministic(corpus, tokenizer):
    if tokenizer != "byte":
        pytest.importorskip("tokenizers")
    reports = []
    for out in ("one", "two/deeper", "one"):
        spec = CorpusSpec(sources=("text",), out=out, tokenizer=tokenizer, shard_tokens=2000)
        reports.append(prepare_corpus(spec, corpus))
    assert len({report.sha256 for report in reports}) == 1
    for name in listed(corpus / "one"):
        assert (corpus / "one" / name).read_bytes() == (corpus / "two/deeper" / name).read_bytes()


def test_prepared_bytes_are_frozen(tmp_path):
    """Format, split hash and document order do not change, so prepared data stay valid."""
    lines = [json.dumps({"text": f"line {number} of the corpus"}) for number in range(50)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    report = prepare_corpus(CorpusSpec(sources=("c.jsonl",), out="out", eval_fraction=0.1), tmp_path)
    assert (report.train_documents, report.eval_documents) == (44, 6)
    assert report.sha256 == "62717e1c11daa3aa4e0082d49515bf186b8f5b16774522cf18335f5e98303d40"


def test_sha256_covers_shards_then_index(corpus):
    report = prepare_corpus(CorpusSpec(sources=("text",), out="out", shard_tokens=2000), corpus)
    index = json.loads((corpus / "out/index.json").read_text())
    names = [shard["file"] for split in ("train", "eval") for shard in index["splits"][split]["shards"]]
    data = b"".join((corpus / "out" / name).read_bytes() for name in [*names, "index.json"])
    assert report.sha256 == hashlib.sha256(data).hexdigest()


def test_output_folder_inside_the_source_is_not_read(corpus):
    spec = CorpusSpec(sources=("text",), out="text/out")
    assert prepare_corpus(spec, corpus).sha256 == prepare_corpus(spec, corpus).sha256


def test_tokenizer_file_is_used(corpus):
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.train(["document"] * 3, 300)
    tokenizer.save(corpus)
    prepare_corpus(CorpusSpec(sources=("text",), out="out", tokenizer="./tokenizer.json"), corpus)
    assert load_tokenizer(corpus / "out").fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sources": ("nope",)}, "data-path-missing"),
        ({"sources": ("text/bad.txt",)}, "data-corpus-empty"),
        ({"sources": ("text/empty.txt",), "tokenizer": "bpe:300"}, "data-corpus-empty"),
        ({"tokenizer": "./nope.json"}, "data-tokenizer-unreadable"),
        ({"tokenizer": "nope"}, "data-tokenizer-unknown"),
        ({"out": "text"}, "data-out-exists"),
    ],
)
def test_failed_preparation_leaves_no_files(changes, code, corpus):
    spec = CorpusSpec(**{"sources": ("text",), "out": "out", **changes})
    with pytest.raises(UserError) as error:
        prepare_corpus(spec, corpus)
    assert codes(error) == [code]
    assert listed(corpus) == ["text"]
    assert len(listed(corpus / "text")) == 63


def assign(texts, fraction=0.1, seed=0):
    """The (split, text) pairs of the split by document."""
    return [(side, d.text) for side, d in assign_splits([Document("", t) for t in texts], fraction, seed)]


many_texts = st.lists(st.text("abc", min_size=1, max_size=6), unique=True, min_size=2, max_size=12)


@given(many_texts, st.floats(0.001, 0.5), st.integers(0, 5))
def test_each_document_is_in_one_split_and_no_split_is_empty(texts, fraction, seed):
    assigned = assign(texts, fraction, seed)
    assert sorted(text for _, text in assigned) == sorted(texts)
    assert {side for side, _ in assigned} == {"train", "eval"}


@given(many_texts, st.floats(0.001, 0.5), st.integers(0, 5))
def test_split_follows_the_hash_of_each_document(texts, fraction, seed):
    """If all documents would be in one split, only the one nearest to the threshold moves."""
    threshold = fraction * 2**64
    natural = {t: "eval" if split_hash(t, seed) < int(threshold) else "train" for t in texts}
    moved = [text for side, text in assign(texts, fraction, seed) if side != natural[text]]
    if len(set(natural.values())) == 2:
        assert moved == []
    else:
        assert moved == [min(texts, key=lambda t: abs(split_hash(t, seed) - int(threshold)))]


def test_appended_documents_move_no_other_between_splits():
    texts = [f"document {number}" for number in range(300)]
    before = {text: side for side, text in assign(texts[:200])}
    after = {text: side for side, text in assign(texts)}
    assert set(before.values()) == {"train", "eval"}
    assert all(after[text] == side for text, side in before.items())


def test_eval_split_has_about_the_given_fraction():
    """2,000 documents at 0.1 give about 200. Five standard deviations are 67."""
    held_out = [side for side, _ in assign(map(str, range(2000)))].count("eval")
    assert abs(held_out - 200) < 67
    assert assign(map(str, range(2000)), seed=1) != assign(map(str, range(2000)))


@settings(max_examples=50)
@given(st.integers(1, 500), st.floats(0.001, 0.5))
def test_single_document_is_split_at_the_eval_fraction(size, fraction):
    at = split_document(size, fraction)
    assert 1 <= at <= size
    assert at < size or size == 1
    assert abs(size - at - size * fraction) <= 1


def test_corpus_of_one_document_has_an_eval_split(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * 10)
    report = prepare_corpus(CorpusSpec(sources=("one.txt",), out="out", eval_fraction=0.05), tmp_path)
    assert (report.documents_out, report.train_documents, report.eval_documents) == (1, 1, 1)
    assert texts_of(tmp_path / "out", "eval") == ["56789"]
    assert texts_of(tmp_path / "out", "train") == ["0123456789" * 9 + "01234"]


def load(tmp_path, text):
    """Write CORPUS.toml and load it."""
    path = tmp_path / "CORPUS.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_corpus_spec(path)


def test_corpus_file_is_read(tmp_path):
    spec = load(tmp_path, 'sources = ["a", "b/*"]\nout = "o"\neval_fraction = 0.5\nshard_tokens = 1000\n')
    assert spec == CorpusSpec(sources=("a", "b/*"), out="o", eval_fraction=0.5, shard_tokens=1000)
    assert load(tmp_path, 'sources = ["a"]\nout = "o"').tokenizer == "byte"


def test_corpus_file_reports_all_problems_at_once(tmp_path):
    bad = 'source = ["a"]\nsources = [1, ""]\ntokenizer = "words"\n'
    bad += 'eval_fraction = 2\nshard_tokens = "9"\nzzzzz = 1'
    with pytest.raises(UserError) as error:
        load(tmp_path, bad)
    found = sorted((problem.code, problem.path) for problem in error.value.problems)
    assert found == [
        ("corpus-bad-value", "eval_fraction"),
        ("corpus-bad-value", "shard_tokens"),
        ("corpus-bad-value", "sources.0"),
        ("corpus-bad-value", "sources.1"),
        ("corpus-missing-key", "out"),
        ("corpus-unknown-key", "source"),
        ("corpus-unknown-key", "zzzzz"),
        ("data-tokenizer-unknown", "tokenizer"),
    ]
    lines = str(error.value)
    assert "Unknown key source in CORPUS.toml. Did you mean sources?" in lines
    assert "eval_fraction=2 is not valid: it should be at most 0.5, or 1 for an evaluation set." in lines


@pytest.mark.parametrize(
    "line",
    [
        "eval_fraction = 0",
        "eval_fraction = nan",
        "eval_fraction = true",
        "eval_fraction = 1979-05-27",
        "seed = -1",
        "shard_tokens = 0",
        'text_field = ""',
        "sources = []",
        'sources = "a"',
        'out = "\\u0000"',
        "tokenizer = 5",
    ],
)
def test_invalid_corpus_value_is_refused(line, tmp_path):
    good = {"sources": 'sources = ["a"]', "out": 'out = "o"', line.split()[0]: line}
    with pytest.raises(UserError) as error:
        load(tmp_path, "\n".join(good.values()))
    assert [(p.code, p.path) for p in error.value.problems] == [("corpus-bad-value", line.split()[0])]


def test_invalid_toml_is_refused(tmp_path):
    for text in ("sources = [", b"\xff"):
        with pytest.raises(UserError) as error:
            load(tmp_path, text)
        assert codes(error) == ["corpus-bad-toml"]
    for path in (tmp_path / "nope.toml", tmp_path):
        with pytest.raises(UserError) as error:
            load_corpus_spec(path)
        assert codes(error) == ["corpus-unreadable"]


@pytest.mark.parametrize("files", [1, 5])
def test_an_evaluation_set_holds_out_every_document(files, tmp_path):
    """With eval_fraction=1 a single document is not split, and the report names no training documents."""
    for number in range(files):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    report = prepare_corpus(CorpusSpec(("*.txt",), "out", eval_fraction=1.0), tmp_path)
    assert (report.train_documents, report.eval_documents, report.tokens) == (0, files, 11 * files)
    assert "all for evaluation" in report.describe()
    assert "train on" not in report.describe()

"""Formats of data files: each is read as what it is, and every kind of bad input has its own code."""

from __future__ import annotations

import gzip
import json

import pytest

from meshwright.core.errors import UserError
from meshwright.data.chat import read_conversation
from meshwright.data.chat_templates import BUILTIN_TEMPLATES
from meshwright.data.corpus import CorpusStats, ReadOptions, iter_corpus, split_text
from meshwright.data.digests import DigestSet

RECORDS = [{"text": f'text {n}, with "quotes"\nand é', "id": n} for n in range(300)]
TEXTS = [record["text"] for record in RECORDS]

STRICT = ReadOptions(skip_bad=False)


def texts(path, **options) -> list[str]:
    options = ReadOptions(**{"skip_bad": False, **options})
    return [d.text for d in iter_corpus([path.name], path.parent, options=options)]


def failure(path, **options) -> str:
    """The code of the error, which also names the file."""
    with pytest.raises(UserError) as error:
        texts(path, **options)
    (problem,) = error.value.problems
    assert path.name in problem.path
    return problem.code


def parquet(path, rows, column="text"):
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def csv_text(rows, delimiter=","):
    quoted = ['"' + row["text"].replace('"', '""') + f'"{delimiter}{row["id"]}' for row in rows]
    return "\n".join([f"text{delimiter}id", *quoted]) + "\n"


CONTENTS = {
    "a.jsonl": "\n".join(map(json.dumps, RECORDS)),
    "a.ndjson": "\n\n".join(map(json.dumps, RECORDS)),
    "array.json": json.dumps(RECORDS),
    "indented.json": "\ufeff" + json.dumps(RECORDS, indent=2),
    "wrapped.json": json.dumps({"version": "1.1", "data": RECORDS}),
    "by-name.json": json.dumps({str(r["id"]): r for r in RECORDS}),
    "lines.json": "\n".join(map(json.dumps, RECORDS)),
    "a.csv": csv_text(RECORDS),
    "bom.CSV": "\ufeff" + csv_text(RECORDS),
    "a.tsv": csv_text(RECORDS, "\t"),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_records_are_read(tmp_path, name, compression):
    data = CONTENTS[name].encode()
    if compression == ".zst":
        data = pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(gzip.compress(data) if compression == ".gz" else data)
    assert texts(path) == TEXTS


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_parquet_is_read(tmp_path, compression):
    path = parquet(tmp_path / "a.parquet", RECORDS)
    if compression:
        data = path.read_bytes()
        path = tmp_path / "b.parquet.gz"
        path.write_bytes(gzip.compress(data))
    assert texts(path) == TEXTS


def test_large_json_is_read_element_by_element(tmp_path, monkeypatch):
    """Objects above the limit are streamed; records span the chunks that are read."""
    monkeypatch.setattr("meshwright.data.records.WHOLE_JSON_CHARACTERS", 1000)
    monkeypatch.setattr("meshwright.data.files.CHUNK_BYTES", 97)
    for name in ("array.json", "indented.json", "wrapped.json", "by-name.json", "lines.json"):
        (tmp_path / name).write_text(CONTENTS[name])
        assert texts(tmp_path / name) == TEXTS, name


@pytest.mark.parametrize("whole", [10**6, 100])
def test_metadata_beside_the_array_of_records_are_ignored(tmp_path, monkeypatch, whole):
    """Objects and arrays of other values, before and after it, in small and large files."""
    monkeypatch.setattr("meshwright.data.records.WHOLE_JSON_CHARACTERS", whole)
    monkeypatch.setattr("meshwright.data.files.CHUNK_BYTES", 97)
    content = {"meta": {"by": {"name": "me"}}, "version": 1, "data": RECORDS, "license": {"text": "MIT"}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert texts(tmp_path / "a.json") == TEXTS


def test_several_arrays_of_records_are_refused(tmp_path):
    """Which of them to read is not clear; their names are listed."""
    content = {"authors": [{"name": "me"}], "data": RECORDS}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        texts(tmp_path / "a.json")
    (problem,) = caught.value.problems
    assert problem.code == "data-bad-json"
    assert "authors, data" in problem.rule
    assert "jq -c '.data[]'" in problem.fix


def test_a_single_record_is_a_document(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(RECORDS[0]))
    assert texts(tmp_path / "one.json") == TEXTS[:1]


def test_a_record_with_an_array_is_not_a_container(tmp_path):
    """An object with the text field is the record; its array of objects is one of its fields."""
    (tmp_path / "one.json").write_text('{"body": "hello", "meta": [{"body": "not a record"}]}')
    assert texts(tmp_path / "one.json", text_field="body") == ["hello"]
    chat = {"question": "hello", "answer": "hi", "meta": [{"question": "not", "answer": "a record"}]}
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    assert texts(tmp_path / "chat.json", template=BUILTIN_TEMPLATES["plain"]) == ["hello\nhi"]


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a" * 2000},
        {"id": "a" * 2000},
        {"id": 1, "messages": [{"role": "user", "content": "a" * 2000}]},
        {"meta": [{"text": "not a record"}], "prompt": "a" * 2000},
    ],
)
def test_a_large_single_record_is_refused(tmp_path, monkeypatch, record):
    """Above the limit an object must contain records: one record is neither lost nor torn."""
    monkeypatch.setattr("meshwright.data.records.WHOLE_JSON_CHARACTERS", 1000)
    monkeypatch.setattr("meshwright.data.files.CHUNK_BYTES", 97)
    (tmp_path / "one.json").write_text(json.dumps(record))
    assert failure(tmp_path / "one.json") == "data-bad-json"


def test_text_field_names_the_column(tmp_path):
    (tmp_path / "a.csv").write_text("title,body\nx,one\ny,two\n")
    assert texts(tmp_path / "a.csv", text_field="body") == ["one", "two"]
    parquet(tmp_path / "a.parquet", [{"body": "one", "other": 1}])
    assert texts(tmp_path / "a.parquet", text_field="body") == ["one"]


CONVERSATION = [("user", "hello"), ("assistant", "hi")]
SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
TRL_PROMPT = {
    "prompt": [{"role": "user", "content": "hello"}],
    "completion": [{"role": "assistant", "content": "hi"}],
}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [{"role": r, "content": c} for r, c in CONVERSATION]}, CONVERSATION),
        ({"conversations": SHAREGPT}, CONVERSATION),
        ({"conversations": [{"from": "gpt", "value": "cut"}, *SHAREGPT]}, CONVERSATION),
        ({"prompt": "hello", "completion": "hi"}, CONVERSATION),
        (TRL_PROMPT, CONVERSATION),
        ({"question": "hello", "answer": "hi"}, CONVERSATION),
        ({"instruction": "hello", "input": "", "output": "hi"}, CONVERSATION),
        ({"instruction": "sum", "input": "1 2", "output": "3"}, [("user", "sum\n1 2"), ("assistant", "3")]),
        ({"instruction": "do", "context": "1", "response": "3"}, [("user", "do\n1"), ("assistant", "3")]),
        (
            {"instruction": "b", "output": "c", "system": "s", "history": [["x", "y"]]},
            [("system", "s"), ("user", "x"), ("assistant", "y"), ("user", "b"), ("assistant", "c")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]},
                          {"role": "model", "content": "hi"}]},
            CONVERSATION,
        ),
    ],
)  # fmt: skip
def test_instruction_data_are_recognised(record, expected):
    found = read_conversation(record, "x")
    assert [(message.role, message.content) for message in found.messages] == expected


def test_alpaca_has_its_own_section_for_the_input():
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    text = "".join(
        part.text for part in BUILTIN_TEMPLATES["alpaca"].render(read_conversation(record, "x"), ())
    )
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3")
    del record["input"]
    text = "".join(
        part.text for part in BUILTIN_TEMPLATES["alpaca"].render(read_conversation(record, "x"), ())
    )
    assert "### Input" not in text
    assert "paired" not in text


@pytest.mark.parametrize("name", ["alpaca.json", "alpaca.csv", "alpaca.parquet"])
def test_a_file_of_alpaca_is_read_with_a_template(tmp_path, name):
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    if name.endswith("parquet"):
        parquet(tmp_path / name, [record])
    else:
        csv = "instruction,input,output\nAdd.,1 2,3\n"
        (tmp_path / name).write_text(csv if name.endswith("csv") else json.dumps([record]))
    assert texts(tmp_path / name, template=BUILTIN_TEMPLATES["plain"]) == ["Add.\n1 2\n3"]
    assert failure(tmp_path / name) == "data-needs-template"


BAD_TEXT = {
    "a.csv": ("title,body\nx,y\n", "data-field-missing"),
    "rows.csv": ("text,id\na,1\nb\n", "data-bad-csv"),
    "quotes.csv": ('text,id\n"a,1\nb,2\n', "data-bad-csv"),
    "semicolons.csv": ("id;text\n1;a, b\n", "data-bad-csv"),
    "header.csv": ("text,id\n", "data-corpus-empty"),
    "a.jsonl": ('{"text": "a"}\n{"text": \n', "data-bad-json"),
    "mixed.jsonl": ('{"text": "a"}\n{"body": "b"}\n', "data-field-missing"),
    "mixed2.jsonl": ('{"text": "a"}\n{"prompt": "b", "completion": "c"}\n', "data-needs-template"),
    "null.jsonl": ('{"text": null}\n', "data-field-not-text"),
    "number.jsonl": ("5\n", "data-bad-json"),
    "a.json": ('[{"text": "a"},\n{"text": ]', "data-bad-json"),
    "cut.json": ('[{"text": "a"},', "data-bad-json"),
    "after.json": ('[{"text": "a"}] x', "data-bad-json"),
    "text.json": ('"text"', "data-bad-json"),
    "a.xml": ("<a/>", "data-file-kind"),
    "a.pdf.gz": ("x", "data-file-kind"),
    "empty.txt": ("", "data-corpus-empty"),
    "empty.jsonl": ("", "data-corpus-empty"),
    "empty.csv": ("", "data-corpus-empty"),
    "empty.json": ("", "data-corpus-empty"),
    "a.parquet": ("not parquet", "data-bad-parquet"),
    "a.gz": ("not gzip", "data-bad-compression"),
    "a.txt.zst": ("not zstd", "data-bad-compression"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_input_has_a_code_and_names_the_file(tmp_path, name):
    if name.endswith(("parquet", "zst")):
        pytest.importorskip("pyarrow")
    content, code = BAD_TEXT[name]
    (tmp_path / name).write_text(content)
    assert failure(tmp_path / name) == code


def test_errors_say_where(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": ,}\n]')
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    found = []
    for name in ("a.jsonl", "a.json", "a.csv"):
        with pytest.raises(UserError) as error:
            texts(tmp_path / name)
        found.append(str(error.value))
    assert "a.jsonl:3 " in found[0]
    assert "line 3" in found[1]
    assert "title, body" in found[2], "the columns are listed"


def test_a_table_without_rows_or_with_semicolons_gets_a_hint(tmp_path):
    (tmp_path / "header.csv").write_text("text,id\n")
    with pytest.raises(UserError, match=r"no rows below a header.*\[data-corpus-empty\]"):
        texts(tmp_path / "header.csv")
    (tmp_path / "semicolons.csv").write_text("id;text\n1;a, b\n")
    with pytest.raises(UserError, match=r"'id;text' .*semicolons.*\[data-bad-csv\]") as error:
        texts(tmp_path / "semicolons.csv")
    assert ".tsv" in error.value.problems[0].fix
    (tmp_path / "one.csv").write_text("left; right\na\n")
    assert texts(tmp_path / "one.csv", text_field="left; right") == ["a"]


def test_a_file_without_rows_beside_others_is_no_error(tmp_path):
    (tmp_path / "a.csv").write_text("text,id\n")
    (tmp_path / "b.csv").write_text("text,id\nsome text,1\n")
    assert texts(tmp_path) == ["some text"]


def test_a_null_in_parquet_names_the_row(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(UserError, match="row 2") as error:
        texts(path)
    assert error.value.problems[0].code == "data-field-not-text"


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_a_truncated_file_is_an_error(tmp_path, name, kind):
    data = (
        CONTENTS.get(name, "long text é " * 1000).encode()
        if name != "a.json"
        else CONTENTS["array.json"].encode()
    )
    if kind == "gz":
        whole = gzip.compress(data)
    else:
        whole = pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert failure(path) == "data-bad-compression"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_what_is_not_utf8_is_an_error(tmp_path, name):
    content = {"a.csv": b"text\ncaf\xe9\n", "a.txt": b"caf\xe9"}.get(name, b'[{"text": "caf\xe9"}]')
    (tmp_path / name).write_bytes(content.strip(b"[]") if name == "a.jsonl" else content)
    assert failure(tmp_path / name) == "data-not-utf8"


def test_bad_records_are_left_out_and_counted_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n{"text": "c"}\n')
    tally = CorpusStats()
    found = list(iter_corpus(["a.jsonl"], tmp_path, options=ReadOptions(skip_bad=True), tally=tally))
    assert ([d.text for d in found], tally.quarantined) == (["a", "c"], 1)


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name in ("a.parquet", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=r"meshwright\[data\]") as error:
            texts(tmp_path / name)
        assert error.value.problems[0].code == "install-missing-extra"


def test_a_long_text_is_split_at_places_that_no_token_spans():
    text = "".join(f"word{n} of the text,  two spaces.\n" * 3 + "\n\n    indented é\n" for n in range(3000))
    pieces = list(split_text([text[i : i + 1000] for i in range(0, len(text), 1000)], size=500))
    assert "".join(pieces) == text
    assert len(pieces) > 100
    assert pieces == list(split_text([text], size=500)), "whatever the chunks are"
    assert max(map(len, pieces[:-1])) < 1000
    minified = '{"name":"value","list":[1,2]},' * 1000
    ends = {piece[-1] for piece in list(split_text([minified], size=500))[:-1]}
    assert ends <= set("nametvalulist"), "after the last letter of a name or value"
    assert next(split_text(["x" * 100_000], size=500)) == "x" * 2_000, "without a place, anywhere"


def test_a_long_file_gives_the_tokens_of_the_whole_text(tmp_path, monkeypatch):
    """Its document is read in pieces, each encoded alone."""
    pytest.importorskip("tokenizers")
    from meshwright.data.tokenizer import BpeTokenizer

    text = "".join(f"word{n} it's of the text,  two.\n\n    indented é 12345\n" for n in range(2000))
    text += "".join(f'{{"it\'s":"one{n}_two","列":[1,2e5]}},' for n in range(20_000))
    monkeypatch.setattr("meshwright.data.corpus.LONG_CHARACTERS", 10_000)
    (tmp_path / "a.txt").write_text(text)
    (document,) = iter_corpus(["a.txt"], tmp_path)
    pieces = list(document.pieces())
    assert document.text == ""
    assert "".join(pieces) == text
    tokenizer = BpeTokenizer.train([text[:10_000], text[-10_000:]], 400)
    encoded = [token for ids in tokenizer.encode_batch(pieces) for token in ids.tolist()]
    assert encoded == tokenizer.encode(text)


def test_progress_never_passes_the_size_of_the_files(tmp_path):
    """A long text is read three times: to find duplicates, to assign its split, and to encode it."""
    (tmp_path / "a.txt").write_text("some words\n" * 200_000)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"other words\n" * 10))
    tally, seen = CorpusStats(), []
    for document in list(iter_corpus(["a.txt", "b.txt.gz"], tmp_path, tally=tally)):
        seen += [tally.read_bytes for _ in document.pieces()]
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert tally.total_bytes == tally.read_bytes == total
    assert max(seen) <= total
    assert len(set(seen)) > 2


def test_digests_are_found_again():
    found = DigestSet()
    keys = [n.to_bytes(3, "little") * 6 for n in range(2000)]
    assert all(found.add(key[:16]) for key in keys)
    assert not any(found.add(key[:16]) for key in keys)
    aligned = DigestSet()
    assert aligned.add(b"\0\0" + b"abcdefgh")
    assert aligned.add(b"\0\0" + b"ijklmnop")
    assert aligned.add(b"\0\0" + b"efghijkl"), "parts of two others"

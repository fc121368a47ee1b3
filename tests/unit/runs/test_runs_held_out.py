"""Preparing evaluation sets: each is read as what it is, and evaluated whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import UserError
from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.runs.held_out import check_paths, prepare_held_out
from meshwright.spec.job import EvalSet
from meshwright.spec.load import load_job

CHAT = {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]}
FILES = {
    "plain.txt": "some text",
    "text.jsonl": json.dumps({"text": "some text"}),
    "text.csv": "id,text\n1,some text\n",
    "named.csv": "id,body\n1,some text\n",
    "chat.jsonl": json.dumps(CHAT),
    "own.csv": "q,a\nask,say\n",
}
"""Every file gives one document."""


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """``prepare("plain.txt")``: the set as (tokens, targets) of its only sample, with the job's template."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer").mkdir()
    ByteTokenizer().save(tmp_path / "tokenizer")
    job = load_job("tiny", ["data.path=chat.jsonl", "data.seq_len=128"])

    def run(path, job_template="plain", **own):
        data = dataclasses.replace(job.data, template=job_template, prompt_masking=True)
        one = EvalSet("set", str(tmp_path / path), **own)
        reporter = ConsoleReporter(Output(as_json=True))
        folder = prepare_held_out(dataclasses.replace(job, data=data), one, tmp_path / "tokenizer", reporter)
        rows = TokenDataset.open_set(folder, data).read([0])
        targets = rows.targets[rows.targets != IGNORE_INDEX]
        return ByteTokenizer().decode(rows.tokens[0]).rstrip("\0"), ByteTokenizer().decode(targets)

    return run


@pytest.mark.parametrize(
    ("path", "own", "text", "targets"),
    [
        ("plain.txt", {}, "some text", "ome text"),
        ("text.jsonl", {}, "some text", "ome text"),
        ("text.csv", {}, "some text", "ome text"),
        ("named.csv", {"text_field": "body"}, "some text", "ome text"),
        ("chat.jsonl", {}, "ask\nsay", "say"),
        ("chat.jsonl", {"template": "chatml"}, "<|im_start|>user\nask<|im_end|>\n", "say<|im_end|>\n"),
        ("own.csv", {"template": "plain", "prompt_field": "q", "answer_field": "a"}, "ask\nsay", "say"),
    ],
)
def test_a_set_is_read_as_what_it_is(prepare, path, own, text, targets):
    """Text is plain text and counts whole, also in a job with a template and prompt masking."""
    found = prepare(path, **own)
    assert found[0].startswith(text)
    assert found[1] == targets


def test_conversations_need_a_template(prepare):
    """Of the job, or of the set itself."""
    with pytest.raises(UserError) as error:
        prepare("chat.jsonl", job_template=None)
    assert [problem.code for problem in error.value.problems] == ["data-needs-template"]
    assert prepare("chat.jsonl", job_template=None, template="plain")[1] == "say"


def test_fields_of_a_set_ask_for_conversations(prepare):
    with pytest.raises(UserError) as error:
        prepare("plain.txt", prompt_field="q")
    assert [problem.code for problem in error.value.problems] == ["data-not-conversation"]


def test_missing_sets_are_found_before_data_are_prepared(prepare, tmp_path):
    job = load_job("tiny", ["data.path=chat.jsonl", "data.seq_len=64"])
    sets = tuple(EvalSet(name, str(tmp_path / name)) for name in ("plain.txt", "none", "nothing"))
    with pytest.raises(UserError) as error:
        check_paths(dataclasses.replace(job, data=dataclasses.replace(job.data, eval=sets)))
    assert [Path(problem.path).name for problem in error.value.problems] == ["none", "nothing"]


def test_the_messages_are_about_evaluation(prepare, capsys):
    """No epochs, and no documents to train on."""
    prepare("plain.txt")
    text = " ".join(capsys.readouterr().err.split())
    assert "prepared 1 document (all for evaluation;" in text
    assert "epochs" not in text


def test_a_prepared_set_has_only_its_own_keys(prepare, tmp_path):
    """Its eval split counts; keys that say how to read text are refused."""
    prepare_corpus(CorpusSpec(("plain.txt",), "done", eval_fraction=1.0), tmp_path)
    assert prepare("done")[0] == "some text"
    with pytest.raises(UserError) as error:
        prepare("done", text_field="body")
    assert [(p.code, p.path) for p in error.value.problems] == [
        ("data-already-prepared", "data.eval.text_field")
    ]

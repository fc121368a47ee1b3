"""Preparing the data of a job: cached, prepared again after a change, invalid settings refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.data.tokenizer import BpeTokenizer
from meshwright.runs.data import prepare_data
from meshwright.runs.reporter import Reporter
from meshwright.spec.load import load_job

EXAMPLE = Path(__file__).parents[3] / "examples" / "instruct.toml"


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """``prepare(mask="causal")``: prepares the data of a small job with these keys of [data]."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"ask {n}", "answer": f"say {n}"}) for n in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))

    def run(vocab_size=1024, **data):
        job = load_job("tiny", [f"model.vocab_size={vocab_size}", "data.path=qa.jsonl", "data.seq_len=64"])
        asked = {"template": "chatml", "mask": "document", "prompt_masking": True, **data}
        job = dataclasses.replace(job, data=dataclasses.replace(job.data, **asked))
        return prepare_data(job, ConsoleReporter(Output(as_json=True)))

    return run


def codes(error) -> list[tuple[str, str]]:
    return [(problem.code, problem.path.rpartition("/")[2]) for problem in error.value.problems]


def test_data_is_prepared_once_and_again_after_a_change(prepare, tmp_path, capsys):
    first = prepare()
    assert "of prompts" in capsys.readouterr().err
    assert prepare() == first
    assert "prepared" not in capsys.readouterr().err, "found in the cache"
    others = {prepare(template="plain"), prepare(prompt_field="answer", answer_field="prompt")}
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    others.add(prepare(template="mine.jinja"))
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}.{% endfor %}")
    others.add(prepare(template="mine.jinja"))
    assert len(others | {first}) == 5
    assert prepare(mask="causal", prompt_masking=False) == first, (
        "mask and prompt_masking do not change the prepared folder"
    )


def test_the_padding_share_is_printed(prepare, capsys):
    folder = prepare()
    dataset = TokenDataset.open(folder, "train", 64, "document")
    share = dataset.padding / (64 * len(dataset))
    assert f"{share:.1%} padding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"template": None}, ("data-no-prompts", "data.prompt_masking")),
        ({"template": "chatlm"}, ("data-template-unknown", "data.template")),
        ({"template": "tokenizer"}, ("data-template-unknown", "data.template")),
        ({"prompt_field": "question"}, ("data-not-conversation", "qa.jsonl:1")),
        ({"tokenizer": "./nope"}, ("data-tokenizer-unreadable", "nope")),
        ({"tokenizer": "nope"}, ("data-tokenizer-unknown", "data.tokenizer")),
    ],
)
def test_invalid_settings_are_refused_before_data_is_prepared(prepare, tmp_path, data, expected):
    with pytest.raises(UserError) as error:
        prepare(**data)
    assert codes(error) == [expected]
    assert not list((tmp_path / ".meshwright").glob("data/*"))


def test_a_template_for_a_prepared_folder_is_refused(prepare, tmp_path):
    prepare_corpus(CorpusSpec(("qa.jsonl",), "done", template="plain"), tmp_path)
    assert prepare(path="done", template=None) == Path("done")
    with pytest.raises(UserError) as error:
        prepare(path="done")
    assert codes(error) == [("data-already-prepared", "data.template")]


def test_prompt_masking_of_a_folder_without_prompts_is_refused(prepare, tmp_path):
    (tmp_path / "plain.txt").write_text("text " * 100)
    prepare_corpus(CorpusSpec(("plain.txt",), "done"), tmp_path)
    with pytest.raises(UserError) as error:
        prepare(path="done", template=None)
    assert [problem.code for problem in error.value.problems] == ["data-no-prompts"]
    assert "done was prepared without a template" in str(error.value)


def test_a_tokenizer_folder_has_its_own_template_and_must_fit_the_vocabulary(prepare, tmp_path):
    """Added tokens have the highest ids and count for the vocabulary size."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    (tmp_path / "hf").mkdir()
    trained = BpeTokenizer.train(["ask say"] * 3, 300)
    trained.save(tmp_path / "hf")
    content = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append(
        {"id": max(content["model"]["vocab"].values()) + 1, "content": "<|turn|>", **flags}
    )
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(content))
    template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError) as error:
        prepare(tokenizer="./hf", template="tokenizer", vocab_size=256)
    assert codes(error) == [("model-vocab-small", "model.vocab_size")]
    added = BpeTokenizer((tmp_path / "hf/tokenizer.json").read_text()).special_tokens["<|turn|>"]
    dataset = TokenDataset.open(prepare(tokenizer="./hf", template="tokenizer"), "train", 64, "document")
    assert (dataset.read([0]).tokens == added).sum() >= 2
    assert f"vocabulary of {added + 1}." in str(error.value)


def test_the_instruction_example_loads_its_data(prepare, monkeypatch):
    """All lines are read, and some have several turns."""
    monkeypatch.chdir(EXAMPLE.parents[1])
    job = load_job(str(EXAMPLE))
    assert (job.data.mask, job.data.prompt_masking) == ("document", True)
    lines = [json.loads(line) for line in Path(job.data.path).read_text().splitlines()]
    assert 40 <= len(lines) <= 80
    assert any("messages" in line for line in lines)


def test_progress_of_the_shared_tokenizer_is_that_of_all_sources(tmp_path, monkeypatch):
    """It rises to 100% once: the total covers every source from the start."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    tables = ""
    for name, words in (("large", 4000), ("small", 40)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} word {n}\n" for n in range(words)))
        tables += f'[[data.sources]]\nname = "{name}"\npath = "{name}.txt"\n'
    (tmp_path / "job.toml").write_text(
        '[model]\npreset = "tiny"\n[data]\ntokenizer = "bpe:300"\nseq_len = 16\n'
        + tables
        + "[train]\nsteps = 1\nglobal_batch = 1\n"
    )
    shown = []

    class Recorder(Reporter):
        @contextmanager
        def bar(self, total):
            yield lambda text, done: shown.append((text, done))

    prepare_data(load_job("job.toml"), Recorder())
    training = [done for text, done in shown if text.startswith("training the tokenizer")]
    assert training == sorted(training)
    assert max(training) <= 100

"""Instruction data become samples whose targets are exactly the answers, for every tokenizer and template."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.core.errors import UserError
from meshwright.data.chat import Conversation, Message
from meshwright.data.chat_templates import BUILTIN_TEMPLATES
from meshwright.data.corpus import Document
from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.encode import encode_documents
from meshwright.data.prepare import CorpusSpec, load_corpus_spec, prepare_corpus
from meshwright.data.shards import ShardFolder
from meshwright.data.tokenizer import BpeTokenizer, ByteTokenizer

PAIRS = [(f"What is {n} + {n}?", f"It is {2 * n}. (Not {n})") for n in range(40)]


def write_lines(folder, records):
    """Write records as lines of data.jsonl."""
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))


@pytest.fixture
def corpus(tmp_path):
    """40 conversations: half as prompt and answer, half as messages."""
    half = [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS[:20]]
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in PAIRS[20:]
    ]
    write_lines(tmp_path, half + [{"messages": messages} for messages in turns])
    return tmp_path


def counted_texts(dataset):
    """The decoded targets of the loss, per document, over all samples."""
    tokenizer = dataset.load_tokenizer()
    rows = dataset.read(np.arange(len(dataset)))
    return [
        tokenizer.decode(targets[(segments == n) & (targets != IGNORE_INDEX)])
        for targets, segments in zip(rows.targets, rows.segments, strict=True)
        for n in range(segments[-1] + 1)
    ]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:400"])
@pytest.mark.parametrize("template", sorted(BUILTIN_TEMPLATES))
def test_loss_targets_are_the_answers(tokenizer, template, corpus):
    if tokenizer != "byte":
        pytest.importorskip("tokenizers")
    spec = CorpusSpec(("data.jsonl",), "out", tokenizer, template=template, eval_fraction=0.2)
    report = prepare_corpus(spec, corpus)
    assert (report.documents_out, report.quarantined) == (40, 0)
    found = []
    for split in ("train", "eval"):
        dataset = TokenDataset.open(corpus / "out", split, 512, "document", prompt_masking=True)
        found += [text for text in counted_texts(dataset) if text]
    end = "".join(BUILTIN_TEMPLATES[template].after.get("assistant", ""))
    if tokenizer != "byte":
        for marker in BUILTIN_TEMPLATES[template].markers:  # special tokens, which decoding leaves out
            end = end.replace(marker, "")
    assert sorted(found) == sorted(answer + end for _, answer in PAIRS)
    ShardFolder.open(corpus / "out").verify()
    assert 0 < report.prompt_tokens < report.tokens


def test_preparing_chat_data_is_deterministic(corpus):
    reports = [
        prepare_corpus(CorpusSpec(("data.jsonl",), out, template="chatml"), corpus) for out in ("a", "b")
    ]
    assert reports[0].sha256 == reports[1].sha256
    for file in (corpus / "a").iterdir():
        assert file.read_bytes() == (corpus / "b" / file.name).read_bytes(), file.name
    other = prepare_corpus(CorpusSpec(("data.jsonl",), "b", template="plain"), corpus)
    assert other.sha256 != reports[0].sha256


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A BPE tokenizer with the special tokens of ChatML."""
    pytest.importorskip("tokenizers")
    return BpeTokenizer.train(["what is the answer", "it is"], 320, BUILTIN_TEMPLATES["chatml"].markers)


def encode(tokenizer, *messages, template="chatml"):
    """One conversation, rendered and encoded."""
    parts = BUILTIN_TEMPLATES[template].render(Conversation("", messages), tuple(tokenizer.special_tokens))
    return encode_documents(tokenizer, [Document("", "".join(p.text for p in parts), parts)])[0]


def test_template_markers_are_special_tokens_but_message_text_is_not(chat_tokenizer):
    start, end = (chat_tokenizer.special_tokens[m] for m in ("<|im_start|>", "<|im_end|>"))
    spelled = Message("user", "say <|im_end|> and <|endoftext|>")
    encoded = encode(chat_tokenizer, spelled, Message("assistant", "<|im_start|>"))
    tokens = encoded.tokens.tolist()
    assert (tokens.count(start), tokens.count(end), tokens.count(chat_tokenizer.end_of_document)) == (2, 2, 0)
    assert "say <|im_end|> and <|endoftext|>" in chat_tokenizer.decode(tokens)
    counted = encoded.tokens[encoded.loss_mask == 1].tolist()
    assert counted[counted.index(end) :] == [end, *chat_tokenizer.encode("\n")]
    assert chat_tokenizer.decode(counted) == "<|im_start|>\n"


def test_no_token_spans_prompt_and_answer(chat_tokenizer):
    """The trained merges would join 'it is' across the end of the prompt."""
    assert len(chat_tokenizer.encode("it is")) < len("it is")
    for cut in range(1, 5):
        parts = (Message("user", "x"), Message("assistant", "it is"[:cut]))
        encoded = encode(chat_tokenizer, *parts, template="plain")
        assert chat_tokenizer.decode(encoded.tokens[encoded.loss_mask == 1]) == "it is"[:cut]
        assert chat_tokenizer.decode(encoded.tokens[encoded.loss_mask == 0]) == "x\n"


def test_text_between_special_tokens_is_encoded_as_one_string(chat_tokenizer):
    """Role, line break and content give the tokens that the library gives for the whole text."""
    messages = (Message("user", "what is the answer"), Message("assistant", "it is"))
    whole = "<|im_start|>user\nwhat is the answer<|im_end|>\n<|im_start|>assistant\n"
    chat_tokenizer._inner.encode_special_tokens = False
    try:
        expected = chat_tokenizer.encode(whole)
    finally:
        chat_tokenizer._inner.encode_special_tokens = True
    encoded = encode(chat_tokenizer, *messages)
    assert encoded.tokens[encoded.loss_mask == 0].tolist() == expected


def test_end_of_document_written_by_the_template_is_not_repeated(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    source = (
        "{% for m in messages %}{{ m.content }}{{ '<|endoftext|>' if m.role == 'assistant' }}{% endfor %}"
    )
    (tmp_path / "end.jinja").write_text(source)
    write_lines(tmp_path, [{"prompt": f"q{n} ", "answer": f"a{n}"} for n in range(9)])
    prepare_corpus(CorpusSpec(("data.jsonl",), "out", "bpe:300", template="end.jinja"), tmp_path)
    opened = ShardFolder.open(tmp_path / "out")
    shard = opened.index.splits.train.shards[0]
    tokens, starts = opened.map_tokens(shard), opened.map_documents(shard)
    ends = tokens == opened.index.tokenizer.end_of_document
    assert ends.sum() == len(starts)
    assert (opened.map_loss_mask(shard)[ends] == 1).all(), "the end of an answer is in the loss"


def test_byte_tokenizer_encodes_markers_as_text():
    encoded = encode(ByteTokenizer(), Message("user", "q"), Message("assistant", "a"))
    assert ByteTokenizer().decode(encoded.tokens[encoded.loss_mask == 1]) == "a<|im_end|>\n"


def test_lines_without_a_conversation_are_quarantined(tmp_path):
    write_lines(
        tmp_path,
        [{"text": "a"}, {"prompt": "q", "answer": "a"}, {"messages": 3}, {"prompt": "r", "answer": "b"}],
    )
    (tmp_path / "notes.txt").write_text("not instruction data")
    report = prepare_corpus(CorpusSpec(("data.jsonl", "notes.txt"), "out", template="plain"), tmp_path)
    assert (report.documents_out, report.quarantined) == (2, 3)
    named = [name.partition(": ")[0] for name in report.quarantined_names]
    assert named == ["data.jsonl:1", "data.jsonl:3", "notes.txt"]


def test_corpus_without_conversations_is_refused(tmp_path):
    write_lines(tmp_path, [{"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError) as error:
        prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain"), tmp_path)
    assert error.value.problems[0].code == "data-corpus-empty"
    assert "2 that could not be read as conversations, such as data.jsonl:1: " in str(error.value)


def test_conversations_without_a_template_are_refused(corpus):
    with pytest.raises(UserError) as error:
        prepare_corpus(CorpusSpec(("data.jsonl",), "out", on_bad_records="error"), corpus)
    assert [problem.code for problem in error.value.problems] == ["data-needs-template"]


def test_unknown_template_is_refused_before_writing(corpus):
    with pytest.raises(UserError) as error:
        prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="chatlm"), corpus)
    assert error.value.problems[0].code == "data-template-unknown"
    assert [entry.name for entry in corpus.iterdir()] == ["data.jsonl"]


def test_single_conversation_is_not_split(tmp_path):
    """A split would separate the answer from its question. The eval split stays empty."""
    write_lines(tmp_path, [{"prompt": "p" * 50, "answer": "a" * 50}])
    prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain", eval_fraction=0.1), tmp_path)
    train, held_out = (
        TokenDataset.open(tmp_path / "out", split, 200, "document", prompt_masking=True)
        for split in ("train", "eval")
    )
    assert [text for text in counted_texts(train) if text] == ["a" * 50]
    assert held_out.is_empty


def test_eval_samples_without_targets_are_legal(tmp_path):
    """The first eval sample lies inside one long prompt; the incomplete last one has the answer."""
    write_lines(tmp_path, [{"prompt": f"{n}" + "p" * 100, "answer": "a"} for n in range(20)])
    prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain", eval_fraction=0.01), tmp_path)
    held_out = TokenDataset.open(tmp_path / "out", "eval", 64, "causal", prompt_masking=True)
    assert [held_out.count_targets([n]) for n in range(len(held_out))] == [0, 2]


@pytest.mark.parametrize(
    ("lines", "idle"),
    [('prompt_field = "q"', "prompt_field"), ('template = "plain"\ntext_field = "t"', "text_field")],
)
def test_unused_field_keys_are_refused(lines, idle, tmp_path):
    (tmp_path / "CORPUS.toml").write_text(f'sources = ["a"]\nout = "o"\n{lines}\n')
    with pytest.raises(UserError) as error:
        load_corpus_spec(tmp_path / "CORPUS.toml")
    assert [(p.code, p.path) for p in error.value.problems] == [("corpus-idle-key", idle)]

"""From instruction data to samples: exactly the answers count, whatever tokenizer and template."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.core.errors import UserError
from meshwright.data.chat import Conversation, Message
from meshwright.data.chat_templates import BUILTIN
from meshwright.data.corpus import Document
from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.encode import encode_documents
from meshwright.data.prepare import CorpusSpec, load_corpus_spec, prepare_corpus
from meshwright.data.shards import ShardFolder
from meshwright.data.tokenizer import BpeTokenizer, ByteTokenizer

PAIRS = [(f"What is {n} + {n}?", f"It is {2 * n}. (Not {n})") for n in range(40)]


def write_lines(folder, records):
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))


@pytest.fixture
def corpus(tmp_path):
    half = [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS[:20]]
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in PAIRS[20:]
    ]
    write_lines(tmp_path, half + [{"messages": messages} for messages in turns])
    return tmp_path


def counted_texts(dataset):
    """Decoded targets that count, by document, over all samples."""
    tokenizer = dataset.load_tokenizer()
    rows = dataset.read(np.arange(len(dataset)))
    return [
        tokenizer.decode(targets[(segments == n) & (targets != IGNORE_INDEX)])
        for targets, segments in zip(rows.targets, rows.segments, strict=True)
        for n in range(segments[-1] + 1)
    ]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:400"])
@pytest.mark.parametrize("template", sorted(BUILTIN))
def test_the_counted_targets_are_the_answers(tokenizer, template, corpus):
    if tokenizer != "byte":
        pytest.importorskip("tokenizers")
    spec = CorpusSpec(("data.jsonl",), "out", tokenizer, template=template, eval_fraction=0.2)
    report = prepare_corpus(spec, corpus)
    assert (report.documents_out, report.quarantined) == (40, 0)
    found = []
    for split in ("train", "eval"):
        dataset = TokenDataset.open(corpus / "out", split, 512, "document", prompt_masking=True)
        found += [text for text in counted_texts(dataset) if text]
    end = "".join(BUILTIN[template].after.get("assistant", ""))
    if tokenizer != "byte":
        for marker in BUILTIN[template].markers:  # special tokens, which decoding leaves out
            end = end.replace(marker, "")
    assert sorted(found) == sorted(answer + end for _, answer in PAIRS)
    ShardFolder.open(corpus / "out").verify()
    assert 0 < report.prompt_tokens < report.tokens


def test_the_same_data_give_the_same_bytes(corpus):
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
    pytest.importorskip("tokenizers")
    return BpeTokenizer.train(["what is the answer", "it is"], 320, BUILTIN["chatml"].markers)


def encode(tokenizer, *messages, template="chatml"):
    parts = BUILTIN[template].render(Conversation("", messages), tuple(tokenizer.special_tokens))
    return encode_documents(tokenizer, [Document("", "".join(p.text for p in parts), parts)])[0]


def test_markers_become_special_tokens_and_what_users_spell_does_not(chat_tokenizer):
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
    """The trained merges would join 'it is' across the border of the plain template."""
    assert len(chat_tokenizer.encode("it is")) < len("it is")
    for cut in range(1, 5):
        parts = (Message("user", "x"), Message("assistant", "it is"[:cut]))
        encoded = encode(chat_tokenizer, *parts, template="plain")
        assert chat_tokenizer.decode(encoded.tokens[encoded.loss_mask == 1]) == "it is"[:cut]
        assert chat_tokenizer.decode(encoded.tokens[encoded.loss_mask == 0]) == "x\n"


def test_text_between_special_tokens_is_encoded_in_one_go(chat_tokenizer):
    """As the library does with the whole text: role, line break and content are not cut apart."""
    messages = (Message("user", "what is the answer"), Message("assistant", "it is"))
    whole = "<|im_start|>user\nwhat is the answer<|im_end|>\n<|im_start|>assistant\n"
    chat_tokenizer._inner.encode_special_tokens = False
    try:
        expected = chat_tokenizer.encode(whole)
    finally:
        chat_tokenizer._inner.encode_special_tokens = True
    encoded = encode(chat_tokenizer, *messages)
    assert encoded.tokens[encoded.loss_mask == 0].tolist() == expected


def test_an_end_that_the_template_wrote_is_not_doubled(tmp_path):
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
    assert (opened.map_loss_mask(shard)[ends] == 1).all(), "the end of an answer counts"


def test_bytes_have_no_special_tokens():
    encoded = encode(ByteTokenizer(), Message("user", "q"), Message("assistant", "a"))
    assert ByteTokenizer().decode(encoded.tokens[encoded.loss_mask == 1]) == "a<|im_end|>\n"


def test_lines_without_conversation_are_quarantined_and_the_rest_is_read(tmp_path):
    write_lines(
        tmp_path,
        [{"text": "a"}, {"prompt": "q", "answer": "a"}, {"messages": 3}, {"prompt": "r", "answer": "b"}],
    )
    (tmp_path / "notes.txt").write_text("not instruction data")
    report = prepare_corpus(CorpusSpec(("data.jsonl", "notes.txt"), "out", template="plain"), tmp_path)
    assert (report.documents_out, report.quarantined) == (2, 3)
    assert report.quarantined_names == (
        "data.jsonl:1: neither 'messages' nor the fields 'prompt' and 'answer', which a template needs",
        "data.jsonl:3: 'messages' is not a list of messages",
        "notes.txt: not a .jsonl file, and a template needs lines with conversations",
    )


def test_nothing_but_lines_without_conversation_is_an_error(tmp_path):
    write_lines(tmp_path, [{"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError) as error:
        prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain"), tmp_path)
    assert error.value.problems[0].code == "data-corpus-empty"
    assert "2 that could not be read as conversations, such as data.jsonl:1: neither" in str(error.value)
    assert "whose lines have messages, or prompt and answer" in str(error.value)


def test_conversations_without_a_template_say_that_one_is_needed(corpus):
    with pytest.raises(UserError, match="it has a conversation, which needs a template"):
        prepare_corpus(CorpusSpec(("data.jsonl",), "out"), corpus)


def test_a_template_that_is_missing_leaves_nothing_behind(corpus):
    with pytest.raises(UserError) as error:
        prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="chatlm"), corpus)
    assert str(error.value).startswith("template='chatlm' is not a chat template")
    assert [entry.name for entry in corpus.iterdir()] == ["data.jsonl"]


def test_one_conversation_is_never_cut(tmp_path):
    """Its answer would be held out and its question left: it is trained on, and nothing is held out."""
    write_lines(tmp_path, [{"prompt": "p" * 50, "answer": "a" * 50}])
    prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain", eval_fraction=0.1), tmp_path)
    train, held_out = (
        TokenDataset.open(tmp_path / "out", split, 200, "document", prompt_masking=True)
        for split in ("train", "eval")
    )
    assert [text for text in counted_texts(train) if text] == ["a" * 50]
    assert held_out.is_empty


def test_a_held_out_split_of_prompts_alone_is_no_mistake(tmp_path):
    """Windows of 64 over one long held-out prompt have no target; training is what must have some."""
    write_lines(tmp_path, [{"prompt": f"{n}" + "p" * 100, "answer": "a"} for n in range(20)])
    prepare_corpus(CorpusSpec(("data.jsonl",), "out", template="plain", eval_fraction=0.01), tmp_path)
    held_out = TokenDataset.open(tmp_path / "out", "eval", 64, "causal", prompt_masking=True)
    assert len(held_out) == 1
    assert held_out.count_targets([0]) == 0


@pytest.mark.parametrize(
    ("lines", "idle"),
    [('prompt_field = "q"', "prompt_field"), ('template = "plain"\ntext_field = "t"', "text_field")],
)
def test_fields_without_use_are_refused(lines, idle, tmp_path):
    (tmp_path / "CORPUS.toml").write_text(f'sources = ["a"]\nout = "o"\n{lines}\n')
    with pytest.raises(UserError) as error:
        load_corpus_spec(tmp_path / "CORPUS.toml")
    assert [(p.code, p.path) for p in error.value.problems] == [("corpus-idle-key", idle)]

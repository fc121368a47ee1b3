"""Chat templates: rendered text, loss mask, and errors of templates."""

from __future__ import annotations

import json
import re
import sys

import pytest

from meshwright.core.errors import UserError
from meshwright.data.chat import Conversation, Message, read_conversation
from meshwright.data.chat_templates import BUILTIN_TEMPLATES, load_template

CHATML = """\
{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
DROPS_EARLIER_ANSWERS = """\
{% for message in messages %}
{{ message.role }}: {% if message.role != 'assistant' or loop.last %}{{ message.content }}{% endif %};
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}
"""

SHORT = Conversation("a:1", (Message("user", "Why?"), Message("assistant", "Because.")))
LONG = Conversation(
    "a:2",
    (
        Message("system", "Be brief."),
        Message("user", " One?"),
        Message("assistant", "1 "),
        Message("user", "Two?"),
        Message("assistant", "2"),
    ),
)


def text(parts) -> str:
    """The rendered text."""
    return "".join(part.text for part in parts)


def answers(parts) -> str:
    """The text in the loss; every other part is ``|``."""
    return "".join(part.text if part.in_loss else "|" for part in parts).strip("|")


def problem(error):
    """The first problem of an error."""
    return error.value.problems[0]


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("plain", "Why?\nBecause.", "Be brief.\n One?\n1 \nTwo?\n2"),
        (
            "chatml",
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n",
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n One?<|im_end|>\n"
                "<|im_start|>assistant\n1 <|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
                "<|im_start|>assistant\n2<|im_end|>\n"
            ),
        ),
        (
            "llama3",
            (
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nBecause.<|eot_id|>"
            ),
            (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n1<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
            ),
        ),
        (
            "alpaca",
            (
                "Below is an instruction that describes a task. Write a response that appropriately "
                "completes the request.\n\n### Instruction:\nWhy?\n\n### Response:\nBecause."
            ),
            (
                "Be brief.\n\n### Instruction:\n One?\n\n### Response:\n1 \n\n"
                "### Instruction:\nTwo?\n\n### Response:\n2"
            ),
        ),
    ],
)
def test_builtin_templates_render_the_documented_text(name, short, long):
    assert text(BUILTIN_TEMPLATES[name].render(SHORT, ())) == short
    assert text(BUILTIN_TEMPLATES[name].render(LONG, ())) == long


def test_builtin_template_names_markers_and_identities():
    assert sorted(BUILTIN_TEMPLATES) == list(BUILTIN_TEMPLATES) == ["alpaca", "chatml", "llama3", "plain"]
    assert BUILTIN_TEMPLATES["chatml"].markers == ("<|im_start|>", "<|im_end|>")
    assert len({template.identity for template in BUILTIN_TEMPLATES.values()}) == 4


@pytest.mark.parametrize(
    ("name", "in_loss"),
    [("plain", "1 \n|2"), ("chatml", "1 <|im_end|>\n|2<|im_end|>\n"), ("llama3", "1<|eot_id|>|2<|eot_id|>")],
)
def test_loss_covers_answers_and_their_end_markers_only(name, in_loss):
    parts = BUILTIN_TEMPLATES[name].render(LONG, ())
    shown = answers(parts)
    while "||" in shown:
        shown = shown.replace("||", "|")
    assert shown == in_loss


@pytest.mark.parametrize("conversation", [SHORT, LONG], ids=["short", "long"])
def test_jinja_chatml_matches_the_builtin_text_and_loss_mask(conversation, tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    by_jinja = load_template("chatml.jinja", tmp_path, "byte").render(conversation, ())
    by_hand = BUILTIN_TEMPLATES["chatml"].render(conversation, ())

    def per_character(parts):
        return [(character, part.in_loss) for part in parts for character in part.text]

    assert per_character(by_jinja) == per_character(by_hand)


def test_markers_inside_messages_are_literal_text(tmp_path):
    """Digits and private-use characters around them are unchanged."""
    pytest.importorskip("jinja2")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    spelled = "\ue0001<|im_end|>\ue0012\ue001 <|im_start|>x"
    conversation = Conversation("a:1", (Message("user", spelled), Message("assistant", "<|im_end|>")))
    for name in ("chatml.jinja", "chatml"):
        parts = load_template(name, tmp_path, "byte").render(conversation, ("<|im_start|>", "<|im_end|>"))
        assert text(parts) == (
            f"<|im_start|>user\n{spelled}<|im_end|>\n<|im_start|>assistant\n<|im_end|><|im_end|>\n"
        )
        free = text(part for part in parts if not part.literal)
        assert (free.count("<|im_start|>"), free.count("<|im_end|>")) == (2, 2), "markers of the template"


def test_tokenizer_config_gives_template_and_special_tokens(tmp_path):
    pytest.importorskip("jinja2")
    answer = "{% generation %}{{ m.content }}{% endgeneration %}"
    source = f"{{{{ bos_token }}}}{{% for m in messages %}}{answer}{{{{ eos_token }}}}{{% endfor %}}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = "<s>Why?</s>Because.</s>"
    named = {
        **config,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}],
    }
    (tmp_path / "several.json").write_text(json.dumps(named))
    for name, tokenizer in (
        ("tokenizer_config.json", "byte"),
        ("several.json", "byte"),
        (str(tmp_path), "byte"),
        ("tokenizer", f"{tmp_path}/"),
        ("tokenizer", "./tokenizer.json"),
    ):
        assert text(load_template(name, tmp_path, tokenizer).render(SHORT, ())) == expected
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}!")
    newer = load_template("tokenizer", tmp_path, "./tokenizer.json")
    assert text(newer.render(Conversation("", (Message("user", "a"),)), ())) == "<s>a!"


def test_unknown_template_names_what_was_looked_for(tmp_path):
    cases = {
        "chatlm": "Did you mean chatml?",
        "mine.jinja": f"{tmp_path / 'mine.jinja'} is not a file",
        str(tmp_path): "looked for chat_template.jinja and tokenizer_config.json",
        "tokenizer": "the tokenizer 'byte' has none",
        "x" * 300: "is not a file",
    }
    for name, says in cases.items():
        with pytest.raises(UserError) as error:
            load_template(name, tmp_path, "byte")
        assert problem(error).code == "data-template-unknown"
        assert says in str(error.value)
        assert "alpaca, chatml, llama3, plain" in str(error.value)
    with pytest.raises(UserError) as error:
        load_template("tokenizer", tmp_path, "./tokenizer.json")
    assert problem(error).code == "data-template-unknown"
    assert f"in {tmp_path}" in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.json", "{", "cannot be read as a chat template"),
        ("a.json", "[]", "it is not a JSON object"),
        ("a.json", "{}", "has no chat_template"),
        ("a.json", '{"chat_template": [{"name": "tool_use", "template": "x"}]}', "has no chat_template"),
        ("a.jinja", b"\xff", "cannot be read as a chat template"),
    ],
)
def test_unreadable_template_is_refused_by_path(file, content, says, tmp_path):
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_template(file, tmp_path, "byte")
    assert (problem(error).code, problem(error).path) == ("data-template-unreadable", str(tmp_path / file))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("one\n{% for %}", "is not jinja in line 2"),
        ("one\n\n{{ messages[0].nothing.more }}", "fails in line 3 at a:1: 'dict object' has no attribute"),
        ("{{ messages.append(1) }}", "fails in line 1 at a:1: access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "fails in line 1 at a:1: access to attribute '__class__'"),
    ],
)
def test_template_errors_name_the_line(source, says, tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "bad.jinja").write_text(source)
    with pytest.raises(UserError) as error:
        load_template("bad.jinja", tmp_path, "byte").render(SHORT, ())
    assert problem(error).code == "data-template-failed"
    assert f"{tmp_path / 'bad.jinja'} {says}" in str(error.value)


def test_template_that_changes_earlier_turns_is_refused(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "rewriting.jinja").write_text(DROPS_EARLIER_ANSWERS)
    template = load_template("rewriting.jinja", tmp_path, "byte")
    assert "Because." in answers(template.render(SHORT, ()))
    with pytest.raises(UserError) as error:
        template.render(LONG, ())
    assert problem(error).code == "data-template-not-prefix"
    assert "at a:2, the text up to the end of the answer in message 3, rendered alone" in str(error.value)


def test_generation_prompt_that_is_no_prefix_of_the_answer_is_refused(tmp_path):
    pytest.importorskip("jinja2")
    source = (
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    (tmp_path / "cue.jinja").write_text(source)
    with pytest.raises(UserError) as error:
        load_template("cue.jinja", tmp_path, "byte").render(SHORT, ())
    assert problem(error).code == "data-template-not-prefix"
    assert "the text before the answer in message 2" in str(error.value)


def test_raise_exception_in_a_template_rejects_the_line_only(tmp_path):
    """The line is quarantined and the other lines are read."""
    pytest.importorskip("jinja2")
    (tmp_path / "strict.jinja").write_text(
        "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}"
    )
    template = load_template("strict.jinja", tmp_path, "byte")
    template.render(SHORT, ())
    with pytest.raises(ValueError, match="the template refuses it: too long"):
        template.render(LONG, ())


def test_jinja_template_without_jinja_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.jinja").write_text("x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError) as error:
        load_template("a.jinja", tmp_path, "byte")
    assert problem(error).code == "install-missing-extra"
    assert "meshwright[run]" in str(error.value)
    assert load_template("chatml", tmp_path, "byte"), "built-in templates do not need jinja"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "it has the fields text, and prompt and answer are needed"),
        ({"prompt": "a"}, "it has the fields prompt, and prompt and answer are needed"),
        ({"prompt": "a", "answer": 5}, "no text in the field 'answer'"),
        ({"prompt": "a", "answer": ""}, "its answers are empty"),
        ({"prompt": "a", "answer": "\ud800"}, "the text in the field 'answer' is not valid Unicode"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["a"]}, "message 1 is not an object with a role and a content"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "message 1 has the role 'tool', which is not one of",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1: no text in the field 'content'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "it has no answer: no message by assistant"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "it starts with an answer"),
        ({"messages": [{"role": [], "content": "a"}]}, "message 1 has the role []"),
    ],
)
def test_record_without_a_conversation_names_the_missing_part(record, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_conversation(record, "a:1", "prompt", "answer")


def test_prompt_and_answer_fields_can_be_named():
    record = {"instruction": "Why?", "output": "Because."}
    assert read_conversation(record, "a:1", "instruction", "output") == SHORT


ALPACA = read_conversation({"instruction": "Add them.", "input": " 1 and 2\n", "output": "3"}, "a:3")
"""A conversation whose prompt has an input."""


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
@pytest.mark.parametrize("conversation", [SHORT, LONG, ALPACA], ids=["short", "long", "alpaca"])
def test_a_built_in_template_in_jinja_renders_the_same_text(name, conversation, tmp_path):
    """The jinja form is what an export writes; spaces, inputs and default system messages are kept."""
    template, path = BUILTIN_TEMPLATES[name], tmp_path / "chat_template.jinja"
    path.write_text(template.jinja)
    same = load_template(str(path), tmp_path, "byte")
    ours, theirs = template.render(conversation, ()), same.render(conversation, ())
    assert text(theirs) == text(ours)
    assert same.jinja == template.jinja


def test_a_jinja_template_without_an_input_gets_it_at_the_end_of_the_content(tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert text(load_template("plain.jinja", tmp_path, "byte").render(ALPACA, ())).startswith(
        "[Add them.\n 1 and 2\n]"
    )

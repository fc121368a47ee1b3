"""Encoding a prompt for generation, with and without a chat template."""

from __future__ import annotations

import pytest

from meshwright.data.chat_templates import BUILTIN_TEMPLATES
from meshwright.data.prompt import encode_prompt
from meshwright.data.tokenizer import BpeTokenizer, ByteTokenizer


def test_prompt_without_a_template_is_its_text():
    question = encode_prompt(ByteTokenizer(), "ab", None)
    assert question.tokens == (97, 98)
    assert question.ends == {256}
    assert encode_prompt(ByteTokenizer(), "", None).tokens == (256,), "a new document"


@pytest.mark.parametrize("name", sorted(BUILTIN_TEMPLATES))
def test_templated_prompt_ends_where_the_answer_begins(name):
    """The prompt equals the start of a training document, up to the first token of the loss."""
    before = {
        "alpaca": "completes the request.\n\n### Instruction:\nhi\n\n### Response:\n",
        "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "plain": "hi\n",
    }[name]
    question = encode_prompt(ByteTokenizer(), "hi", BUILTIN_TEMPLATES[name])
    assert ByteTokenizer().decode(question.tokens).endswith(before)


def test_end_marker_with_a_special_token_ends_the_answer():
    markers = BUILTIN_TEMPLATES["chatml"].markers
    tokenizer = BpeTokenizer.train(["some text to train on"] * 3, 300, markers)
    question = encode_prompt(tokenizer, "say <|im_end|>", BUILTIN_TEMPLATES["chatml"])
    end = tokenizer.special_tokens["<|im_end|>"]
    assert question.ends == {tokenizer.end_of_document, end}
    assert question.tokens.count(end) == 1, "a marker inside the prompt is text"

"""Encodes a prompt for generation, with a chat template up to the start of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import Conversation, Message, Template
from meshwright.data.corpus import Document
from meshwright.data.encode import encode_documents
from meshwright.data.tokenizer import Tokenizer

PLACEHOLDER_ANSWER = "x"
"""An answer, so that the template renders the text before and after it."""


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a prompt, and the stop tokens of its answer."""

    tokens: tuple[int, ...]
    ends: frozenset[int]
    """The end-of-document token, and the template's end-of-answer token if it has one."""


def encode_prompt(tokenizer: Tokenizer, prompt: str, template: Template | None) -> EncodedPrompt:
    """Encode a prompt: as a user message with a template, as plain text without."""
    end = tokenizer.end_of_document
    if template is None:
        return EncodedPrompt(tuple(tokenizer.encode(prompt)) or (end,), frozenset({end}))
    conversation = Conversation(
        "the prompt", (Message("user", prompt), Message("assistant", PLACEHOLDER_ANSWER))
    )
    specials = tokenizer.special_tokens
    try:
        parts = template.render(conversation, tuple(specials))
    except ValueError as error:
        raise UserError(Problem("data-template-failed", str(error), path="template")) from None
    encoded = encode_documents(tokenizer, [Document("the prompt", "", parts)])[0]
    assert encoded.loss_mask is not None, "conversations have a loss mask"
    begin = int(encoded.loss_mask.argmax())
    tokens = [int(token) for token in encoded.tokens]
    return EncodedPrompt(
        tuple(tokens[:begin]), frozenset({end, *set(tokens[begin:]) & set(specials.values())})
    )

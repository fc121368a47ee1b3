"""A question as a model that was trained on conversations expects it: up to where its answer begins."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import Conversation, Message, Template
from meshwright.data.corpus import Document
from meshwright.data.encode import encode_documents
from meshwright.data.tokenizer import Tokenizer

STAND_IN = "x"
"""An answer, so that the template writes what comes before one and what ends it."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Tokens to go on from, and those that end the answer."""

    tokens: tuple[int, ...]
    ends: frozenset[int]
    """The end of a document, and the template's end of an answer where it is a token of its own."""


def encode_prompt(tokenizer: Tokenizer, prompt: str, template: Template | None) -> EncodedPrompt:
    """A prompt as tokens; with a template as a user's message, without as the text it is."""
    end = tokenizer.end_of_document
    if template is None:
        return EncodedPrompt(tuple(tokenizer.encode(prompt)) or (end,), frozenset({end}))
    conversation = Conversation("the prompt", (Message("user", prompt), Message("assistant", STAND_IN)))
    specials = tokenizer.special_tokens
    try:
        parts = template.render(conversation, tuple(specials))
    except ValueError as error:
        raise UserError(Problem("data-template-failed", str(error), path="--template")) from None
    encoded = encode_documents(tokenizer, [Document("the prompt", "", parts)])[0]
    assert encoded.loss_mask is not None, "a conversation knows its answers"
    begin = int(encoded.loss_mask.argmax())
    tokens = [int(token) for token in encoded.tokens]
    return EncodedPrompt(
        tuple(tokens[:begin]), frozenset({end, *set(tokens[begin:]) & set(specials.values())})
    )

"""Conversations: the messages of instruction data, before a chat template renders them.

A line is ``{"prompt": ..., "answer": ...}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``. A
template renders it to spans of text. A span has two flags: whether it counts in the loss, and whether it is
literal text, in which nothing becomes a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

ROLES = ("system", "user", "assistant")
MESSAGES_FIELD = "messages"

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """The messages of one document: at least one answer, with a message before it."""

    name: str
    """File and line, for errors."""
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Span:
    """A span of a document's text."""

    text: str
    in_loss: bool
    """Whether it is part of an answer, including its end marker."""
    literal: bool
    """Whether nothing in it becomes a special token, whatever it spells."""


class Template(Protocol):
    """A chat template: renders conversations as text."""

    @property
    def identity(self) -> str:
        """Changes whenever the output may change."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that should be special tokens of a tokenizer trained for this template."""

    def render(self, conversation: Conversation, special_tokens: Sequence[str]) -> tuple[Span, ...]:
        """The spans of the document, in order.

        Args:
            conversation: The messages.
            special_tokens: Tokens that the text of a message must not turn into.

        Raises:
            ValueError: The template refuses this conversation, for the reason given.
            UserError: The template itself is wrong.
        """


def read_conversation(
    record: dict[str, Any], name: str, prompt_field: str, answer_field: str
) -> Conversation:
    """The conversation of a line.

    Raises:
        ValueError: There is none, or it has no answers; with the reason.
    """
    if MESSAGES_FIELD in record:
        messages = _read_messages(record[MESSAGES_FIELD])
    elif prompt_field in record or answer_field in record:
        prompt, answer = (_text_of(record, key) for key in (prompt_field, answer_field))
        messages = (Message("user", prompt), Message("assistant", answer))
    else:
        raise ValueError(
            f"neither {MESSAGES_FIELD!r} nor the fields {prompt_field!r} and {answer_field!r}, "
            "which a template needs"
        )
    if messages[0].role == "assistant":
        raise ValueError("it starts with an answer")
    answers = [message.content for message in messages if message.role == "assistant"]
    if not any(answers):
        raise ValueError("its answers are empty" if answers else "it has no answer: no message by assistant")
    return Conversation(name, messages)


def holds_conversation(record: dict[str, Any]) -> bool:
    """Whether a line looks like instruction data."""
    return MESSAGES_FIELD in record or {"prompt", "answer"} <= record.keys()


def _read_messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{MESSAGES_FIELD!r} is not a list of messages")
    messages = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise ValueError(f"message {number} is not an object with a role and a content")
        role = item.get("role")
        if role not in ROLES:
            raise ValueError(
                f"message {number} has the role {role!r}, which is not one of {', '.join(ROLES)}"
            )
        try:
            messages.append(Message(cast("Role", role), _text_of(item, "content")))
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    return tuple(messages)


def _text_of(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"no text in the field {key!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"the text in the field {key!r} is not valid Unicode") from error
    return value

"""Conversations: the messages of instruction data, before a chat template renders them.

A record is recognised by its fields:

=================  ==========================================================================================
chat               ``messages``: a list of ``role`` and ``content``
ShareGPT           ``conversations``: a list of ``from`` and ``value``
Alpaca, Dolly      ``instruction``; ``input`` or ``context``, if any; ``output`` or ``response``
prompt and answer  ``prompt`` or ``question``; ``completion``, ``answer`` or ``response``; texts or messages
=================  ==========================================================================================

``system`` is a system message, and Alpaca's ``history`` a list of earlier pairs. A template renders a record
to spans of text. A span has two flags: whether it counts in the loss, and whether it is literal text, in
which nothing becomes a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from meshwright.data.files import BadDataError

ROLES = ("system", "user", "assistant")
MESSAGES_FIELD = "messages"
SHAREGPT_FIELD = "conversations"

_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
"""Roles by the names that datasets use."""
_PROMPTS = ("instruction", "prompt", "question")
RECORD_FIELDS = (MESSAGES_FIELD, SHAREGPT_FIELD, *_PROMPTS)
"""Any of these marks an object as a conversation, not as a container of records."""
_INPUTS = ("input", "context")
_ANSWERS = ("output", "completion", "answer", "response")
INPUT_SEPARATOR = "\n"
"""Between Alpaca's instruction and its input, unless the template has its own."""

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message."""

    role: Role
    content: str
    input: str = ""
    """Alpaca's input, which is also the end of the content, after ``INPUT_SEPARATOR``."""

    @property
    def prompt(self) -> str:
        """The content without the input."""
        return self.content.removesuffix(f"{INPUT_SEPARATOR}{self.input}") if self.input else self.content


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

    @property
    def jinja(self) -> str:
        """The template in jinja, as Hugging Face folders have it."""

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
    record: dict[str, Any], name: str, prompt_field: str | None = None, answer_field: str | None = None
) -> Conversation:
    """The conversation of a record.

    Args:
        record: Its fields.
        name: File and line, for errors.
        prompt_field: Field with the prompt; one of the usual names if left out.
        answer_field: Field with the answer; one of the usual names if left out.

    Raises:
        BadDataError: There is none, or it has no answers; with the reason.
    """
    prompt, answer = _find_fields(record, prompt_field, answer_field)
    if MESSAGES_FIELD in record:
        messages = _read_messages(record[MESSAGES_FIELD], MESSAGES_FIELD)
    elif SHAREGPT_FIELD in record:
        messages = _read_messages(record[SHAREGPT_FIELD], SHAREGPT_FIELD)
        while messages and messages[0].role == "assistant":  # files are cut at arbitrary turns
            del messages[0]
    elif prompt and answer:
        messages = [*_history(record), *_pair(record, prompt, answer)]
    else:
        wanted = " and ".join(name for name in (prompt_field, answer_field) if name)
        wanted = (
            wanted or f"{MESSAGES_FIELD}, {SHAREGPT_FIELD}, instruction and output, or prompt and completion"
        )
        reason = f"no conversation: it has the fields {', '.join(map(str, record))}, and {wanted} are needed"
        fix = "Name the fields with prompt_field and answer_field, or leave the template out"
        raise BadDataError("data-not-conversation", reason, fix)
    if record.get("system") and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", _text_of(record, "system")))
    if not messages or messages[0].role == "assistant":
        raise _bad("it starts with an answer" if messages else "it has no prompt and answer")
    answers = [message.content for message in messages if message.role == "assistant"]
    if not any(answers):
        raise _bad("its answers are empty" if answers else "it has no answer: no message by assistant")
    return Conversation(name, tuple(messages))


def holds_conversation(
    record: dict[str, Any], prompt_field: str | None = None, answer_field: str | None = None
) -> bool:
    """Whether a record looks like instruction data; arguments as in :func:`read_conversation`."""
    named = {MESSAGES_FIELD, SHAREGPT_FIELD} & record.keys()
    return bool(named) or all(_find_fields(record, prompt_field, answer_field))


def _find_fields(
    record: dict[str, Any], prompt_field: str | None, answer_field: str | None
) -> tuple[str | None, str | None]:
    prompts = (prompt_field,) if prompt_field else _PROMPTS
    answers = (answer_field,) if answer_field else _ANSWERS
    return next((p for p in prompts if p in record), None), next((a for a in answers if a in record), None)


def _pair(record: dict[str, Any], prompt: str, answer: str) -> list[Message]:
    """The messages of a prompt and its answer; both may be lists of messages."""
    messages = []
    for field, role in ((prompt, "user"), (answer, "assistant")):
        if isinstance(record[field], list):
            messages += _read_messages(record[field], field)
            continue
        text, extra = _text_of(record, field), ""
        if role == "user" and field == "instruction":
            given = next((name for name in _INPUTS if record.get(name)), None)
            extra = _text_of(record, given) if given else ""
        content = f"{text}{INPUT_SEPARATOR}{extra}" if extra else text
        messages.append(Message(cast("Role", role), content, extra))
    return messages


def _history(record: dict[str, Any]) -> list[Message]:
    """Alpaca's earlier turns: pairs of prompt and answer."""
    messages = []
    for number, pair in enumerate(record.get("history") or (), start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
            raise _bad(f"pair {number} of its history is not a prompt and an answer")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return messages


def _read_messages(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _bad(f"{field!r} is not a list of messages")
    messages = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise _bad(f"message {number} is not an object with a role and a content")
        named, content = ("from", "value") if "from" in item else ("role", "content")
        role = _ROLE_NAMES.get(str(item.get(named)))
        if role is None:
            known = ", ".join(_ROLE_NAMES)
            raise _bad(f"message {number} has the role {item.get(named)!r}, which is not one of {known}")
        try:
            messages.append(Message(cast("Role", role), _text_of(item, content)))
        except BadDataError as error:
            raise _bad(f"message {number}: {error}") from error
    return messages


def _text_of(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if isinstance(value, list) and all(isinstance(i, dict) and i.get("type") == "text" for i in value):
        value = "".join(str(item.get("text", "")) for item in value)  # content in parts, without images
    if not isinstance(value, str):
        raise _bad(f"no text in the field {key!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise _bad(f"the text in the field {key!r} is not valid Unicode") from error
    return value


def _bad(reason: str) -> BadDataError:
    return BadDataError("data-bad-conversation", reason, "Correct the record")

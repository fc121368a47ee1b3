"""Chat templates in jinja, as in Hugging Face models.

A jinja template renders a whole conversation and does not mark the answers. They are found by rendering
prefixes: the messages before an answer with the generation prompt, and the messages up to and including it;
the answer is the difference. A template that rewrites earlier messages when later ones follow (some drop old
reasoning) has no such prefixes and is refused.

A template does not mark the text of messages either. Special tokens that are spelled inside a message are
replaced by a placeholder character before rendering, and restored afterwards as plain text.

Templates run in jinja's sandbox, and have no clock, so that the same data give the same bytes on any day.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import Problem, UserError, missing_package
from meshwright.data.chat import Conversation, Span
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE

if TYPE_CHECKING:
    import jinja2

JINJA_FILE = "chat_template.jinja"
INPUT_VARIABLE = "message.input"
"""A template that reads this gets Alpaca's input apart, others at the end of the content."""

_COMPILED_NAME = "<template>"
"""Name of a template from a string in jinja's tracebacks."""
_PLACEHOLDERS = range(0xE000, 0xF900)
"""Unicode's private use area."""


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


class JinjaTemplate:
    """A jinja template, with its BOS and EOS tokens."""

    markers: tuple[str, ...] = ()

    def __init__(self, source: str, shown: Path, bos_token: str = "", eos_token: str = "") -> None:
        """Compile the template.

        Args:
            source: The text of the template.
            shown: The file to name in errors.
            bos_token: Value of ``bos_token`` in it.
            eos_token: Value of ``eos_token`` in it.

        Raises:
            UserError: It is not jinja, or jinja is not installed.
        """
        self._shown = shown
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = _compile(source, shown)
        self.identity = json.dumps([source, bos_token, eos_token])
        self.jinja = source
        """The text of the template."""
        self.config: dict[str, str] = {"chat_template": source, **self._tokens}
        """The keys of a ``tokenizer_config.json`` that give the same template."""

    def render(self, conversation: Conversation, special_tokens: Sequence[str]) -> tuple[Span, ...]:
        """The spans of the document; see :class:`Template`."""
        placeholder = _free_character([m.content for m in conversation.messages])
        messages = []
        for message in conversation.messages:
            texts = {"content": message.content}
            if message.input and INPUT_VARIABLE in self.jinja:
                texts = {"content": message.prompt, "input": message.input}
            hidden = {key: _hide(text, special_tokens, placeholder) for key, text in texts.items()}
            messages.append({"role": message.role, **hidden})
        whole = self._write(messages, conversation.name)
        parts: list[Span] = []
        end = 0
        for begin, stop in self._answers(messages, whole, conversation.name):
            parts += _show(whole[end:begin], special_tokens, placeholder, in_loss=False)
            parts += _show(whole[begin:stop], special_tokens, placeholder, in_loss=True)
            end = stop
        parts += _show(whole[end:], special_tokens, placeholder, in_loss=False)
        return tuple(part for part in parts if part.text)

    def _answers(self, messages: list[dict[str, str]], whole: str, name: str) -> Iterator[tuple[int, int]]:
        """Start and end of each answer in the rendered text."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._write(messages[:number], name, add_generation_prompt=True)
            after = self._write(messages[: number + 1], name)
            if not (whole.startswith(after) and after.startswith(before)):
                what = "before" if whole.startswith(after) else "up to the end of"
                raise UserError(
                    Problem(
                        code="data-template-not-prefix",
                        path=str(self._shown),
                        rule="renders messages differently when others follow, so answers cannot be "
                        f"separated from prompts: at {name}, the text {what} the answer in message "
                        f"{number + 1}, rendered alone, is not a prefix of the whole text",
                        fix="Use a template that renders each message independently, such as chatml",
                    )
                )
            yield len(before), len(after)

    def _write(self, messages: list[dict[str, str]], name: str, add_generation_prompt: bool = False) -> str:
        variables: dict[str, Any] = {**self._tokens, "tools": None, "documents": None}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except _RefusedError as error:
            raise ValueError(f"the template refuses it: {error}") from error
        except Exception as error:  # a template can raise any exception
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == _COMPILED_NAME]
            where = f"in line {lines[-1]} " if lines else ""
            raise _failed(self._shown, f"fails {where}at {name}: {error}") from error


def read_jinja_file(path: Path) -> JinjaTemplate:
    """The template of a ``.jinja`` file; its tokens come from the ``tokenizer_config.json`` next to it.

    Raises:
        UserError: It cannot be read.
    """
    try:
        source = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    beside = path.with_name(TOKENIZER_CONFIG_FILE)
    config = _read_config(beside) if beside.is_file() else {}
    return JinjaTemplate(source, path, read_token(config, "bos_token"), read_token(config, "eos_token"))


def read_tokenizer_config(path: Path) -> JinjaTemplate:
    """The template of a ``tokenizer_config.json``; the one named ``default`` if there are several.

    Raises:
        UserError: It cannot be read, or has none.
    """
    config = _read_config(path)
    source = find_template_text(config)
    if source is None:
        raise UserError(
            Problem(
                code="data-template-unreadable",
                path=str(path),
                rule="has no chat_template",
                fix="Use a built-in template, such as chatml, or a .jinja file",
            )
        )
    return JinjaTemplate(source, path, read_token(config, "bos_token"), read_token(config, "eos_token"))


def find_template_text(config: dict[str, Any]) -> str | None:
    """The template of a tokenizer's configuration; the one named ``default`` if there are several."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    return config


def read_token(config: dict[str, Any], key: str) -> str:
    """A token of the configuration: a string, an object with ``content``, or null."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _compile(source: str, shown: Path) -> jinja2.Template:
    try:
        import jinja2  # noqa: PLC0415 - optional: only templates in jinja need it
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        from meshwright.data.jinja_generation import GenerationBlocks  # noqa: PLC0415 - it imports jinja
    except ImportError as error:
        raise missing_package("jinja2", "run", "a chat template in jinja") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise _failed(shown, f"is not jinja in line {error.lineno}: {error.message}") from error


def _refuse(message: object) -> None:
    raise _RefusedError(message)


def _to_json(value: object, **options: Any) -> str:
    """Plain JSON; jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def _free_character(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    free = next((chr(code) for code in _PLACEHOLDERS if chr(code) not in used), None)
    if free is None:
        raise ValueError("it uses every character of Unicode's private area")
    return free


def _hide(text: str, special_tokens: Sequence[str], placeholder: str) -> str:
    """The text with spelled special tokens replaced by ``placeholder number placeholder``."""
    if not special_tokens:
        return text
    longest_first = sorted(special_tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(pattern, lambda match: f"{placeholder}{special_tokens.index(match[0])}{placeholder}", text)


def _show(text: str, special_tokens: Sequence[str], placeholder: str, in_loss: bool) -> Iterator[Span]:
    """The spans of rendered text, with hidden special tokens restored as literal spans."""
    for number, piece in enumerate(re.split(f"{placeholder}([0-9]+){placeholder}", text)):
        hidden = number % 2 == 1
        yield Span(special_tokens[int(piece)] if hidden else piece, in_loss=in_loss, literal=hidden)


def _failed(shown: Path, rule: str) -> UserError:
    fix = "Correct the template, or use a built-in one, such as chatml"
    return UserError(Problem(code="data-template-failed", path=str(shown), rule=rule, fix=fix))


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(
        Problem(
            code="data-template-unreadable",
            path=str(path),
            rule=f"cannot be read as a chat template: {reason}",
            fix=f"Name a .jinja file, a {TOKENIZER_CONFIG_FILE}, or a built-in template, such as chatml",
        )
    )

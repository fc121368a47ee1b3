"""Chat templates written in jinja, as Hugging Face models bring them.

A jinja template writes a whole conversation and does not say which part is an answer. The answers are found
by rendering prefixes: the turns before an answer, with the cue for the assistant, and the turns up to and
including it; the answer is the difference. A template that rewrites earlier turns when later ones follow
(some drop old reasoning) has no such prefixes, and is refused rather than guessed at.

Nor does it say which text is a message's own. So what spells a special token inside a message is replaced,
before rendering, by a stand-in that no template and no message has, and put back afterwards as plain text.

The templates run in jinja's sandbox: they come from outside. No clock is given to them, so that the same data
give the same bytes on any day.
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

_COMPILED_NAME = "<template>"
"""What jinja calls a template that is made from a string, in tracebacks."""
_PLACEHOLDERS = range(0xE000, 0xF900)
"""Unicode's private use area."""


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


class JinjaTemplate:
    """A template in jinja, with the two tokens that it may write."""

    markers: tuple[str, ...] = ()

    def __init__(self, source: str, shown: Path, bos_token: str = "", eos_token: str = "") -> None:
        """Compile the template.

        Args:
            source: The text of the template.
            shown: The file to name in errors.
            bos_token: What ``bos_token`` stands for in it.
            eos_token: What ``eos_token`` stands for in it.

        Raises:
            UserError: It is not jinja, or jinja is not installed.
        """
        self._shown = shown
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = _compile(source, shown)
        self.identity = json.dumps([source, bos_token, eos_token])

    def render(self, conversation: Conversation, special_tokens: Sequence[str]) -> tuple[Span, ...]:
        """The parts of the document; see :class:`Template`."""
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        stand_in = _free_character([m["content"] for m in messages])
        for message in messages:
            message["content"] = _hide(message["content"], special_tokens, stand_in)
        whole = self._write(messages, conversation.name)
        parts: list[Span] = []
        end = 0
        for begin, stop in self._answers(messages, whole, conversation.name):
            parts += _show(whole[end:begin], special_tokens, stand_in, in_loss=False)
            parts += _show(whole[begin:stop], special_tokens, stand_in, in_loss=True)
            end = stop
        parts += _show(whole[end:], special_tokens, stand_in, in_loss=False)
        return tuple(part for part in parts if part.text)

    def _answers(self, messages: list[dict[str, str]], whole: str, name: str) -> Iterator[tuple[int, int]]:
        """Where each answer begins and ends in the whole."""
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
                        rule=f"writes turns differently when others follow, so answers cannot be told from "
                        f"prompts: at {name}, the text {what} the answer in message {number + 1}, written "
                        "alone, is not how the whole begins",
                        fix="Use a template that writes a turn the same wherever it stands, such as chatml",
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
        except Exception as error:  # a template can raise whatever Python can
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == _COMPILED_NAME]
            where = f"in line {lines[-1]} " if lines else ""
            raise _failed(self._shown, f"fails {where}at {name}: {error}") from error


def read_jinja_file(path: Path) -> JinjaTemplate:
    """The template in a ``.jinja`` file; its tokens come from a ``tokenizer_config.json`` beside it.

    Raises:
        UserError: It cannot be read.
    """
    try:
        source = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    beside = path.with_name(TOKENIZER_CONFIG_FILE)
    config = _read_config(beside) if beside.is_file() else {}
    return JinjaTemplate(source, path, _token(config, "bos_token"), _token(config, "eos_token"))


def read_tokenizer_config(path: Path) -> JinjaTemplate:
    """The template that a ``tokenizer_config.json`` holds; the one named ``default`` where it holds several.

    Raises:
        UserError: It cannot be read, or holds none.
    """
    config = _read_config(path)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise UserError(
            Problem(
                code="data-template-unreadable",
                path=str(path),
                rule="holds no chat_template",
                fix="Name a built-in template, such as chatml, or a .jinja file",
            )
        )
    return JinjaTemplate(source, path, _token(config, "bos_token"), _token(config, "eos_token"))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    return config


def _token(config: dict[str, Any], key: str) -> str:
    """A token of the configuration, which is a text, an object with its ``content``, or null."""
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
    """JSON as it is: jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def _free_character(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    free = next((chr(code) for code in _PLACEHOLDERS if chr(code) not in used), None)
    if free is None:
        raise ValueError("it uses every character of Unicode's private area")
    return free


def _hide(text: str, special_tokens: Sequence[str], stand_in: str) -> str:
    """The text with its spelled special tokens as ``stand_in number stand_in``."""
    if not special_tokens:
        return text
    longest_first = sorted(special_tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(pattern, lambda match: f"{stand_in}{special_tokens.index(match[0])}{stand_in}", text)


def _show(text: str, special_tokens: Sequence[str], stand_in: str, in_loss: bool) -> Iterator[Span]:
    """The parts of rendered text, with what was hidden put back as literal ones."""
    for number, piece in enumerate(re.split(f"{stand_in}([0-9]+){stand_in}", text)):
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

"""Chat templates: the built-in ones, and lookup by name.

A built-in template has strings before and after the text of each role. The string after an answer counts in
the loss, so that the model learns to stop.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import INPUT_SEPARATOR, ROLES, Conversation, Message, Role, Span, Template
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE
from meshwright.data.jinja_template import JINJA_FILE, read_jinja_file, read_tokenizer_config
from meshwright.data.sources import locate
from meshwright.data.tokenizer import parse_tokenizer_name

TOKENIZER_TEMPLATE = "tokenizer"
"""Name of the template that comes with the tokenizer."""

_MARKER = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True)
class TurnTemplate:
    """A template that renders each message independently."""

    name: str
    before: dict[Role, str]
    """Text before a message."""
    after: dict[Role, str] = field(default_factory=dict)
    """Text after a message; after an answer it counts in the loss."""
    begin: str = ""
    """Text at the start of the document."""
    default_system: str = ""
    """The system message of conversations without one."""
    default_system_with_input: str = ""
    """The same, if the first prompt has an input (Alpaca); with ``default_system`` only."""
    before_input: str = INPUT_SEPARATOR
    """Text between a prompt and its input."""
    between: str = ""
    """Text between two messages; it belongs to the first."""
    trim: bool = False
    """Whether whitespace around a message is stripped."""

    @property
    def identity(self) -> str:
        """All its strings."""
        return repr(self)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of its strings, such as ``<|im_start|>``."""
        strings = [self.begin, *self.before.values(), *self.after.values()]
        return tuple(dict.fromkeys(_MARKER.findall("".join(strings))))

    @property
    def jinja(self) -> str:
        """The template in jinja, for a Hugging Face folder.

        A message may have Alpaca's input under ``input``; its ``content`` is then the instruction alone.
        """
        before, after = ({**dict.fromkeys(ROLES, ""), **texts} for texts in (self.before, self.after))
        between, before_input = json.dumps(self.between), json.dumps(self.before_input)
        joined = f"message.content ~ {before_input} ~ message.input"
        content = f"({joined} if message.input else message.content){' | trim' if self.trim else ''}"
        with_input, without = (
            json.dumps(before["system"] + text + after["system"] + self.between)
            for text in (self.default_system_with_input, self.default_system)
        )
        system = f"{with_input} if messages[0].input else {without}"
        default = f"{{% if messages[0].role != 'system' %}}{{{{ {system} }}}}{{% endif %}}"
        return (
            f"{{% set before = {json.dumps(before)} %}}{{% set after = {json.dumps(after)} %}}"
            f"{{{{ {json.dumps(self.begin)} }}}}{default if self.default_system else ''}"
            f"{{% for message in messages %}}{{{{ before[message.role] }}}}{{{{ {content} }}}}"
            "{{ after[message.role] }}"
            f"{{% if not loop.last or add_generation_prompt %}}{{{{ {between} }}}}{{% endif %}}{{% endfor %}}"
            "{% if add_generation_prompt %}{{ before.assistant }}{% endif %}"
        )

    def render(self, conversation: Conversation, special_tokens: Sequence[str]) -> tuple[Span, ...]:
        """The spans of the document; see :class:`Template`.

        Messages are separate spans, so ``special_tokens`` is not needed.
        """
        turns = [(message.role, self._content(message)) for message in conversation.messages]
        if self.default_system and turns[0][0] != "system":
            has_input = bool(conversation.messages[0].input)
            system = self.default_system_with_input if has_input else self.default_system
            turns.insert(0, ("system", system))
        parts = [Span(self.begin, in_loss=False, literal=False)]
        for number, (role, content) in enumerate(turns):
            answer = role == "assistant"
            after = self.after.get(role, "") + (self.between if number < len(turns) - 1 else "")
            parts += [
                Span(self.before.get(role, ""), in_loss=False, literal=False),
                Span(content.strip() if self.trim else content, in_loss=answer, literal=True),
                Span(after, in_loss=answer, literal=False),
            ]
        return tuple(part for part in parts if part.text)

    def _content(self, message: Message) -> str:
        return f"{message.prompt}{self.before_input}{message.input}" if message.input else message.content


def _each_role(text: str) -> dict[Role, str]:
    return {role: text.format(role=role) for role in ROLES}  # type: ignore[misc]  # ROLES are the roles


BUILTIN_TEMPLATES: dict[str, TurnTemplate] = {
    template.name: template
    for template in (
        TurnTemplate(
            "alpaca",
            before={"user": "### Instruction:\n", "assistant": "### Response:\n"},
            default_system="Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.",
            default_system_with_input="Below is an instruction that describes a task, paired with an input "
            "that provides further context. Write a response that appropriately completes the request.",
            before_input="\n\n### Input:\n",
            between="\n\n",
        ),
        TurnTemplate("chatml", before=_each_role("<|im_start|>{role}\n"), after=_each_role("<|im_end|>\n")),
        TurnTemplate(
            "llama3",
            before=_each_role("<|start_header_id|>{role}<|end_header_id|>\n\n"),
            after=_each_role("<|eot_id|>"),
            begin="<|begin_of_text|>",
            trim=True,
        ),
        TurnTemplate("plain", before={}, between="\n"),
    )
}
"""The built-in templates by name."""


def load_template(name: str, base: Path, tokenizer: str, key: str = "data.template") -> Template:
    """Find a template by name.

    Args:
        name: A built-in one, ``tokenizer``, or a path to a ``.jinja`` file, to a ``tokenizer_config.json``,
            or to a folder that has one.
        base: Folder of relative paths.
        tokenizer: The value of the tokenizer's key.
        key: The dotted key to name in errors.

    Raises:
        UserError: It does not exist, or cannot be read.
    """
    if name in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[name]
    if name == TOKENIZER_TEMPLATE:
        return _read_tokenizer_template(base, tokenizer, key)
    path = locate(name, base)
    # Path.is_dir and is_file raise for a path that is too long.
    if os.path.isdir(path):  # noqa: PTH112
        found = _in_folder(path)
        if found is None:
            looked = f"looked for {JINJA_FILE} and {TOKENIZER_CONFIG_FILE} in it"
            raise UserError(_unknown(name, key, f"is a folder without a chat template; {looked}"))
        return found
    if not os.path.isfile(path):  # noqa: PTH113
        raise UserError(
            _unknown(name, key, f"is not a chat template: it is not built in, and {path} is not a file")
        )
    return read_tokenizer_config(path) if path.suffix == ".json" else read_jinja_file(path)


def _read_tokenizer_template(base: Path, tokenizer: str, key: str) -> Template:
    choice = parse_tokenizer_name(tokenizer)
    if choice.kind != "file":
        rule = f"asks for the tokenizer's own chat template, and the tokenizer {tokenizer!r} has none"
        raise UserError(_unknown(TOKENIZER_TEMPLATE, key, rule))
    path = locate(choice.path, base)
    folder = path if os.path.isdir(path) else path.parent  # noqa: PTH112 - as above
    found = _in_folder(folder)
    if found is None:
        looked = f"looked for {JINJA_FILE} and {TOKENIZER_CONFIG_FILE} in {folder}"
        rule = f"asks for the tokenizer's own chat template, and there is none; {looked}"
        raise UserError(_unknown(TOKENIZER_TEMPLATE, key, rule))
    return found


def has_template(folder: Path) -> bool:
    """Whether a Hugging Face folder or a checkpoint has a chat template."""
    config = folder / TOKENIZER_CONFIG_FILE
    return (folder / JINJA_FILE).is_file() or (config.is_file() and b'"chat_template"' in config.read_bytes())


def _in_folder(folder: Path) -> Template | None:
    """The template of a Hugging Face folder; newer folders have it in a separate file."""
    if (folder / JINJA_FILE).is_file():
        return read_jinja_file(folder / JINJA_FILE)
    config = folder / TOKENIZER_CONFIG_FILE
    return read_tokenizer_config(config) if config.is_file() else None


def _unknown(name: str, key: str, rule: str) -> Problem:
    near = difflib.get_close_matches(name, BUILTIN_TEMPLATES, n=1)
    choices = f"{', '.join(BUILTIN_TEMPLATES)}, {TOKENIZER_TEMPLATE!r}"
    choices += f", or a path to a .jinja file or a {TOKENIZER_CONFIG_FILE}"
    fix = f"Did you mean {near[0]}?" if near else f"Use {choices}"
    if near:
        rule += f"; there are {choices}"
    return Problem(code="data-template-unknown", path=key, value=name, rule=rule, fix=fix)

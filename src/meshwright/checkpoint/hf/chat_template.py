"""The chat template of an exported folder: the one that the run was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.checkpoint.hf.config import to_json_bytes
from meshwright.checkpoint.hf.source import HfSource
from meshwright.data.chat_templates import load_template
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE
from meshwright.data.jinja_template import JINJA_FILE, JinjaTemplate, find_template_text, read_token
from meshwright.data.tokenizer import TOKENIZER_FILE


def add_chat_template(
    files: dict[str, bytes], source: HfSource | None, checkpoint: Path, name: str | None
) -> dict[str, bytes]:
    """The small files of an export, with the template of the training data (``data.template``).

    The template of the source stays as it is, bit for bit, if the run was trained with it.

    Args:
        files: Files of the export so far.
        source: The folder that the run started from.
        checkpoint: Holds a template that is not built in.
        name: The template in the manifest; None without one.
    """
    if name is None:
        return files
    template = load_template(name, checkpoint, str(checkpoint.absolute() / TOKENIZER_FILE))
    if source is not None and template.jinja == _find_text(source.files):
        return files
    config = _read_config(files)
    config.pop("chat_template", None)  # transformers 5 writes the template into a file of its own
    text = template.jinja
    if isinstance(template, JinjaTemplate):
        text = _set_tokens(template, config) + text
    return {**files, JINJA_FILE: text.encode(), TOKENIZER_CONFIG_FILE: to_json_bytes(config)}


def _set_tokens(template: JinjaTemplate, config: dict[str, Any]) -> str:
    """Jinja that sets the tokens which the template had in training, where the exported tokenizer differs."""
    return "".join(
        f"{{% set {key} = {json.dumps(template.config[key])} %}}"
        for key in ("bos_token", "eos_token")
        if key in template.jinja and template.config[key] != read_token(config, key)
    )


def _find_text(files: dict[str, bytes]) -> str | None:
    if JINJA_FILE in files:
        return files[JINJA_FILE].decode(errors="replace")
    return find_template_text(_read_config(files))


def _read_config(files: dict[str, bytes]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(files.get(TOKENIZER_CONFIG_FILE, b"{}"))
    return config

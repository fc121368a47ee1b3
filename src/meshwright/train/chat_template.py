"""The chat template that every checkpoint keeps, for ``generate --chat`` and for evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.checkpoint.hf.source import HfSource
from meshwright.data.chat_templates import BUILTIN_TEMPLATES, TOKENIZER_TEMPLATE, load_template
from meshwright.data.hf_tokenizer import TOKENIZER_CONFIG_FILE
from meshwright.data.jinja_template import JINJA_FILE, JinjaTemplate
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.spec.job import Data, Job
from meshwright.spec.model import DecoderModel


def read_template(job: Job, source: HfSource | None) -> tuple[str | None, dict[str, bytes]]:
    """Name and files of the template: that of the data, else that of the model's Hugging Face folder.

    Args:
        job: The job.
        source: The folder that the model came from.

    Returns:
        The name of a built-in one without files; ``tokenizer`` with its files, which a checkpoint has next to
        its tokenizer; or None. A mixture of several templates has none.
    """
    name = _find_name(job.data)
    if name in BUILTIN_TEMPLATES:
        return name, {}
    if name is not None:
        hf = job.model.hf if isinstance(job.model, DecoderModel) else None
        tokenizer = job.data.tokenizer or str(Path(hf or "") / TOKENIZER_FILE)
        template = load_template(name, Path.cwd(), tokenizer)
        assert isinstance(template, JinjaTemplate), "others are built in"
        return TOKENIZER_TEMPLATE, {TOKENIZER_CONFIG_FILE: json.dumps(template.config).encode()}
    kept = source.files if source else {}
    files = {file: kept[file] for file in (JINJA_FILE, TOKENIZER_CONFIG_FILE) if file in kept}
    if JINJA_FILE in files or b'"chat_template"' in files.get(TOKENIZER_CONFIG_FILE, b""):
        return TOKENIZER_TEMPLATE, files
    return None, {}


def _find_name(data: Data) -> str | None:
    """The only template of the data."""
    names = {source.template or data.template for source in data.sources} or {data.template}
    found = [name for name in names if name is not None]
    return found[0] if len(found) == 1 else None

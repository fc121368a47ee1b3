"""How the records of a source are read: a chat template for conversations, or the field with the text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import holds_conversation
from meshwright.data.chat_templates import TOKENIZER_TEMPLATE, has_template
from meshwright.data.corpus import ReadOptions
from meshwright.data.files import BadDataError
from meshwright.data.first_records import find_text_field, read_first_records
from meshwright.data.images import looks_like_images
from meshwright.data.shards import looks_prepared
from meshwright.spec.job_template import DataFields
from meshwright.spec.paths import BUILTIN


@dataclass(frozen=True)
class FoundFields:
    """Fields found in the first records of a source."""

    chosen: DataFields | None
    """None if no field is obviously the text."""
    names: tuple[str, ...] = ()
    """Fields of the first record; none if the source has no records."""


def find_fields(source: str, model: Path) -> FoundFields:
    """Look at the first records of a source.

    Conversations get the model folder's own chat template, or ``alpaca``. Text, prepared folders, images and
    built-in data have no fields.

    Raises:
        UserError: The first file with records cannot be read; training would stop at it.
    """
    prepared = looks_prepared(Path(source)) or looks_like_images(Path(source))
    if not source or source.startswith(BUILTIN) or prepared:
        return FoundFields(DataFields())
    try:
        records = read_first_records(source, Path.cwd(), ReadOptions(skip_bad=False))
    except BadDataError as error:
        problem = Problem(error.code, f"cannot be used: {error}", path=source, fix=error.fix)
        raise UserError(problem) from error
    names = tuple(str(name) for name in records[0]) if records else ()
    if not records:
        return FoundFields(DataFields())
    if holds_conversation(records[0]):
        return FoundFields(DataFields(TOKENIZER_TEMPLATE if has_template(model) else "alpaca"), names)
    found = find_text_field(records)
    return FoundFields(None if found is None else DataFields(text_field=found), names)

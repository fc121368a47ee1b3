"""The first records of a source: whether they are conversations, and which field has the text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from meshwright.data.chat import holds_conversation
from meshwright.data.corpus import ReadOptions, record_fields
from meshwright.data.files import BadDataError, file_kind, open_file
from meshwright.data.records import iter_records
from meshwright.data.sources import iter_files

TEXT_FIELDS = ("text", "content", "body", "document", "article", "story", "passage", "code")
"""Usual names of the field with the text, first choice first."""
MIN_TEXT_SHARE = 0.8
"""Share of all characters from which a field without a usual name is the text."""
MAX_RECORDS = 32


def read_first_records(source: str, base: Path, options: ReadOptions) -> list[dict[str, Any]]:
    """The first records of a source's first file with records; none if the first file is text.

    Args:
        source: Builtin name, file, folder or glob.
        base: Folder of a relative source.
        options: How files are read.

    Raises:
        BadDataError: A file or record before them is bad, and bad ones are not skipped.
    """
    fields, found = record_fields(options), []
    for _, path in iter_files(source, base, frozenset(), _ignore):
        try:
            kind = file_kind(path)
            if kind.kind == "text":
                break
            with open_file(path, kind.compression) as (stream, _):
                for _, record in itertools.islice(iter_records(kind.kind, stream, (), fields), MAX_RECORDS):
                    if isinstance(record, BadDataError) and not options.skip_bad:
                        raise record
                    if isinstance(record, dict):
                        found.append(record)
        except BadDataError:
            if not options.skip_bad:
                raise
        except OSError:  # reading the source reports it
            pass
        if found:
            break
    return found


def starts_with_conversation(source: str, base: Path, options: ReadOptions) -> bool:
    """Whether the first record of a source is a conversation; a text file has no records.

    A source that cannot be read counts as none: reading it reports the error.
    """
    try:
        records = read_first_records(source, base, options)
    except BadDataError:
        return False
    return bool(records) and holds_conversation(records[0], options.prompt_field, options.answer_field)


def find_text_field(records: list[dict[str, Any]]) -> str | None:
    """The field that obviously has the text: by its name, or by its share of all characters.

    Args:
        records: The first ones of a source.

    Returns:
        None if no field is obvious.
    """
    sizes: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, str):
                sizes[name] = sizes.get(name, 0) + len(value)
    usual = {name.lower(): name for name in reversed(sizes)}
    if named := next((usual[name] for name in TEXT_FIELDS if name in usual), None):
        return named
    longest = max(sizes, key=lambda name: sizes[name], default=None)
    if longest is None or sizes[longest] < MIN_TEXT_SHARE * sum(sizes.values()):
        return None
    return longest


def _ignore(name: str, reason: str) -> None:
    """Ignore a file that cannot be listed: the preparation reports it."""

"""The keys of the job file, by their dotted paths."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from meshwright.spec.job import Job

_type_hints = functools.cache(typing.get_type_hints)
"""Evaluates the annotations of a class once: it takes 3 ms."""


def section_type(path: list[str]) -> Any:
    """The dataclass at a dotted path of the job, the first one of a union; or None."""
    owner: Any = Job
    for part in path:
        if part.isdigit():  # a row of a list of tables
            continue
        hint = _type_hints(owner).get(part)
        if typing.get_origin(hint) is tuple:
            hint = typing.get_args(hint)[0]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
        if hint is None or not dataclasses.is_dataclass(hint):
            return None
        owner = hint
    return owner


def takes_text(path: list[str]) -> bool:
    """Whether a key is a string, so that an override needs no quotes even if it looks like a number."""
    owner = section_type(path[:-1])
    if owner is None:
        return False
    hint = _type_hints(owner).get(path[-1])
    return hint is str or (isinstance(hint, types.UnionType) and str in typing.get_args(hint))


def list_tables() -> list[str]:
    """The tables of a job."""
    return [field.name for field in dataclasses.fields(Job) if section_type([field.name])]


def list_keys() -> list[str]:
    """All keys of a job, without those of tables inside tables."""
    keys = [field.name for field in dataclasses.fields(Job) if not section_type([field.name])]
    return keys + [f"{table}.{name}" for table in list_tables() for name in _names_in(table)]


def _names_in(table: str) -> list[str]:
    """Names in a table; those of all kinds of models."""
    hint = _type_hints(Job)[table]
    kinds = typing.get_args(hint) or (hint,)
    return list(dict.fromkeys(field.name for kind in kinds for field in dataclasses.fields(kind)))


def list_choices(key: str) -> list[str]:
    """The values that a key may have, if they are few; else none."""
    *parents, leaf = key.split(".")
    owner = section_type(parents)
    hint = _type_hints(owner).get(leaf) if owner else None
    if bool in (hint, *typing.get_args(hint)):
        return ["true", "false"]
    for kind in (hint, *typing.get_args(hint)):  # a key without a default may also be None
        if typing.get_origin(kind) is typing.Literal:
            return [str(value) for value in typing.get_args(kind)]
    return []

"""Translates pydantic's validation errors to problems with a dotted path, rule, fix and code; JSON Schema."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.model import MODEL_TAGS, ResNetModel

JOB: TypeAdapter[Job] = TypeAdapter(Job)

_RANGE = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a string"}


def translate_errors(error: ValidationError) -> list[Problem]:
    """One problem per key; errors of the members of a union become one."""
    problems: dict[str, Problem] = {}
    for finding in error.errors(include_url=False):
        path = _dotted(finding["loc"])
        problems.setdefault(path, _translate(path, finding))
    return list(problems.values())


def _dotted(location: tuple[int | str, ...]) -> str:
    """The key's path as the user writes it, without the tag that pydantic adds for the kind of model."""
    parts = [str(part) for part in location]
    if parts[:1] == ["model"] and parts[1:2] and parts[1] in MODEL_TAGS:
        del parts[1]
    return ".".join(parts)


def _translate(path: str, finding: Any) -> Problem:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(path, ResNetModel if finding["loc"][:2] == ("model", "resnet") else None)
    if kind in ("missing", "missing_argument"):
        return _missing_key(path)
    if kind == "literal_error":
        choices = context["expected"]
        near = difflib.get_close_matches(
            str(value), choices.replace("'", "").replace(" or ", ", ").split(", "), n=1
        )
        fix = f"Did you mean {near[0]!r}?" if near else ""
        return Problem("job-not-a-choice", f"is not one of {choices}", path=path, value=value, fix=fix)
    if kind in _RANGE:
        words, key = _RANGE[kind]
        return Problem(
            "job-out-of-range", f"is out of range: it must be {words} {context[key]}", path=path, value=value
        )
    if kind == "finite_number":
        return Problem("job-out-of-range", "is out of range: it must be finite", path=path, value=value)
    if kind in ("string_too_short", "string_too_long"):
        longest = context.get("max_length")
        rule = f"must have at most {longest} characters" if longest else "must not be empty"
        return Problem("job-out-of-range", rule, path=path, value=value)
    if kind == "string_pattern_mismatch":
        rule = "must be letters, digits, dots, dashes and underscores"
        return Problem("job-out-of-range", rule, path=path, value=value, fix="It names a folder")
    if kind.startswith("dataclass"):
        return Problem(
            "job-wrong-type",
            "must be a table",
            path=path,
            value=value,
            fix=f"Write [{path}] and its keys below",
        )
    expected = _EXPECTED.get(kind.split("_")[0], finding["msg"])
    fix = "Write it without quotes" if isinstance(value, str) and "number" in expected else ""
    return Problem("job-wrong-type", f"must be {expected}", path=path, value=value, fix=fix)


def _unknown_key(path: str, owner: Any = None) -> Problem:
    *parents, leaf = path.split(".")
    owner = owner or section_type(parents)
    keys = [f.name for f in dataclasses.fields(owner)] if owner else []
    near = [key for key in keys if leaf.startswith(f"{key}_") or key.startswith(f"{leaf}_")]
    near = near or difflib.get_close_matches(leaf, keys, n=1, cutoff=0.5)
    table = f"[{'.'.join(parents)}]" if parents else "a job"
    meant = ".".join((*parents, near[0])) if near else ""
    fix = f"Did you mean {meant}?" if near else f"Keys of {table}: {', '.join(keys)}"
    return Problem("job-unknown-key", f"Unknown key {path}", path=path, fix=fix)


def _missing_key(path: str) -> Problem:
    fix = f"Add it to [{path.rpartition('.')[0]}]" if "." in path else f"Add the table [{path}]"
    if path.startswith("model."):
        fix += ", or name a model.preset"
    return Problem("job-missing-key", "is missing", path=path, fix=fix)


def section_type(path: list[str]) -> Any:
    """The dataclass at a dotted path of the job, the first one of a union; or None."""
    owner: Any = Job
    for part in path:
        if part.isdigit():  # a row of a list of tables
            continue
        hint = typing.get_type_hints(owner).get(part)
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
    hint = typing.get_type_hints(owner).get(path[-1])
    return hint is str or (isinstance(hint, types.UnionType) and str in typing.get_args(hint))


def job_schema() -> dict[str, Any]:
    """JSON Schema of the job file.

    A preset may fill in the model and the cluster, so their keys are not required. Neither is the sequence
    length, which images do not have.
    """
    schema = JOB.json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Meshwright job"
    schema["required"] = ["model", "data", "train"]
    for section in ("DecoderModel", "ResNetModel", "Cluster"):
        schema["$defs"][section].pop("required", None)
    schema["$defs"]["Data"]["required"].remove("seq_len")
    model = schema["properties"]["model"]
    model["anyOf"] = model.pop("oneOf")  # a bare preset may be of either kind
    return schema

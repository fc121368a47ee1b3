"""Translates pydantic's validation errors to problems with a dotted path, rule, fix and code."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.core.errors import Problem
from meshwright.spec.fields import HOST_PORT
from meshwright.spec.job import Job
from meshwright.spec.job_keys import section_type
from meshwright.spec.key_hints import suggest_key
from meshwright.spec.layout import PLACEMENT_TAGS
from meshwright.spec.model import MODEL_TAGS, ResNetModel

JOB: TypeAdapter[Job] = TypeAdapter(Job)

_RANGE = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "tuple": "a list, such as [1, 2]",
}
CHOICE_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
    "true": "full",
    "false": "none",
}
"""Values by their names in PyTorch, and those of switches that have more than two settings here."""
_LENGTHS = (("least", "min_length"), ("most", "max_length"))


def translate_errors(error: ValidationError) -> list[Problem]:
    """One problem per key; errors of the members of a union become one."""
    problems: dict[str, Problem] = {}
    for finding in error.errors(include_url=False):
        path = _dotted(finding["loc"])
        unknown = finding["type"] in ("unexpected_keyword_argument", "extra_forbidden")
        found = _unknown_keys(path, finding) if unknown else [_translate(path, finding)]
        for problem in found:
            problems.setdefault(problem.path, problem)
    return list(problems.values())


def _dotted(location: tuple[int | str, ...]) -> str:
    """The key's path as the user writes it, without the tag that pydantic adds for the member of a union."""
    parts = [str(part) for part in location]
    if parts[:1] == ["model"] and parts[1:2] and parts[1] in MODEL_TAGS:
        del parts[1]
    if parts[:2] == ["layout", "placement"] and parts[2:3] and parts[2] in PLACEMENT_TAGS:
        del parts[2]
    return ".".join(parts)


def _find_choice(value: str, choices: list[str]) -> str | None:
    """The choice that was meant: by another framework's name for it, or by similar letters in any case."""
    lowered = value.lower()
    named = CHOICE_NAMES.get(lowered, lowered)
    return next(iter([named] if named in choices else difflib.get_close_matches(lowered, choices, n=1)), None)


def _translate(path: str, finding: Any) -> Problem:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    if kind in ("missing", "missing_argument"):
        return _missing_key(path)
    if kind == "literal_error":
        choices = context["expected"]
        near = _find_choice(str(value), choices.replace("'", "").replace(" or ", ", ").split(", "))
        fix = f"Did you mean {near!r}?" if near else ""
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
    if kind == "string_pattern_mismatch" and context["pattern"] == HOST_PORT:
        fix = "Write an address of this machine and a port, such as 127.0.0.1:9400"
        return Problem("job-out-of-range", "is not HOST:PORT", path=path, value=value, fix=fix)
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
    if kind in ("too_short", "too_long"):
        bounds = [f"at {word} {context[key]}" for word, key in _LENGTHS if key in context]
        return Problem("job-out-of-range", f"must have {' and '.join(bounds)} values", path=path, value=value)
    expected = _EXPECTED.get(
        kind.split("_")[0], "of another type; meshwright schema has the types of all keys"
    )
    fix = "Write it without quotes" if isinstance(value, str) and _is_number(value) else ""
    return Problem("job-wrong-type", f"must be {expected}", path=path, value=value, fix=fix)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_keys(path: str, finding: Any) -> list[Problem]:
    """The unknown key; of an unknown table, each of its keys."""
    value, parents = finding["input"], path.split(".")[:-1]
    owner = ResNetModel if finding["loc"][:2] == ("model", "resnet") else section_type(parents)
    fix = suggest_key(path, owner)
    if isinstance(value, dict) and value and not fix.startswith("Did you mean"):
        return [_unknown_key(f"{path}.{key}", suggest_key(f"{path}.{key}")) for key in value]
    return [_unknown_key(path, fix)]


def _unknown_key(path: str, fix: str) -> Problem:
    return Problem("job-unknown-key", f"Unknown key {path}", path=path, fix=fix)


def _missing_key(path: str) -> Problem:
    fix = f"Add it to [{path.rpartition('.')[0]}]" if "." in path else f"Add the table [{path}]"
    if path.startswith("model."):
        fix += ", or name a model.preset"
    return Problem("job-missing-key", "is missing", path=path, fix=fix)

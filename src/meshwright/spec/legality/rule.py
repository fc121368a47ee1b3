"""One legality rule, and builders for the common kinds of rules.

A rule never raises. It returns the problem that it found, so that a job gets all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, list_choices

Check = Callable[[Job], Problem | None]

ANY_VALUE = object()
"""Stands for any value of a key other than None."""


@dataclass(frozen=True)
class Rule:
    """One row of the legality table."""

    code: str
    statement: str
    """The rule as a sentence, for the documentation."""
    check: Check
    built: bool = True
    """False: valid, but not implemented yet. It can be planned, not run."""
    planned: bool = True
    """False: neither implemented nor predicted, so it cannot even be planned."""
    plan_only: bool = False
    """True: checked for plans only; a run is refused for another reason."""

    def applies(self, to_run: bool) -> bool:
        """Whether the rule is checked for a job that runs, or for one that is only planned."""
        return not self.plan_only if to_run else self.built or not self.planned


def read_key(job: Job, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = job
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def name_unused(path: str) -> str:
    """The code of a rule that refuses a key without effect: ``model-router-unused``."""
    return f"{path.removesuffix('_s').replace('.', '-').replace('_', '-')}-unused"


def suggest(numbers: Iterable[int]) -> str:
    """``Use 1, 2 or 4``: the largest eight of the numbers."""
    return f"Use {list_choices(sorted(set(numbers))[-8:])}"


def divides(code: str, degree: str, whole: str, why: str) -> Rule:
    """In a decoder, ``degree`` must divide ``whole`` (dotted paths)."""

    def check(job: Job) -> Problem | None:
        if not isinstance(job.model, DecoderModel):
            return None
        small, large = read_key(job, degree), read_key(job, whole)
        if large % small == 0:
            return None
        rule = f"does not divide {whole}={large}; {why}"
        return Problem(code, rule, path=degree, value=small, fix=f"Use {list_choices(divisors(large))}")

    return Rule(code, f"`{degree}` divides `{whole}`: {why}.", check)


def needs_degree(code: str, path: str, default: Any, degree: str, why: str, statement: str = "") -> Rule:
    """A setting other than its default needs a parallel degree above 1.

    Args:
        code: Code of the rule.
        path: The setting.
        default: Its value without effect.
        degree: The degree that it needs.
        why: Why it has no effect otherwise.
        statement: The rule for the documentation; made from the rest if left out.
    """

    def check(job: Job) -> Problem | None:
        value = read_key(job, path)
        if value == default or read_key(job, degree) > 1:
            return None
        fix = f"Set {degree} above 1, or leave {path} out"
        return Problem(code, f"has no effect with {degree}=1: {why}", path=path, value=value, fix=fix)

    made = f"`{path}` other than `{_toml(default)}` needs `{degree}` > 1: {why}."
    return Rule(code, statement or made, check)


def needs_setting(section: type, path: str, other: str, needed: Any, why: str, code: str = "") -> Rule:
    """A key other than its default has an effect only where another key has a value.

    Args:
        section: The class of the table that has the key; a job with another class is not checked.
        path: The key.
        other: The key that decides.
        needed: Its value, or ``ANY_VALUE``.
        why: Why the key has no effect otherwise.
        code: Code of the rule; ``<path>-unused`` if left out.
    """
    code = code or name_unused(path)
    table, _, key = path.partition(".")
    default = getattr(section, key)
    wanted = other if needed is ANY_VALUE else f"{other}={_toml(needed)}"

    def check(job: Job) -> Problem | None:
        if not isinstance(getattr(job, table), section) or (value := read_key(job, path)) == default:
            return None
        there = read_key(job, other)
        if there is not None if needed is ANY_VALUE else there == needed:
            return None
        rule, fix = f"has an effect only with {wanted}: {why}", f"Set {wanted}, or leave {path} out"
        return Problem(code, rule, path=path, value=value, fix=fix)

    return Rule(code, f"`{path}` needs `{wanted.replace('=', ' = ')}`: {why}.", check)


def not_built(path: str, built: tuple[Any, ...], what: str, planned: bool = True) -> Rule:
    """Values of ``path`` outside ``built`` are not implemented yet.

    Args:
        path: The key.
        built: Its implemented values.
        what: What the others ask for.
        planned: Whether the planner predicts them.
    """
    code = f"{path.replace('.', '-').replace('_', '-')}-not-built"

    def check(job: Job) -> Problem | None:
        if path.startswith("model.") and not isinstance(job.model, DecoderModel):
            return None
        value = read_key(job, path)
        if value in built:
            return None
        used = "Use " + " or ".join(f"{path}={_toml(b)}" for b in built)
        fix = "Leave it out" if built == (None,) else used
        if path.startswith("model.") and job.model.preset:
            fix = f"The preset {job.model.preset} can be planned, not trained: choose another model to train"
        return Problem(code, f"needs {what}, which is not implemented yet", path=path, value=value, fix=fix)

    return Rule(code, f"{what[0].upper()}{what[1:]} (`{path}`).", check, built=False, planned=planned)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The error classes, with their exit statuses.

The tree::

    MeshwrightError
    ├── UserError         exit 2: the user's mistake; a list of problems, each with a code
    ├── CheckFailedError  exit 3: a contract did not hold (audit, prove, validate, faults)
    ├── RunFailedError    exit 4: a rank died, the run could not continue, or a signal ended it unsaved
    └── InterruptedRunError  exit 130: Ctrl-C

A problem has a dotted key and value, the rule with its numbers, the nearest fix, and a code in brackets.
``docs/errors.md`` documents the codes; a test checks that it has all of them.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One problem, readable by people and by programs."""

    code: str
    """Stable code, ``area-what``."""
    rule: str
    """What is wrong and the rule, with its numbers. It follows the key, or is a sentence that names it."""
    path: str = ""
    """Dotted key in the job file, a file path, or empty."""
    value: Any = None
    """The offending value, if there is one to show."""
    fix: str = ""
    """The nearest fix, as an instruction."""
    is_argument: bool = False
    """Whether the path is an argument of a call; the command line shows it as an option."""

    def __str__(self) -> str:
        """One line, ending in the code."""
        what = self.path
        if self.path and self.value is not None:
            what = (
                f"{self.path}={self.value!r}" if isinstance(self.value, str) else f"{self.path}={self.value}"
            )
        whole = self.rule[:1].isupper() and self.path in self.rule
        sentence = self.rule if whole else f"{what} {self.rule}".strip().rstrip(".")
        fix = self.fix.rstrip(".")
        fix += "" if not fix or fix.endswith("?") else "."
        sentence += "" if sentence.endswith("?") else "."
        return " ".join(part for part in (sentence, fix, f"[{self.code}]") if part)

    def as_option(self) -> Problem:
        """The problem with an argument's name as the command line writes it: ``top_k`` as ``--top-k``."""
        if not self.is_argument:
            return self
        return dataclasses.replace(self, path=f"--{self.path.replace('_', '-')}", is_argument=False)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Problem:
        """A problem that another process wrote with :meth:`as_dict`."""
        return cls(facts["code"], facts["rule"], facts["path"], facts["value"], facts["fix"])

    def as_dict(self) -> dict[str, Any]:
        """The problem for ``--json``."""
        shown = self.value if isinstance(self.value, str | int | float | bool | None) else str(self.value)
        return {
            "code": self.code,
            "path": self.path,
            "value": shown,
            "rule": self.rule,
            "fix": self.fix,
            "message": str(self),
        }


class MeshwrightError(Exception):
    """Base of all errors that end a command with a message instead of a traceback."""

    exit_status = 1

    def __init__(self, *problems: Problem) -> None:
        assert problems, "an error names at least one problem"
        super().__init__(*problems)
        self.problems: tuple[Problem, ...] = problems

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)


class UserError(MeshwrightError):
    """The user's mistake: a job file, an argument, a missing file or package."""

    exit_status = 2


class CheckFailedError(MeshwrightError):
    """A check failed: audit, prove, validate or faults."""

    exit_status = 3


class RunFailedError(MeshwrightError):
    """The run could not continue: a rank died, a device was lost."""

    exit_status = 4


class InterruptedRunError(MeshwrightError):
    """The user asked the run to stop: Ctrl-C."""

    exit_status = 130


def name_interruption(signals: Collection[int], problem: Problem) -> RunFailedError | InterruptedRunError:
    """The error of a command that signals ended without a result: Ctrl-C, or SIGTERM and SIGHUP."""
    return InterruptedRunError(problem) if signal.SIGINT in signals else RunFailedError(problem)


def missing_package(package: str, extra: str, needed_for: str) -> UserError:
    """The error for a missing package of an optional extra."""
    return UserError(
        Problem(
            code="install-missing-extra",
            rule=f"the package {package!r} is not installed, and {needed_for} needs it",
            fix=f"Install the extra: pip install 'meshwright[{extra}]'",
        )
    )


def require_argument(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a bad argument of a call.

    Raises:
        UserError: The rule does not hold.
    """
    if not holds:
        raise UserError(Problem("api-argument", rule, path=name, value=value, is_argument=True))

"""Faults as sentences: ``fail(rank=2, step=7, during="backward")``. A schedule is a list of them.

A schedule is generated from a seed, printed, and read back from the printed text. Nothing of the text is
executed: it is parsed as a call with constant keyword arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.flight_ring import PHASES

CALLS = ("other op", "other shape", "skip")
"""What a rank does instead of a collective."""
GRADIENTS = ("nan", "inf", "spike")
"""What the gradient of a rank becomes; a spike is 2^20 times the gradient."""
INSIDE = ("wrong_collective", "corrupt_gradient")
"""Faults that no signal can cause: the ranks have another entry."""
FAULT_VARIABLE = "MESHWRIGHT_FAULT"
"""The sentences of such faults, one per line; read by ``verify`` only, which training does not import."""


@dataclass(frozen=True)
class Fault:
    """One fault. Make it with one of the functions below."""

    kind: str
    rank: int | None = None
    step: int | None = None
    """Injected in this step, or in the first later one in which the rank is in the phase."""
    during: str | None = None
    """The phase of the step, as in the flight recorder; None for any."""
    after_s: float | None = None
    """Injected this many seconds after the first step, instead of in a step."""
    for_s: float | None = None
    """How long a stopped process stays stopped."""
    restart_after_s: float | None = None
    """When the command is started again."""
    by_s: float | None = None
    """What the wall clock of the rank differs by from now on."""
    call: str | None = None
    value: str | None = None
    """What a gradient becomes."""
    connections: int | None = None
    grace_s: float | None = None
    """Time between SIGTERM and SIGKILL."""
    factor: float | None = None
    """How many times as long the work of a slowed rank takes."""

    def __str__(self) -> str:
        """The sentence, as :func:`parse_fault` reads it."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        return f"{self.kind}({', '.join(f'{name}={_show(v)}' for name, v in given if v is not None)})"


def fail(
    rank: int, step: int | None = None, during: str | None = None, after_s: float | None = None
) -> Fault:
    """Kill the process of a rank with SIGKILL."""
    return _checked(Fault("fail", rank, step, during, after_s))


def stop(rank: int, step: int, for_s: float, during: str | None = None) -> Fault:
    """Stop the process of a rank with SIGSTOP, and let it go on after a while."""
    return _checked(Fault("stop", rank, step, during, for_s=for_s))


def kill_supervisor(step: int, restart_after_s: float) -> Fault:
    """Kill the command with SIGKILL when rank 0 is in a step, and resume the run after a while."""
    return _checked(Fault("kill_supervisor", step=step, restart_after_s=restart_after_s))


def stop_supervisor(step: int, for_s: float) -> Fault:
    """Stop the command with SIGSTOP when rank 0 is in a step, and let it go on after a while."""
    return _checked(Fault("stop_supervisor", step=step, for_s=for_s))


def preempt(step: int, grace_s: float) -> Fault:
    """Send SIGTERM to the command when rank 0 is in a step, SIGKILL after a while, and resume the run."""
    return _checked(Fault("preempt", step=step, grace_s=grace_s))


def shift_clock(rank: int, step: int, by_s: float) -> Fault:
    """Set the wall clock of a rank ahead or behind."""
    return _checked(Fault("shift_clock", rank, step, by_s=by_s))


def wrong_collective(rank: int, step: int, call: str) -> Fault:
    """Let a rank call another collective, pass another shape, or skip a call, in a step."""
    return _checked(Fault("wrong_collective", rank, step, call=call))


def corrupt_gradient(rank: int, step: int, value: str) -> Fault:
    """Let the gradient of a rank become NaN, Inf, or 2^20 times as large, in a step."""
    return _checked(Fault("corrupt_gradient", rank, step, value=value))


def connect(step: int, connections: int) -> Fault:
    """Open hostile connections to every listening port of the run when rank 0 is in a step."""
    return _checked(Fault("connect", step=step, connections=connections))


def slow(rank: int, step: int, factor: float, for_s: float) -> Fault:
    """Let the work of a rank take longer for a while."""
    return _checked(Fault("slow", rank, step, factor=factor, for_s=for_s))


ARGUMENTS: dict[str, tuple[set[str], set[str]]] = {
    "fail": ({"rank"}, {"step", "during", "after_s"}),
    "stop": ({"rank", "step", "for_s"}, {"during"}),
    "kill_supervisor": ({"step", "restart_after_s"}, set()),
    "stop_supervisor": ({"step", "for_s"}, set()),
    "preempt": ({"step", "grace_s"}, set()),
    "shift_clock": ({"rank", "step", "by_s"}, set()),
    "wrong_collective": ({"rank", "step", "call"}, set()),
    "corrupt_gradient": ({"rank", "step", "value"}, set()),
    "connect": ({"step", "connections"}, set()),
    "slow": ({"rank", "step", "factor", "for_s"}, set()),
}
"""Needed and optional arguments of each kind."""
INTEGERS = ("rank", "step", "connections")
CHOICES = {"during": PHASES, "call": CALLS, "value": GRADIENTS}


def parse_fault(text: str) -> Fault:
    """Read a sentence.

    Raises:
        UserError: It is none.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError(text)
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        fix = 'Write it as fail(rank=2, step=7, during="backward")'
        raise UserError(Problem("faults-schedule", f"{text.strip()!r} is not a fault", fix=fix)) from None
    kind = call.func.id
    if kind not in ARGUMENTS:
        fix = f"Known faults are {', '.join(ARGUMENTS)}"
        raise UserError(Problem("faults-schedule", f"{text.strip()!r}: there is no fault {kind!r}", fix=fix))
    needed, optional = ARGUMENTS[kind]
    wrong = sorted((needed - set(arguments)) | (set(arguments) - needed - optional))
    if wrong:
        rule = f"{text.strip()!r}: {', '.join(wrong)} is missing or not an argument of {kind}"
        fix = f"{kind} takes {', '.join(sorted(needed | optional))}"
        raise UserError(Problem("faults-schedule", rule, fix=fix))
    return _checked(Fault(kind, **arguments))


def read_schedule(path: Path) -> list[Fault]:
    """Read a file with one sentence per line; empty lines and lines that start with ``#`` are skipped.

    Raises:
        UserError: It cannot be read, or a line is not a fault.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(Problem("faults-schedule", f"cannot be read: {reason}", path=str(path))) from None
    found = [parse_fault(line) for line in lines if line.strip() and not line.strip().startswith("#")]
    if not found:
        fix = "Write one fault per line"
        raise UserError(Problem("faults-schedule", "has no faults", path=str(path), fix=fix))
    return found


def write_schedule(faults: Iterable[Fault]) -> str:
    """The text that :func:`read_schedule` reads."""
    return "".join(f"{fault}\n" for fault in faults)


def _show(value: Any) -> str:
    return (
        f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def _checked(fault: Fault) -> Fault:
    """Refuse values out of range."""
    for name in (f.name for f in fields(fault)[1:]):
        value = getattr(fault, name)
        if value is None:
            continue
        if name in CHOICES:
            right = value in CHOICES[name]
            rule = f"must be one of {', '.join(CHOICES[name])}"
        elif name in INTEGERS:
            right = isinstance(value, int) and not isinstance(value, bool) and value >= (name != "rank")
            rule = f"must be an integer of at least {int(name != 'rank')}"
        else:
            right = isinstance(value, int | float) and not isinstance(value, bool)
            right = right and (value >= 0 or name == "by_s") and (value >= 1 or name != "factor")
            rule = "must be a number of seconds" if name != "factor" else "must be a number of at least 1"
        if not right:
            raise UserError(Problem("faults-schedule", f"{fault}: {name} {rule}", fix=f"Change {name}"))
    if fault.kind == "fail" and (fault.step is None) == (fault.after_s is None):
        raise UserError(
            Problem("faults-schedule", f"{fault}: give either step or after_s", fix="Leave one out")
        )
    return fault

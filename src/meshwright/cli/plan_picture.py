"""``meshwright plan --picture``: checks the name early, gathers what is drawn, writes the file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from meshwright.core.errors import Problem, UserError
from meshwright.explain.plan_picture import PlanPicture, draw_plan

KINDS = ("svg", "png")


class Drawable(Protocol):
    """An outcome that can be drawn."""

    def picture(self) -> PlanPicture:
        """What is drawn of it."""


def check_picture(path: Path) -> None:
    """Refuse what cannot be drawn before anything is searched."""
    if path.suffix.removeprefix(".").lower() not in KINDS:
        rule, fix = "is neither .svg nor .png", "Write, say, --picture plan.svg"
        raise UserError(Problem("plan-picture-kind", rule, path="--picture", value=str(path), fix=fix))


def draw_picture(outcome: Drawable, path: Path) -> None:
    """Write the picture."""
    content = draw_plan(outcome.picture(), path.suffix.removeprefix(".").lower())
    try:
        path.write_bytes(content)
    except OSError as error:
        rule = f"cannot be written: {error}"
        raise UserError(Problem("plan-picture-unwritable", rule, path=str(path))) from None

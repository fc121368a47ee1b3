"""An illegal layout gets the nearest legal one, named by ``spec`` and priced by ``plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.choose import evaluate
from meshwright.plan.search.nearest import find_nearest
from meshwright.plan.search.predict import overrides_from
from meshwright.spec.job import Job
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.load import SpecError
from meshwright.spec.model import DecoderModel
from meshwright.spec.nearest import nearest_legal_layout


@dataclass(frozen=True)
class Near:
    """A layout close to the one that was refused, with its price."""

    runs: bool
    """False: it can be planned only."""
    overrides: str
    step_s: float
    peak_bytes: float
    fits: bool

    @property
    def line(self) -> str:
        """For people."""
        kind = "nearest layout that runs" if self.runs else "nearest legal layout"
        step, peak = format_seconds(self.step_s), format_bytes(self.peak_bytes)
        fits = "" if self.fits else ", which does not fit"
        return f"{kind}: {self.overrides} (predicted {step} a step, {peak} a device{fits})"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        price = {"step_s": self.step_s, "peak_bytes": round(self.peak_bytes), "fits": self.fits}
        return {"runs": self.runs, "layout": self.overrides, **price}


def find_near(error: MeshwrightError) -> list[Near]:
    """The nearest layout that runs and the nearest legal one; nothing if the layout is not the trouble."""
    if not isinstance(error, SpecError) or error.job is None:
        return []
    runs = _nearest_that_runs(error.job)
    return [*runs, *_nearest_planned(error.job, error, also_here=not runs)]


def _nearest_planned(job: Job, error: SpecError, also_here: bool) -> list[Near]:
    """The nearest of all legal layouts, where the asked one can never run.

    Args:
        job: What was asked for.
        error: Why not.
        also_here: Whether on CPUs, too: of a model that does not run yet there is nothing but the plan.
    """
    codes = [problem.code for problem in error.problems if not problem.path.startswith("model.")]
    never = codes and all(code.startswith("layout-") and not code.endswith("-not-built") for code in codes)
    searched = job.cluster.device == "cuda" or also_here
    if not never or not searched or not isinstance(job.model, DecoderModel):
        return []
    if any(p.path.startswith("model.") for p in find_problems(job, to_run=False)):
        return []  # such a model cannot even be planned
    nearest = find_nearest(job, job.layout)
    if nearest is None:
        return []
    named = overrides_from(job.layout, nearest.layout)
    return [Near(False, named, nearest.step_s, nearest.peak_bytes, nearest.fits)]


def _nearest_that_runs(asked: Job) -> list[Near]:
    layout = nearest_legal_layout(asked)
    job = with_layout(asked, layout)
    if layout == asked.layout:
        return []  # it is not the layout that is refused
    if any(problem.code.startswith(("layout-", "model-")) for problem in find_problems(job)):
        return []  # the ledger prices what runs
    candidate = evaluate(job, layout)
    named = overrides_from(asked.layout, candidate.layout)
    return [Near(True, named, candidate.time.total_s, candidate.ledger.peak_bytes, candidate.fits)]

"""An illegal layout gets the nearest legal one, named by ``spec`` and priced by ``plan``."""

from __future__ import annotations

from meshwright.core.errors import MeshwrightError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.choose import evaluate
from meshwright.plan.search.nearest import find_nearest
from meshwright.plan.search.predict import layout_overrides
from meshwright.spec.job import Job
from meshwright.spec.legality import find_problems, nearest_legal_layout, with_layout
from meshwright.spec.load import SpecError
from meshwright.spec.model import DecoderModel


def price_of_nearest(error: MeshwrightError) -> list[str]:
    """The nearest layout that runs and the nearest legal one; nothing if layout is not the trouble."""
    if not isinstance(error, SpecError) or error.job is None:
        return []
    if not any(problem.code.startswith("layout-") for problem in error.problems):
        return []
    return [*_nearest_that_runs(error.job), *_nearest_planned(error.job, error)]


def _nearest_planned(job: Job, error: SpecError) -> list[str]:
    """The nearest of all legal layouts, where the asked one can never run."""
    codes = [problem.code for problem in error.problems]
    never = all(code.startswith("layout-") and not code.endswith("-not-built") for code in codes)
    if not never or not isinstance(job.model, DecoderModel) or job.cluster.device != "cuda":
        return []
    nearest = find_nearest(job, job.layout)
    if nearest is None:
        return []
    step, peak = format_seconds(nearest.step_s), format_bytes(nearest.peak_bytes)
    fits = "" if nearest.fits else ", which does not fit"
    named = layout_overrides(nearest.layout)
    return [f"nearest legal layout: {named} (predicted {step} a step, {peak} a device{fits})"]


def _nearest_that_runs(asked: Job) -> list[str]:
    layout = nearest_legal_layout(asked)
    job = with_layout(asked, layout)
    if any(problem.code.startswith(("layout-", "model-")) for problem in find_problems(job)):
        return []  # the ledger prices what runs
    candidate = evaluate(job, layout)
    step, peak = format_seconds(candidate.time.total_s), format_bytes(candidate.ledger.peak_bytes)
    fits = "" if candidate.fits else ", which does not fit"
    named = f"{layout.named_degrees()} layout.micro_batch={candidate.layout.micro_batch}"
    if layout.recompute != asked.layout.recompute:
        named += f" layout.recompute={layout.recompute}"
    return [f"nearest layout that runs: {named} (predicted {step} a step, {peak} a device{fits})"]

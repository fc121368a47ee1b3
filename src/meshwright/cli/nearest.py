"""An illegal layout gets the nearest legal one, named by ``spec`` and priced by ``plan``."""

from __future__ import annotations

from meshwright.core.errors import MeshwrightError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.choose import evaluate
from meshwright.spec.legality import find_problems, nearest_legal_layout, with_layout
from meshwright.spec.load import SpecError


def price_of_nearest(error: MeshwrightError) -> list[str]:
    """One line with the nearest layout that runs and what it costs; nothing if layout is not the trouble."""
    if not isinstance(error, SpecError) or error.job is None:
        return []
    if not any(problem.code.startswith("layout-") for problem in error.problems):
        return []
    layout = nearest_legal_layout(error.job)
    job = with_layout(error.job, layout)
    if any(problem.code.startswith(("layout-", "model-")) for problem in find_problems(job)):
        return []  # the ledger prices what runs
    candidate = evaluate(job, layout)
    step, peak = format_seconds(candidate.time.total_s), format_bytes(candidate.ledger.peak_bytes)
    fits = "" if candidate.fits else ", which does not fit"
    named = f"{layout.named_degrees()} layout.micro_batch={candidate.layout.micro_batch}"
    if layout.recompute != error.job.layout.recompute:
        named += f" layout.recompute={layout.recompute}"
    return [f"nearest layout that runs: {named} (predicted {step} a step, {peak} a device{fits})"]

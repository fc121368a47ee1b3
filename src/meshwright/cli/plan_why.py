"""``meshwright plan --why``: one layout explained, legal or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.cli.output import Output
from meshwright.cli.plan_search import describe_prediction, search_progress
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.search.enumerate import pinned_keys
from meshwright.plan.search.find import Found, find_layouts
from meshwright.plan.search.nearest import find_nearest
from meshwright.plan.search.neighbours import compare, part_differences
from meshwright.plan.search.predict import Prediction, layout_words, predict_layouts
from meshwright.plan.search.rescue import remedies_for_layout
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.load import SpecError, load_job
from meshwright.spec.model import DecoderModel


def show_why(output: Output, source: str, overrides: list[str], why: list[str], on: str | None) -> int:
    """Explain a layout: what is wrong with it and the nearest legal one, or why it loses.

    Overrides of the layout that stand behind ``--why`` without a flag of their own belong to it.
    """
    layout_keys = [*why, *(text for text in overrides if text.startswith("layout."))]
    stray = [text for text in why if not text.startswith("layout.")]
    if stray:
        rule, fix = "is not a key of the layout", "Write, say, --why layout.tp=4 layout.pp=8"
        raise UserError(Problem("plan-why-key", rule, path="--why", value=stray[0], fix=fix))
    others = [text for text in overrides if not text.startswith("layout.")]
    job, problems = _load(source, [*others, *layout_keys], on)
    if not isinstance(job.model, DecoderModel):
        rule = "explains layouts of decoders; a ResNet is replicated, and plan shows all of its layouts"
        raise UserError(Problem("plan-why-images", rule, path="--why", fix="Leave it out"))
    free = dataclasses.replace(job, layout=Layout())
    with search_progress(output) as progress:
        found = find_layouts(free, {}, 1, progress=progress)
    best = None
    if found.best is not None:
        (best,) = predict_layouts(free, [found.best.grid.layout(0)])
    told = _explain_illegal(output, job, problems) if problems else _explain_legal(output, job, best)
    output.result(_counts(found) | {"layouts": told.pop("layouts"), "why": told | _best_of(best)})
    return 0


def _load(source: str, overrides: Sequence[str], on: str | None) -> tuple[Job, tuple[Problem, ...]]:
    """The job with the asked layout, and the rules that forbid it."""
    try:
        return load_job(source, overrides, on, to_run=False), ()
    except SpecError as error:
        about_layout = [p.code.startswith("layout-") for p in error.problems]
        if error.job is None or not all(about_layout):
            raise
        return error.job, error.problems


def _explain_illegal(output: Output, job: Job, problems: Sequence[Problem]) -> dict[str, Any]:
    output.say(f"{job.name}: {layout_words(job.layout)} is not legal")
    for problem in problems:
        output.say(f"  {problem}")
    nearest = find_nearest(job, job.layout)
    layouts = []
    if nearest is not None:
        fits = "" if nearest.fits else ", which does not fit"
        price = f"{format_seconds(nearest.step_s)} a step, {format_bytes(nearest.peak_bytes)} a device{fits}"
        output.say(f"nearest legal layout: {layout_words(nearest.layout)} ({price})")
        layouts = [nearest.summary()]
    return {"legal": False, "problems": [p.as_dict() for p in problems], "layouts": layouts}


def _explain_legal(output: Output, job: Job, best: Prediction | None) -> dict[str, Any]:
    layout = settle_micro_batch(job, job.layout)
    (asked,) = predict_layouts(job, [layout])
    reasons = []
    if not asked.fits:
        room = format_bytes(job.cluster.memory_bytes)
        device = f" the {room} of a device" if asked.peak_bytes > job.cluster.memory_bytes else ""
        reasons.append(f"does not fit: {asked.shortage}{device}")
        reasons += [f"it would fit: {remedy}" for remedy in remedies_for_layout(job, layout)]
    elif best is not None:
        reasons.append(_against(best, asked))
    reasons += _filled_up(job, asked)
    describe_prediction(output, asked, [f"{layout_words(layout)}: asked for", *reasons])
    differences: dict[str, float] = {}
    if best is not None:
        differences = part_differences(best, asked)
        _compare_table(output, best, asked)
    return {
        "legal": True,
        "problems": [],
        "against_best_s": differences,
        "layouts": [asked.summary(reasons, formulas=True)],
    }


def _against(best: Prediction, asked: Prediction) -> str:
    if asked.layout == best.layout:
        return "it is the best layout"
    verdict = compare(best, asked)
    devices = asked.layout.world_size, best.layout.world_size
    on = f", on {devices[0]} of {devices[1]} devices" if devices[0] != devices[1] else ""
    return f"against the best, {layout_words(best.layout)}: {verdict}{on}"


def _filled_up(job: Job, asked: Prediction) -> list[str]:
    """The best layout with the same keys that uses the whole cluster, where this one leaves devices idle."""
    devices = job.cluster.world_size
    if asked.layout.world_size >= devices:
        return []
    pins = pinned_keys(job.layout)
    for axis in ("dp_replicate", "dp_shard", "zero"):
        pins.pop(axis, None)
    found = find_layouts(job, pins, 1, worlds=[devices])
    if found.best is None:
        return [f"it leaves {devices - asked.layout.world_size} of {devices} devices idle"]
    (full,) = predict_layouts(job, [found.best.grid.layout(0)])
    idle = f"it leaves {devices - asked.layout.world_size} of {devices} devices idle; on all of them "
    return [f"{idle}{layout_words(full.layout)} takes {format_seconds(full.step_s)} a step"]


def _compare_table(output: Output, best: Prediction, asked: Prediction) -> None:
    rows = [
        (
            name,
            format_seconds(asked.breakdown_s.get(name, 0.0)),
            format_seconds(best.breakdown_s.get(name, 0.0)),
            f"{more:+.3g} s",
        )
        for name, more in sorted(part_differences(best, asked).items(), key=lambda item: -abs(item[1]))
    ]
    step, peak = asked.step_s - best.step_s, asked.peak_bytes - best.peak_bytes
    rows.append(("step", format_seconds(asked.step_s), format_seconds(best.step_s), f"{step:+.3g} s"))
    sign = "+" if peak >= 0 else "-"
    rows.append(
        (
            "peak",
            format_bytes(asked.peak_bytes),
            format_bytes(best.peak_bytes),
            f"{sign}{format_bytes(abs(peak))}",
        )
    )
    output.say()
    output.table("Against the best layout", ("", "asked", "best", "difference"), rows)


def _counts(found: Found) -> dict[str, Any]:
    return {
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "illegal": found.illegal,
        "fit": found.fit,
        "search_s": found.seconds,
    }


def _best_of(best: Prediction | None) -> dict[str, Any]:
    return {"best": None if best is None else best.summary()}

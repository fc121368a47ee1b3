"""Explains one layout, legal or not: which rules forbid it, or why another is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.layout.no_effect import UnusedSetting, find_unused_settings
from meshwright.layout.text import describe_layout
from meshwright.plan.build import plan_from, summarize, summarize_plan
from meshwright.plan.contract import PlanContract
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.search.alternatives import (
    NearestLegal,
    compare,
    find_alternatives,
    find_nearest_legal,
    part_differences,
)
from meshwright.plan.search.failure import search_error
from meshwright.plan.search.find import SearchResult, find_layouts
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout
from meshwright.spec.load import SpecError, load_job, read_tree
from meshwright.spec.model import DecoderModel

DATA_KEYS = ("dp_replicate", "dp_shard", "zero")
"""Keys that are freed first if a layout is to fill all devices."""
FEWEST_CHECKED, WHY_BUDGET_S = 8, 3.0
"""Layouts and seconds of the search for the best layout with some keys given."""


@dataclass(frozen=True)
class LayoutExplanation:
    """One layout: its problems and the nearest legal layouts, or its plan beside the best one."""

    job: Job
    """With that layout."""
    problems: tuple[Problem, ...]
    """Rules that forbid it; none if it is legal."""
    nearest: tuple[NearestLegal, ...]
    """The nearest legal layouts, if it is not."""
    plan: PlanContract | None
    """Its predictions, if it is legal; the reasons compare it with the best layout."""
    requested: Prediction | None
    best: Prediction | None
    """The best layout of all; None if none fits."""
    filled: Prediction | None
    """The best layout on all devices that has its keys."""
    search: SearchResult

    def __repr__(self) -> str:
        codes = [problem.code for problem in self.problems]
        return f"LayoutExplanation(legal={self.legal}, problems={codes}, nearest={list(self.nearest)})"

    @property
    def legal(self) -> bool:
        """Whether no rule forbids it."""
        return not self.problems

    @property
    def against_best_s(self) -> dict[str, float]:
        """Seconds that each part of the step takes, less those in the best layout; empty without both."""
        if self.best is None or self.requested is None:
            return {}
        return part_differences(self.best, self.requested)

    @property
    def unused_settings(self) -> list[UnusedSetting]:
        """Settings of the job that have no effect in this layout; none if it is not legal."""
        return [] if self.plan is None else find_unused_settings(self.plan.job)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright plan --why --json``."""
        why: dict[str, Any] = {"legal": self.legal, "problems": [p.as_dict() for p in self.problems]}
        if self.requested is None or self.plan is None:
            why["nearest_layouts"] = [one.as_dict() for one in self.nearest]
            layouts = [summarize(one.prediction) for one in self.nearest]
        else:
            best, filled = self.best, self.filled
            slower = None if best is None or filled is None else filled.step_s / best.step_s - 1
            why["against_best_s"] = self.against_best_s
            why["best_with_degrees"] = (
                None if filled is None else summarize(filled) | {"against_best": slower}
            )
            layouts = [summarize_plan(self.plan)]
        why["best"] = None if self.best is None else summarize(self.best)
        return self.search.counts() | {"layouts": layouts, "why": why}


def explain_layout(job: LoadedJob, keys: Sequence[str], reporter: Reporter) -> LayoutExplanation:
    """Explain the layout that these keys and the job's own layout overrides give.

    Raises:
        UserError: A key is not a layout key, or the model is not a decoder.
    """
    layout_keys = [*keys, *(text for text in job.overrides if text.startswith("layout."))]
    stray = [text for text in keys if not text.startswith("layout.")]
    if stray:
        rule, fix = "is not a layout key", "Write, for example, layout.tp=4 layout.pp=8"
        raise UserError(Problem("plan-why-key", rule, path=stray[0], fix=fix))
    others = [text for text in job.overrides if not text.startswith("layout.")]
    spec, problems = _load(job.source, [*others, *layout_keys], job.on)
    if not isinstance(spec.model, DecoderModel):
        rule = "has replicas only; layouts are explained for decoders"
        path, value, fix = (
            "model.architecture",
            spec.model.architecture,
            "Use plan: it shows all layouts",
        )
        raise UserError(Problem("plan-why-images", rule, path=path, value=value, fix=fix))
    with reporter.search() as progress:
        found = find_layouts(dataclasses.replace(spec, layout=Layout()), {}, progress=progress)
    best = found.best[0] if found.best else None
    if problems:
        nearest = tuple(find_nearest_legal(spec, problems))
        return LayoutExplanation(spec, problems, nearest, None, None, best, None, found)
    named = [text.partition("=")[0].removeprefix("layout.") for text in layout_keys]
    pins = _named_values(spec, [*_in_file(job.source), *named])
    filled = _best_with(spec, pins)
    requested, reasons = _explain_legal(spec, best, filled, pins)
    return LayoutExplanation(spec, (), (), plan_from(requested, reasons), requested, best, filled, found)


def _load(source: str, overrides: Sequence[str], on: str | None) -> tuple[Job, tuple[Problem, ...]]:
    """The job with the layout to explain, and the rules that forbid it."""
    try:
        return load_job(source, overrides, on, to_run=False), ()
    except SpecError as error:
        about_layout = [p.code.startswith("layout-") for p in error.problems]
        if error.job is None or not all(about_layout):
            raise
        return error.job, error.problems


def _in_file(source: str) -> list[str]:
    """Layout keys in the job file."""
    table = read_tree(source).get("layout")
    return list(table) if isinstance(table, dict) else []


def _named_values(job: Job, named: Sequence[str]) -> dict[str, Any]:
    """The keys that were given, without derived ones: a ZeRO stage that was not named may change."""
    unsearched = ("mode", "bucket_mb", "placement")
    return {name: getattr(job.layout, name) for name in named if name not in unsearched}


def _explain_legal(
    job: Job, best: Prediction | None, filled: Prediction | None, pins: dict[str, Any]
) -> tuple[Prediction, list[str]]:
    """The prediction of the layout that is judged, and sentences that compare it.

    It is the best layout with the keys if they have no degree, or leave devices idle that data parallelism
    or another degree can fill. Otherwise it is the layout as written.
    """
    devices = job.cluster.world_size
    idle = devices - job.layout.world_size if job.layout.mode != "auto" else 0
    kept = filled is not None and all(getattr(filled.layout, key) == pins[key] for key in pins)
    if job.layout.mode == "auto":
        if filled is None:
            raise search_error(job, pins, find_layouts(job, pins, 1))
        requested, what = filled, "the best with " + _describe_keys(pins)
    elif filled is not None and kept and idle > 0:
        named = _describe_keys(pins)
        what = f"the best with {named} on all {devices:,} devices; {named} alone leaves {idle:,} of them idle"
        requested = filled
    else:
        requested, what = predict(job, job.layout), "as given"
    reasons = [f"{describe_layout(requested.layout)}: {what}"]
    if not requested.fits:
        reasons.append(requested.shortage)
        reasons += [
            f"it would fit with {r.overrides} ({r.step_and_memory})" for r in find_alternatives(requested.job)
        ]
    elif best is not None:
        reasons.append(_against(best, requested))
    if requested is not filled:
        reasons += _explain_filled(job, requested, filled, best, pins)
    return requested, reasons


def _against(best: Prediction, requested: Prediction) -> str:
    if requested.layout == best.layout:
        return "it is the best layout"
    verdict = compare(best, requested)
    devices = requested.layout.world_size, best.layout.world_size
    on = f", on {devices[0]} of {devices[1]} devices" if devices[0] != devices[1] else ""
    return f"against the best, {describe_layout(best.layout)}: {verdict}{on}"


def _best_with(job: Job, pins: Mapping[str, Any]) -> Prediction | None:
    """The best layout on all devices with these keys; if none fits, with their degrees.

    Data parallelism fills the devices that the other degrees leave, so its keys are freed last.
    """
    degrees = {key: value for key, value in pins.items() if key in DEGREES}
    unfilled = [{k: v for k, v in keys.items() if k not in DATA_KEYS} for keys in (pins, degrees)]
    open_ = dataclasses.replace(job, layout=Layout())
    tried: list[dict[str, Any]] = []
    # Without a degree only the keys themselves are fixed.
    for keys in (dict(pins), degrees, *unfilled) if degrees else (dict(pins),):
        if keys in tried or not set(keys) & set(pins):
            continue
        tried.append(keys)
        found = find_layouts(
            open_, keys, FEWEST_CHECKED, worlds=[job.cluster.world_size], budget_s=WHY_BUDGET_S
        )
        if found.best:
            return found.best[0]
    return None


def _explain_filled(
    job: Job,
    requested: Prediction,
    filled: Prediction | None,
    best: Prediction | None,
    pins: Mapping[str, Any],
) -> list[str]:
    """The prediction of the given degrees on every device, with the best other settings."""
    devices, reasons = job.cluster.world_size, []
    if requested.layout.world_size < devices:
        reasons.append(f"it leaves {devices - requested.layout.world_size:,} of {devices:,} devices idle")
    if filled is None:
        return [*reasons, f"no layout with {_describe_keys(pins)} on all {devices:,} devices fits"]
    if filled.layout == requested.layout:
        return reasons
    kept = _describe_keys({key: value for key, value in pins.items() if getattr(filled.layout, key) == value})
    slower = "" if best is None else f", {filled.step_s / best.step_s - 1:+.1%} against the best"
    what = f"{describe_layout(filled.layout)}, {filled.step_and_memory}{slower}"
    return [*reasons, f"the best with {kept} on all {devices:,} devices: {what}"]


def _describe_keys(pins: Mapping[str, Any]) -> str:
    """Keys and values, degrees first."""
    names = sorted(pins, key=lambda name: DEGREES.index(name) if name in DEGREES else len(DEGREES))
    return " ".join(f"{name}={str(pins[name]).lower()}" for name in names)

"""``meshwright plan --why``: one layout explained, legal or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cli.output import Output
from meshwright.cli.plan_text import describe_plan
from meshwright.cli.search_progress import search_progress
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.text import describe_layout
from meshwright.plan.build import plan_from, summarize, summarize_plan
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.search.alternatives import (
    compare,
    find_alternatives,
    find_nearest_legal,
    part_differences,
)
from meshwright.plan.search.failure import search_error
from meshwright.plan.search.find import find_layouts
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout
from meshwright.spec.load import SpecError, load_job, read_tree
from meshwright.spec.model import DecoderModel

DATA_KEYS = ("dp_replicate", "dp_shard", "zero")
"""What is let go first where a layout is to fill all devices."""
FEWEST_CHECKED, WHY_BUDGET_S = 8, 3.0
"""Layouts and seconds of a search that only looks for the best layout with some keys."""


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
        found = find_layouts(free, {}, progress=progress)
    best = found.best[0] if found.best else None
    if problems:
        told = _explain_illegal(output, job, problems)
    else:
        named = [text.partition("=")[0].removeprefix("layout.") for text in layout_keys]
        told = _explain_legal(output, job, best, _named_values(job, [*_in_file(source), *named]))
    ranked = {"best": None if best is None else summarize(best)}
    output.result(found.counts() | {"layouts": told.pop("layouts"), "why": told | ranked})
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


def _in_file(source: str) -> list[str]:
    """Keys of the layout that the job file names."""
    table = read_tree(source).get("layout")
    return list(table) if isinstance(table, dict) else []


def _named_values(job: Job, named: Sequence[str]) -> dict[str, Any]:
    """What was asked for, without what follows from it: a ZeRO stage that was not named may change."""
    unsearched = ("mode", "bucket_mb")
    return {name: getattr(job.layout, name) for name in named if name not in unsearched}


def _explain_illegal(output: Output, job: Job, problems: Sequence[Problem]) -> dict[str, Any]:
    output.print(f"{job.name}: {describe_layout(job.layout)} is not legal")
    for problem in problems:
        output.print(f"  {problem}")
    near = find_nearest_legal(job, problems)
    for one in near:
        output.print(one.line)
        if not one.prediction.fits:
            for remedy in find_alternatives(one.prediction.job):
                output.print(f"  it would fit with {remedy.overrides} ({remedy.price})")
    return {
        "legal": False,
        "problems": [p.as_dict() for p in problems],
        "nearest_layouts": [one.as_dict() for one in near],
        "layouts": [summarize(one.prediction) for one in near],
    }


def _price(prediction: Prediction) -> str:
    return f"{format_seconds(prediction.step_s)} per step, {format_bytes(prediction.needed_bytes)} per device"


def _explain_legal(output: Output, job: Job, best: Prediction | None, pins: dict[str, Any]) -> dict[str, Any]:
    """Price the layout as it is written, and the best one that has its keys.

    Without a degree among the keys there is nothing to be explained but the latter.
    """
    full = _best_with(job, pins)
    if job.layout.mode == "auto":
        if full is None:
            raise search_error(job, pins, find_layouts(job, pins, 1))
        asked, words = full, "the best with " + _keys(pins)
    else:
        asked, words = predict(job, job.layout), "asked for"
    reasons = []
    if not asked.fits:
        reasons.append(asked.shortage)
        reasons += [f"it would fit with {r.overrides} ({r.price})" for r in find_alternatives(asked.job)]
    elif best is not None:
        reasons.append(_against(best, asked))
    if asked is not full:
        reasons += _filled_up(job, asked, full, best, pins)
    plan = plan_from(asked, [f"{describe_layout(asked.layout)}: {words}", *reasons])
    describe_plan(output, plan)
    differences: dict[str, float] = {}
    if best is not None:
        differences = part_differences(best, asked)
        _compare_table(output, best, asked)
    return {
        "legal": True,
        "problems": [],
        "against_best_s": differences,
        "best_with_degrees": None if full is None else summarize(full) | _slower(best, full),
        "layouts": [summarize_plan(plan)],
    }


def _against(best: Prediction, asked: Prediction) -> str:
    if asked.layout == best.layout:
        return "it is the best layout"
    verdict = compare(best, asked)
    devices = asked.layout.world_size, best.layout.world_size
    on = f", on {devices[0]} of {devices[1]} devices" if devices[0] != devices[1] else ""
    return f"against the best, {describe_layout(best.layout)}: {verdict}{on}"


def _best_with(job: Job, pins: Mapping[str, Any]) -> Prediction | None:
    """The best layout on all devices that has these keys; where none fits, that has their degrees.

    Data parallelism fills the devices that the other degrees leave, so its keys are let go last.
    """
    degrees = {key: value for key, value in pins.items() if key in DEGREES}
    unfilled = [{k: v for k, v in keys.items() if k not in DATA_KEYS} for keys in (pins, degrees)]
    open_ = dataclasses.replace(job, layout=Layout())
    tried: list[dict[str, Any]] = []
    # Without a degree nothing but the keys themselves is asked for.
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


def _filled_up(
    job: Job, asked: Prediction, full: Prediction | None, best: Prediction | None, pins: Mapping[str, Any]
) -> list[str]:
    """What the asked degrees could do with every device and the best settings."""
    devices, told = job.cluster.world_size, []
    if asked.layout.world_size < devices:
        told.append(f"it leaves {devices - asked.layout.world_size:,} of {devices:,} devices idle")
    if full is None:
        return [*told, f"no layout with {_keys(pins)} on all {devices:,} devices fits"]
    if full.layout == asked.layout:
        return told
    kept = _keys({key: value for key, value in pins.items() if getattr(full.layout, key) == value})
    slower = "" if best is None else f", {full.step_s / best.step_s - 1:+.1%} against the best"
    words = f"{describe_layout(full.layout)}, {_price(full)}{slower}"
    return [*told, f"the best with {kept} on all {devices:,} devices: {words}"]


def _slower(best: Prediction | None, full: Prediction) -> dict[str, Any]:
    return {"against_best": None if best is None else full.step_s / best.step_s - 1}


def _keys(pins: Mapping[str, Any]) -> str:
    """Keys in words, degrees first."""
    names = sorted(pins, key=lambda name: DEGREES.index(name) if name in DEGREES else len(DEGREES))
    return " ".join(f"{name}={str(pins[name]).lower()}" for name in names)


def _compare_table(output: Output, best: Prediction, asked: Prediction) -> None:
    rows = [
        (
            name,
            format_seconds(asked.time.parts.get(name, 0.0)),
            format_seconds(best.time.parts.get(name, 0.0)),
            f"{more:+.3g} s",
        )
        for name, more in sorted(part_differences(best, asked).items(), key=lambda item: -abs(item[1]))
    ]
    step, peak = asked.step_s - best.step_s, asked.needed_bytes - best.needed_bytes
    rows.append(("step", format_seconds(asked.step_s), format_seconds(best.step_s), f"{step:+.3g} s"))
    sign = "+" if peak >= 0 else "-"
    rows.append(
        (
            "memory",
            format_bytes(asked.needed_bytes),
            format_bytes(best.needed_bytes),
            f"{sign}{format_bytes(abs(peak))}",
        )
    )
    output.print()
    output.table("Against the best layout", ("", "asked", "best", "difference"), rows)

"""``meshwright plan --why``: one layout explained, legal or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cli.nearest import find_near
from meshwright.cli.output import Output
from meshwright.cli.plan_search import describe_prediction, is_estimated, search_progress
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.contract import Plan, build_plan
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.nearest import find_nearest
from meshwright.plan.search.neighbours import compare, part_differences
from meshwright.plan.search.predict import WALKED, Prediction, layout_words, predict_best, predict_layouts
from meshwright.plan.search.rescue import explain_failure, remedies_for_layout
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout
from meshwright.spec.legality import find_problems
from meshwright.spec.load import SpecError, load_job, read_tree
from meshwright.spec.model import DecoderModel

DATA_KEYS = ("dp_replicate", "dp_shard", "zero")
"""What is let go first where a layout is to fill all devices."""


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
    if not is_estimated(job):
        output.result(_explain_here(output, job, problems))
        return 0
    free = dataclasses.replace(job, layout=Layout())
    with search_progress(output) as progress:
        found = find_layouts(free, {}, WALKED, progress=progress)
    best = None if found.best is None else predict_best(free, found.best)
    if problems:
        told = _explain_illegal(output, job, problems)
    else:
        named = [text.partition("=")[0].removeprefix("layout.") for text in layout_keys]
        told = _explain_legal(output, job, best, _named_values(job, [*_in_file(source), *named]))
    output.result(found.counts() | {"layouts": told.pop("layouts"), "why": told | _best_of(best)})
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
    output.say(f"{job.name}: {layout_words(job.layout)} is not legal")
    for problem in problems:
        output.say(f"  {problem}")
    nearest = find_nearest(job, job.layout)
    layouts = []
    if nearest is not None:
        fits = "" if nearest.fits else f", which does not fit: {nearest.shortage}"
        output.say(f"nearest legal layout: {layout_words(nearest.layout)} ({_price(nearest)}{fits})")
        layouts = [nearest.summary()]
    if nearest is not None and not nearest.fits:
        fitting = find_nearest(job, job.layout, fitting=True)
        if fitting is None:
            output.say("no legal layout fits; plan without --why says what would help")
        else:
            output.say(f"nearest that fits: {layout_words(fitting.layout)} ({_price(fitting)})")
            layouts.append(fitting.summary())
    return {"legal": False, "problems": [p.as_dict() for p in problems], "layouts": layouts}


def _price(prediction: Prediction) -> str:
    return f"{format_seconds(prediction.step_s)} a step, {format_bytes(prediction.peak_bytes)} a device"


def _explain_legal(output: Output, job: Job, best: Prediction | None, pins: dict[str, Any]) -> dict[str, Any]:
    """Price the layout as it is written, and the best one that has its keys.

    Without a degree among the keys there is nothing to be explained but the latter.
    """
    full = _best_with(job, pins)
    if job.layout.mode == "auto":
        if full is None:
            raise explain_failure(job, pins, find_layouts(job, pins, 1))
        asked, words = full, "the best with " + _keys(pins)
    else:
        (asked,) = predict_layouts(job, [settle_micro_batch(job, job.layout)])
        words = "asked for"
    reasons = []
    if not asked.fits:
        room = format_bytes(job.cluster.memory_bytes)
        device = f" the {room} of a device" if asked.peak_bytes > job.cluster.memory_bytes else ""
        reasons.append(f"does not fit: {asked.shortage}{device}")
        reasons += [f"it would fit: {remedy}" for remedy in remedies_for_layout(job, asked.layout)]
    elif best is not None:
        reasons.append(_against(best, asked))
    if asked is not full:
        reasons += _filled_up(job, asked, full, best, pins)
    describe_prediction(output, asked, [f"{layout_words(asked.layout)}: {words}", *reasons])
    differences: dict[str, float] = {}
    if best is not None:
        differences = part_differences(best, asked)
        _compare_table(output, best, asked)
    return {
        "legal": True,
        "problems": [],
        "against_best_s": differences,
        "best_with_degrees": None if full is None else full.summary() | _slower(best, full),
        "layouts": [asked.summary(reasons, formulas=True)],
    }


def _against(best: Prediction, asked: Prediction) -> str:
    if asked.layout == best.layout:
        return "it is the best layout"
    verdict = compare(best, asked)
    devices = asked.layout.world_size, best.layout.world_size
    on = f", on {devices[0]} of {devices[1]} devices" if devices[0] != devices[1] else ""
    return f"against the best, {layout_words(best.layout)}: {verdict}{on}"


def _best_with(job: Job, pins: Mapping[str, Any]) -> Prediction | None:
    """The best layout on all devices that has these keys; where none fits, that has their degrees.

    Data parallelism fills the devices that the other degrees leave, so its keys are let go last. Offloading
    is tried where nothing fits without it.
    """
    degrees = {key: value for key, value in pins.items() if key in DEGREES}
    unfilled = [{k: v for k, v in keys.items() if k not in DATA_KEYS} for keys in (pins, degrees)]
    open_ = dataclasses.replace(job, layout=Layout())
    tried: list[dict[str, Any]] = []
    for pair in ([dict(pins), degrees], unfilled):
        here = [{"offload": "none", **keys} for keys in pair]
        for keys in [*here, *pair]:
            if keys in tried or not set(keys) & set(pins):
                continue
            tried.append(keys)
            found = find_layouts(open_, keys, WALKED, worlds=[job.cluster.world_size])
            if found.best is not None:
                return predict_best(open_, found.best)
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
    words = f"{layout_words(full.layout)}, {_price(full)}{slower}"
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


def _explain_here(output: Output, job: Job, problems: Sequence[Problem]) -> dict[str, Any]:
    """A layout on CPUs or on this machine, where ``plan`` ranks what runs: one process and replicas."""
    problems = [*problems, *([] if problems else find_problems(job))]
    if problems:
        output.say(f"{job.name}: {layout_words(job.layout)} cannot run here")
        for problem in problems:
            output.say(f"  {problem}")
        near = find_near(SpecError(job, *problems))
        for one in near:
            output.say(one.line)
        told: dict[str, Any] = {"legal": False, "problems": [p.as_dict() for p in problems]}
        told["nearest_layouts"] = [one.as_dict() for one in near]
        return _no_counts() | {"layouts": [], "why": told | {"best": None}}
    best, _ = build_plan(dataclasses.replace(job, layout=Layout()))
    asked, _ = build_plan(job)
    slower = asked.step_s / best.step_s - 1
    verdict = "it is the best layout" if asked.job.layout == best.job.layout else _here(asked, best, slower)
    output.say(f"{job.name}: {layout_words(asked.job.layout)}: asked for")
    output.say(f"  {verdict}")
    peak = format_bytes(max(rank.peak_bytes for rank in asked.ranks))
    output.say(f"  predicted step {format_seconds(asked.step_s)}, {peak} a device")
    parts = {n: s - best.breakdown_s.get(n, 0.0) for n, s in asked.breakdown_s.items()}
    told = {"legal": True, "problems": [], "against_best_s": parts, "best": best.summary()}
    return _no_counts() | {"layouts": [asked.summary()], "why": told}


def _here(asked: Plan, best: Plan, slower: float) -> str:
    verdict = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
    return f"against the best, {layout_words(best.job.layout)}, {format_seconds(best.step_s)}: {verdict}"


def _no_counts() -> dict[str, Any]:
    """Nothing was searched."""
    return {"evaluated": 0, "pruned": 0, "illegal": 0, "fit": 0, "search_s": 0.0}


def _best_of(best: Prediction | None) -> dict[str, Any]:
    return {"best": None if best is None else best.summary()}

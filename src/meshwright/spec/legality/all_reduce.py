"""Rules of the hierarchical all-reduce of gradients (``train.all_reduce``)."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule
from meshwright.spec.model import DecoderModel

PATH = "train.all_reduce"


def check_given(job: Job) -> Problem | None:
    """The search does not choose layouts with it."""
    if job.train.all_reduce == "backend" or job.layout.mode == "given":
        return None
    rule = "needs a given layout: the planner does not search with it"
    return _problem(job, "train-all-reduce-auto", rule, "Set layout.dp_replicate, too")


def check_axis(job: Job) -> Problem | None:
    """A gradient must be reduced over some axis."""
    layout = job.layout
    if job.train.all_reduce == "backend" or layout.mode == "auto":
        return None
    if layout.dp_replicate * layout.dp_shard * layout.cp > 1:
        return None
    rule = f"reduces gradients, and no axis of {layout.named_degrees()} reduces any"
    return _problem(job, "train-all-reduce-axis", rule, "Raise layout.dp_replicate, or leave it out")


def check_settings(job: Job) -> Problem | None:
    """It is a hook of DDP, in float32."""
    layout = job.layout
    if job.train.all_reduce == "backend":
        return None
    experts = bool(getattr(job.model, "num_experts", None))
    settings = {
        f"layout.zero={layout.zero}": layout.zero >= 2,
        f"layout.pp={layout.pp}": layout.pp > 1,
        f"layout.backup_replicas={layout.backup_replicas}": layout.backup_replicas > 0,
        "experts that have their own axes": experts and layout.ep * layout.etp * layout.tp > 1,
        f"compression.kind={job.compression.kind}": job.compression.kind != "none",
        "a ResNet": not isinstance(job.model, DecoderModel),
    }
    found = [name for name, is_set in settings.items() if is_set]
    if not found:
        return None
    rule = f"is a hook of DDP in float32 (ZeRO-0 and 1), and does not work with {found[0]}"
    return _problem(job, "train-all-reduce-not-built", rule, "Leave one of the two out")


def _problem(job: Job, code: str, rule: str, fix: str) -> Problem:
    return Problem(code, rule, path=PATH, value=job.train.all_reduce, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule("train-all-reduce-auto", '`all_reduce = "hierarchical"` needs a given layout.', check_given),
    Rule(
        "train-all-reduce-axis",
        '`all_reduce = "hierarchical"` needs an axis that reduces gradients.',
        check_axis,
    ),
    Rule(
        "train-all-reduce-not-built",
        '`all_reduce = "hierarchical"` with ZeRO-2 or 3, pipelines, expert axes, backup replicas, '
        "compression or a ResNet.",
        check_settings,
        built=False,
        planned=False,
    ),
)

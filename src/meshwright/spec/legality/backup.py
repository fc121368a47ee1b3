"""Rules of backup replicas (``layout.backup_replicas``)."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule
from meshwright.spec.model import DecoderModel

PATH = "layout.backup_replicas"
OTHER_AXES = ("pp", "dp_shard", "cp", "tp", "ep", "etp")


def check_given(job: Job) -> Problem | None:
    """The search does not choose layouts with backup replicas."""
    if not job.layout.backup_replicas or job.layout.mode == "given":
        return None
    fix = "Set layout.dp_replicate, too"
    return _problem(
        job, "layout-backup-auto", "needs a given layout: the planner does not search with it", fix
    )


def check_count(job: Job) -> Problem | None:
    """One replica at least must not be a backup."""
    layout = job.layout
    if not layout.backup_replicas or layout.mode == "auto" or layout.backup_replicas < layout.dp_replicate:
        return None
    rule = f"leaves no replica of layout.dp_replicate={layout.dp_replicate} that reads other samples"
    return _problem(job, "layout-backup-replicas", rule, "Use fewer, or a larger layout.dp_replicate")


def check_settings(job: Job) -> Problem | None:
    """Replicas of one rank each, without settings that need the gradient of each replica."""
    layout = job.layout
    if not layout.backup_replicas:
        return None
    axes = {f"layout.{name}={getattr(layout, name)}": getattr(layout, name) > 1 for name in OTHER_AXES}
    settings = {
        "a model with batch norm": not isinstance(job.model, DecoderModel),
        "experts": bool(getattr(job.model, "num_experts", None)),
        f"compression.kind={job.compression.kind}": job.compression.kind != "none",
        f"train.noise_scale_every={job.train.noise_scale_every}": bool(job.train.noise_scale_every),
        f"layout.offload={layout.offload}": layout.offload != "none",
    }
    found = [name for name, is_set in {**axes, **settings}.items() if is_set]
    if not found:
        return None
    rule = f"works with layout.dp_replicate and dense decoders only, not with {found[0]}"
    return _problem(job, "layout-backup-not-built", rule, "Leave one of the two out")


def _problem(job: Job, code: str, rule: str, fix: str) -> Problem:
    return Problem(code, rule, path=PATH, value=job.layout.backup_replicas, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule("layout-backup-auto", "`backup_replicas` needs a given layout.", check_given),
    Rule("layout-backup-replicas", "`backup_replicas` is less than `dp_replicate`.", check_count),
    Rule(
        "layout-backup-not-built",
        "`backup_replicas` with another axis than `dp_replicate`, experts, batch norm, compression, "
        "offloading or the noise scale.",
        check_settings,
        built=False,
        planned=False,
    ),
)

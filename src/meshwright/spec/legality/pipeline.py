"""Rules of pipeline parallelism (pp): stages, schedules and their micro-batches."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.legality.rule import Rule, needs_degree
from meshwright.spec.micro_batches import count_micro_batches, count_rank_samples
from meshwright.spec.model import DecoderModel


def check_layers(job: Job) -> Problem | None:
    """Every stage has at least one layer."""
    if not isinstance(job.model, DecoderModel):
        return None
    stages = job.layout.pp * job.layout.virtual_stages
    if stages <= job.model.num_layers:
        return None
    rule = f"times layout.virtual_stages={job.layout.virtual_stages} gives {stages} stages for "
    rule += f"model.num_layers={job.model.num_layers}; every stage has at least one layer"
    return Problem("layout-pp-layers", rule, path="layout.pp", value=job.layout.pp, fix="Use fewer stages")


def check_stage_layers(job: Job) -> Problem | None:
    """Every stage has its number of layers, and the numbers add up to the model's layers."""
    layout, model = job.layout, job.model
    counts = layout.stage_layers
    if counts is None:
        return None
    path, shown = "layout.stage_layers", list(counts)
    if layout.pp == 1:
        rule = "has no effect with layout.pp=1: only pipelines have stages"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix="Leave it out")
    if not isinstance(model, DecoderModel):
        return None  # layout-image-axes refuses it
    stages = layout.pp * layout.virtual_stages
    if layout.schedule_file is None and len(counts) != stages:
        rule = f"has {len(counts)} numbers; layout.pp={layout.pp} x layout.virtual_stages="
        rule += f"{layout.virtual_stages} are {stages} stages"
        fix = f"Give {stages} numbers, or leave it out: layers are then assigned by predicted cost"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix=fix)
    if sum(counts) != model.num_layers:
        rule = f"adds up to {sum(counts)}, not to model.num_layers={model.num_layers}"
        fix = f"Give numbers that add up to {model.num_layers}, or leave it out"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix=fix)
    return None


def check_interleaved(job: Job) -> Problem | None:
    """Interleaved 1F1B has several stages per rank and runs micro-batches in rounds of pp."""
    layout, batch = job.layout, job.train.global_batch
    if layout.schedule != "interleaved" or layout.pp == 1:
        return None
    code, path, value = "layout-interleaved", "layout.schedule", "interleaved"
    if layout.virtual_stages == 1:
        rule = "needs layout.virtual_stages above 1: with one stage per rank it is 1f1b"
        fix = "Set layout.virtual_stages=2, or layout.schedule=1f1b"
        return Problem(code, rule, path=path, value=value, fix=fix)
    count = count_micro_batches(job)
    if count % layout.pp == 0 or (layout.micro_batch is None and count >= layout.pp):
        return None
    rule = f"runs {count} micro-batches (train.global_batch={batch} over {layout.data_degree} data-parallel "
    rule += f"ranks, layout.micro_batch={layout.micro_batch or 1}) in rounds of layout.pp={layout.pp}, "
    rule += "which does not divide them"
    whole = -(-count // layout.pp) * layout.pp * (layout.micro_batch or 1) * layout.data_degree
    fix = f"Use layout.schedule=1f1b, or train.global_batch={whole}"
    return Problem(code, rule, path=path, value=value, fix=fix)


def check_virtual_stages(job: Job) -> Problem | None:
    """How many stages per rank a schedule has."""
    layout = job.layout
    schedule, stages = layout.schedule, layout.virtual_stages
    if layout.pp == 1 or schedule == "interleaved":
        return None
    code, path = "layout-virtual-stages", "layout.virtual_stages"
    if schedule in V_SCHEDULES and stages != 2:
        rule = f"is not 2: layout.schedule={schedule} is V-shaped, with two stages per rank"
        return Problem(code, rule, path=path, value=stages, fix="Use 2, or leave it out")
    if schedule not in V_SCHEDULES and stages > 1:
        rule = f"cannot be combined with layout.schedule={schedule}, which has one stage per rank"
        return Problem(code, rule, path=path, value=stages, fix="Set layout.schedule=interleaved")
    return None


def check_dualpipe(job: Job) -> Problem | None:
    """DualPipe-V needs enough micro-batches to fill both arms of its V."""
    layout, batch = job.layout, job.train.global_batch
    count, least = count_micro_batches(job), 2 * layout.pp
    if layout.schedule != "dualpipe-v" or layout.pp == 1 or count >= least:
        return None
    rule = f"needs 2 x layout.pp={layout.pp} micro-batches; a rank has {count} of "
    rule += f"train.global_batch={batch}"
    enough = least * (layout.micro_batch or 1) * layout.data_degree
    fix = f"Use layout.schedule=zbv, fewer stages, or train.global_batch={enough}"
    return Problem("layout-dualpipe", rule, path="layout.schedule", value="dualpipe-v", fix=fix)


def check_schedule_file(job: Job) -> Problem | None:
    """A schedule file replaces `schedule` and `virtual_stages`."""
    layout = job.layout
    if layout.schedule_file is None:
        return None
    code, path = "layout-schedule-file", "layout.schedule_file"
    if layout.pp == 1:
        rule, fix = "has no effect with layout.pp=1: there is no pipeline", "Leave it out"
        return Problem(code, rule, path=path, value=layout.schedule_file, fix=fix)
    if layout.schedule != "1f1b" or layout.virtual_stages != 1:
        key = "virtual_stages" if layout.schedule == "1f1b" else "schedule"
        rule = f"defines the order and the stages of every rank, and so does layout.{key}="
        rule += f"{getattr(layout, key)}"
        fix = f"Leave out layout.schedule_file or layout.{key}"
        return Problem(code, rule, path=path, value=layout.schedule_file, fix=fix)
    return None


def check_micro_batch(job: Job) -> Problem | None:
    """A micro-batch is at most the samples of one rank."""
    micro, batch = job.layout.micro_batch, job.train.global_batch
    samples = count_rank_samples(job)
    if micro is None or micro <= samples:
        return None
    rule = f"is more than the {samples} samples per rank of train.global_batch={batch}"
    fix = f"Use {samples} or less"
    return Problem("layout-micro-batch", rule, path="layout.micro_batch", value=micro, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "layout-interleaved",
        '`schedule = "interleaved"` needs `virtual_stages` > 1, and a multiple of `pp` micro-batches.',
        check_interleaved,
    ),
    Rule(
        "layout-virtual-stages",
        "`virtual_stages` is 1 for `gpipe`, `1f1b` and `zb-h1`, and 2 for `zbv` and `dualpipe-v`.",
        check_virtual_stages,
    ),
    Rule("layout-dualpipe", '`schedule = "dualpipe-v"` needs 2 x `pp` micro-batches.', check_dualpipe),
    needs_degree(
        "layout-schedule-pp",
        "layout.schedule",
        "1f1b",
        "layout.pp",
        "there is no pipeline",
        "A `schedule` other than `1f1b` needs `pp` > 1.",
    ),
    Rule("layout-pp-layers", "`pp` x `virtual_stages` is at most `model.num_layers`.", check_layers),
    Rule(
        "layout-stage-layers",
        "`stage_layers` has one number per stage (`pp` x `virtual_stages`); they add up to all layers.",
        check_stage_layers,
    ),
    Rule(
        "layout-schedule-file",
        "`schedule_file` needs `pp` > 1, and replaces `schedule` and `virtual_stages`.",
        check_schedule_file,
    ),
    needs_degree(
        "layout-virtual-stages-pp", "layout.virtual_stages", 1, "layout.pp", "only pipelines have stages"
    ),
    Rule("layout-micro-batch", "`micro_batch` is at most the samples per rank.", check_micro_batch),
)

"""``meshwright bench scaling``: the same job on 1 to N ranks, a few steps each, by the real launcher."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.audit.compare import audit_run
from meshwright.cli.app import require_packages
from meshwright.cli.data import prepare_data
from meshwright.cli.measure import MeasuredRun, describe_machine, measure_plan
from meshwright.cli.output import Output
from meshwright.cli.ranks import require_compiler, require_devices
from meshwright.cli.train import refuse_preset
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.core.units import format_count, format_plural, format_seconds
from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import build_plan
from meshwright.plan.contract import Plan
from meshwright.report.plot import Chart, draw_svg
from meshwright.report.scaling import FEWEST_STEPS, ScalingRow, basis, build_row, scaling_chart
from meshwright.report.text_plot import draw_text
from meshwright.spec.layout import DEGREES
from meshwright.spec.load import apply_override, load_job, read_tree


def bench_scaling(
    output: Output,
    source: str,
    overrides: list[str],
    ranks: str | None,
    steps: int,
    weak: bool,
    out: Path,
) -> int:
    """Measure every number of ranks, then show the table and the picture."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="bench scaling")
    refuse_preset(source)
    if steps < FEWEST_STEPS:
        rule = f"is too few: the first {FEWEST_STEPS - 3} are not counted, and 3 is the least for a median"
        fix = f"Use {FEWEST_STEPS} or more"
        raise UserError(Problem("bench-steps", rule, path="--steps", value=steps, fix=fix))
    _require_writable(out)
    _check_degrees(output, source, overrides)
    plans = plan_rows(source, overrides, ranks, steps, weak)
    data_dir = prepare_data(output, plans[0].job)
    prepare_environment(threads=1)
    rows: list[ScalingRow] = []
    measured = MeasuredRun()
    for plan in plans:
        measured = measure_row(output, plan, data_dir)
        verdict = audit_run(plan, measured.attempt.record)
        for difference in verdict.differences:
            output.warn(f"{plan.world_size} ranks: {difference} [audit-differs]")
        times: list[Any] = [measured.times[rank] for rank in range(plan.world_size)]
        tokens = measured.attempt.record.tokens_per_step
        rows.append(build_row(plan, times, tokens, verdict.ok, rows[0] if rows else None))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine(plans[0], measured.attempt)
    where = machine["processor"] if machine["device"] == "cpu" else machine["device_name"]
    chart = scaling_chart(rows, weak, note=f"{plans[0].job.name} on {where}, {date[:10]}")
    _show(output, plans, rows, steps, chart, out)
    output.result(
        {
            "rows": [row.as_dict() for row in rows],
            "weak": weak,
            "machine": machine,
            "date": date,
            "basis": basis(rows, steps),
            "plot": str(out),
        }
    )
    return 0


def plan_rows(source: str, overrides: list[str], ranks: str | None, steps: int, weak: bool) -> list[Plan]:
    """A plan for each number of ranks; nothing is started before all of them are legal."""
    given = ["layout.mode=given", f"train.steps={steps}"]
    alone = load_job(source, [*overrides, *given, "layout.dp_replicate=1"])
    require_compiler(alone)
    plans = []
    for number in chosen_ranks(ranks, alone.cluster.world_size):
        batch = alone.train.global_batch * (number if weak else 1)
        settled = [*given, f"layout.dp_replicate={number}", f"train.global_batch={batch}"]
        job = load_job(source, [*overrides, *settled])
        require_devices(job, number)
        plans.append(build_plan(job)[0])
    return plans


def chosen_ranks(text: str | None, devices: int) -> list[int]:
    """Those asked for; else powers of two up to the devices, and all of them."""
    if text is None:
        powers = [2**n for n in range(devices.bit_length()) if 2**n <= devices]
        return sorted({*powers, devices})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        rule = "is not a list of numbers of ranks, each 1 or more"
        raise UserError(Problem("bench-ranks", rule, path="--ranks", value=text, fix="Write, say, 1,2,4"))
    return sorted({int(part) for part in parts})


def _check_degrees(output: Output, source: str, overrides: list[str]) -> None:
    """The benchmark sets the number of replicas itself; other degrees would not be what is measured."""
    tree = read_tree(source)
    for text in overrides:
        apply_override(tree, text)  # what is wrong with one is said when the job is loaded
    layout = tree.get("layout")
    named = {key: layout[key] for key in DEGREES if key in layout} if isinstance(layout, dict) else {}
    replicas = named.pop("dp_replicate", 1)
    for key, value in named.items():
        if isinstance(value, int) and value > 1:
            rule = "cannot be measured: bench scaling changes the number of replicas, all else must be 1"
            fix = f"Leave layout.{key} out"
            raise UserError(Problem("bench-layout", rule, path=f"layout.{key}", value=value, fix=fix))
    if replicas != 1:
        output.warn(f"layout.dp_replicate={replicas} of the job is replaced by each number of ranks measured")


def _require_writable(out: Path) -> None:
    """Whether the picture can be written is known before minutes are spent on it."""
    if not can_write(out):
        rule = "cannot be written"
        raise UserError(Problem("bench-not-writable", rule, path=str(out), fix="Name another file with -o"))


def measure_row(output: Output, plan: Plan, data_dir: Path) -> MeasuredRun:
    """Run one number of ranks."""
    name = format_plural(plan.world_size, "rank")
    if not output.errors.is_terminal:
        output.errors.print(f"measuring {name}: {plan.job.train.steps} steps")
    with output.errors.status(f"{name}: starting") as status:
        return measure_plan(plan, data_dir, name, lambda text, steps: status.update(text))


def _show(
    output: Output, plans: list[Plan], rows: list[ScalingRow], steps: int, chart: Chart, out: Path
) -> None:
    unit = plans[0].job.unit
    columns = ("ranks", "batch", unit, "micro", "step", "predicted", unit + "/s", "speed-up", "efficiency")
    output.table("Scaling", (*columns, "audit"), [_cells(row) for row in rows])
    reduced = [_reduction_cells(row) for row in rows if row.overlap is not None]
    if reduced:  # a table of its own: together they would be wider than a terminal
        output.print()
        output.table("Reductions", ("ranks", "reduce", "exposed", "overlap", "spread"), reduced)
    if shared := [str(row.ranks) for row in rows if row.shared_cores]:
        cores = plans[0].job.cluster.world_size
        output.print(f"shared cores: {', '.join(shared)} ranks on {cores} cores, less than one each")
    output.print(basis(rows, steps))
    output.print()
    for line in draw_text(chart, columns=48):
        output.print(line)
    try:
        out.write_text(draw_svg(chart, 640, 400, standalone=True), encoding="utf-8")
    except OSError as error:
        output.warn(f"the picture was not written: {error}")
        return
    output.print(f"\npicture: {out}")


def _cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        str(row.ranks),
        str(row.global_batch),
        format_count(row.tokens_per_step),
        f"{row.micro_batches} x {row.micro_batch}",
        format_seconds(row.step_s),
        format_seconds(row.predicted_step_s),
        format_count(row.tokens_per_s),
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        "ok" if row.audit_ok else "differs",
    )


def _reduction_cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        str(row.ranks),
        format_seconds(row.communication_s),
        format_seconds(row.exposed_s),
        f"{row.overlap:.0%}",
        f"{row.overlap_low:.0%} to {row.overlap_high:.0%}",
    )

"""Checks of what a pipeline is made of: its stages' layers, a schedule of one's own, what it goes with."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def check_stage_layers(job: Job) -> Problem | None:
    """Every stage has its number, and all layers are dealt."""
    layout, model = job.layout, job.model
    counts = layout.stage_layers
    if counts is None:
        return None
    path, shown = "layout.stage_layers", list(counts)
    if layout.pp == 1:
        rule = "has no effect with layout.pp=1: only pipelines have stages"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix="Leave it out")
    if not isinstance(model, DecoderModel):
        return None  # refused as such
    stages = layout.pp * layout.virtual_stages
    if layout.schedule_file is None and len(counts) != stages:
        rule = f"has {len(counts)} numbers; layout.pp={layout.pp} x layout.virtual_stages="
        rule += f"{layout.virtual_stages} are {stages} stages"
        fix = f"Give {stages} numbers, or leave it out: layers are then dealt by cost"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix=fix)
    if sum(counts) != model.num_layers:
        rule = f"adds up to {sum(counts)}, and model.num_layers={model.num_layers}"
        fix = f"Give numbers that add up to {model.num_layers}, or leave it out"
        return Problem("layout-stage-layers", rule, path=path, value=shown, fix=fix)
    return None


def check_schedule_file(job: Job) -> Problem | None:
    """A schedule of one's own takes the place of a named one, in a pipeline."""
    layout = job.layout
    if layout.schedule_file is None:
        return None
    code, path = "layout-schedule-file", "layout.schedule_file"
    if layout.pp == 1:
        rule, fix = "has no effect with layout.pp=1: there is no pipeline", "Leave it out"
        return Problem(code, rule, path=path, value=layout.schedule_file, fix=fix)
    if layout.schedule != "1f1b" or layout.virtual_stages != 1:
        key = "virtual_stages" if layout.schedule == "1f1b" else "schedule"
        rule = f"says the order and the stages of every rank, and so does layout.{key}="
        rule += f"{getattr(layout, key)}"
        return Problem(code, rule, path=path, value=layout.schedule_file, fix=f"Leave out it or layout.{key}")
    return None

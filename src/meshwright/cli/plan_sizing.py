"""``meshwright plan --tokens --deadline``: how many devices, at what cost."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_seconds
from meshwright.layout.text import describe_layout
from meshwright.plan.search.failure import search_error
from meshwright.plan.search.find import find_layouts
from meshwright.plan.sizing import ClusterSize, Sizing, explain_size, format_cost, format_days, size_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def show_sizing(
    output: Output, job: Job, tokens: float, deadline_s: float, pins: dict[str, Any]
) -> tuple[Job, Sizing]:
    """Size the cluster; the job on the cluster that is the answer, or on the fastest one.

    Raises:
        UserError: It is no search for a decoder on GPUs, or no number of devices holds the model.
    """
    if not isinstance(job.model, DecoderModel) or job.cluster.device != "cuda" or job.layout.mode != "auto":
        rule = "sizes clusters of GPUs for decoders, with the layout left to the planner"
        fix = "Give a cluster, such as --on 8x8xh100-sxm, and leave the degrees of the layout out"
        raise UserError(Problem("plan-sizing-not-here", rule, path="--tokens", fix=fix))
    with output.errors.status("") as status:
        sizing = size_cluster(
            job, tokens, deadline_s, pins, lambda devices: status.update(f"trying {devices} devices")
        )
    if not sizing.tried:
        raise search_error(job, pins, find_layouts(job, pins, 1))
    kind = job.cluster.device_name or "device"
    for sentence in explain_size(sizing, kind):
        output.print(sentence)
    rows = [_row(size) for size in sizing.tried]
    columns = ("devices", "step", "MFU", "whole run", "lost", "cost", "best layout")
    output.print()
    output.table("Sizes tried", columns, rows, spare=("best layout", "lost"))
    output.print("assumed: " + "; ".join(sizing.assumptions))
    output.print()
    answer = (sizing.answer or sizing.fastest).prediction.job
    return dataclasses.replace(answer, layout=job.layout), sizing


def _row(size: ClusterSize) -> tuple[str, ...]:
    best = size.prediction
    return (
        str(size.devices),
        format_seconds(best.step_s),
        f"{best.mfu:.1%}",
        format_days(size.wall_s),
        f"{size.lost_share:.1%}",
        "unknown" if size.cost is None else format_cost(size.cost),
        describe_layout(best.layout),
    )

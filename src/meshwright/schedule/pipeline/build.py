"""Builds a pipeline schedule by name, after checking its sizes."""

from __future__ import annotations

from meshwright.core.errors import Problem, UserError
from meshwright.schedule.pipeline.actions import PipelineSchedule, loop_ranks, v_shaped_ranks
from meshwright.schedule.pipeline.dualpipe import order_dualpipe_v
from meshwright.schedule.pipeline.one_f_one_b import order_1f1b, order_gpipe, order_interleaved
from meshwright.schedule.pipeline.zero_bubble import order_zb_h1, order_zbv
from meshwright.spec.layout import SCHEDULES, V_SCHEDULES

SPLIT = ("zb-h1", *V_SCHEDULES)
"""Schedules with a split backward pass."""
MAX_ACTIONS = 4_000_000
"""Largest number of actions; more would take gigabytes."""


def build_schedule(
    name: str, pp: int, micro_batches: int, virtual_stages: int | None = None
) -> PipelineSchedule:
    """Generate a schedule.

    Args:
        name: As in ``layout.schedule``.
        pp: Ranks of the pipeline.
        micro_batches: Micro-batches of one step.
        virtual_stages: Stages per rank; if left out 2 for ``interleaved``, ``zbv`` and ``dualpipe-v``, else
            1.

    Raises:
        UserError: The schedule is unknown, or does not support these sizes.
    """
    _check_name(name)
    stages = _settle_virtual_stages(name, virtual_stages)
    _check_sizes(name, pp, micro_batches, stages)
    if name == "interleaved":
        rows = order_interleaved(pp, stages, micro_batches)
    else:
        orders = {
            "gpipe": order_gpipe,
            "1f1b": order_1f1b,
            "zb-h1": order_zb_h1,
            "zbv": order_zbv,
            "dualpipe-v": order_dualpipe_v,
        }
        rows = orders[name](pp, micro_batches)
    stage_ranks = v_shaped_ranks(pp) if name in V_SCHEDULES else loop_ranks(pp, stages)
    return PipelineSchedule(name, micro_batches, stage_ranks, rows, split_backward=name in SPLIT)


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        there = f"Use {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}"
        rule = "is not a pipeline schedule"
        raise UserError(Problem("schedule-unknown", rule, path="schedule", value=name, fix=there))


def _settle_virtual_stages(name: str, given: int | None) -> int:
    """The number of stages per rank, if the schedule supports it."""
    needed = None if name == "interleaved" else 2 if name in V_SCHEDULES else 1
    found = (needed or 2) if given is None else given
    problem = ""
    if needed is None and found < 2:
        problem, fix = "is too few: interleaving needs at least 2 stages per rank", "Use 2 or more, or 1f1b"
    elif needed is not None and found != needed:
        have = "two stages, in a V" if needed == 2 else "one stage"
        problem, fix = f"does not fit {name}: each rank has {have}", f"Use {needed}, or interleaved"
    if problem:
        raise UserError(
            Problem("schedule-virtual-stages", problem, path="virtual_stages", value=found, fix=fix)
        )
    return found


def _check_sizes(name: str, pp: int, micro_batches: int, virtual_stages: int) -> None:
    for key, value in (("stages", pp), ("micro_batches", micro_batches)):
        if value < 1:
            rule = "is too few: a pipeline has at least one"
            raise UserError(Problem("schedule-size", rule, path=key, value=value, fix="Use 1 or more"))
    count = pp * virtual_stages * micro_batches * (3 if name in SPLIT else 2)
    if count > MAX_ACTIONS:
        rule = f"makes {count:,} actions with stages={pp}; {MAX_ACTIONS:,} at most"
        fix = f"Use {max(1, micro_batches * MAX_ACTIONS // count)} or fewer"
        raise UserError(Problem("schedule-size", rule, path="micro_batches", value=micro_batches, fix=fix))
    if name == "dualpipe-v" and micro_batches < 2 * pp:
        rule = f"is too few: dualpipe-v needs 2 x stages={pp} micro-batches to fill both stages of all ranks"
        fix = f"Use {2 * pp} or more, or zbv"
        raise UserError(
            Problem("schedule-micro-batches", rule, path="micro_batches", value=micro_batches, fix=fix)
        )
    if name == "interleaved" and micro_batches % pp:
        below, above = micro_batches // pp * pp, -(-micro_batches // pp) * pp
        rule = f"is not a multiple of stages={pp}; interleaved runs groups of that many"
        fix = f"Use {below} or {above}" if below else f"Use {above}"
        raise UserError(
            Problem("schedule-micro-batches", rule, path="micro_batches", value=micro_batches, fix=fix)
        )

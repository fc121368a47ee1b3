"""Finds the cluster that trains on a number of tokens before a deadline or within a budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.core.errors import Problem, UserError
from meshwright.plan.search.failure import search_error
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.space import pinned_keys
from meshwright.plan.sizing import Goal, Sizing, explain_size, size_cluster, unmet_goal_error
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.simulate.run_length import simulate_run_length
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class SizedCluster:
    """The sizes that were tried, and the job on the cluster that was chosen."""

    sizing: Sizing
    job: LoadedJob
    """On the cluster that was chosen."""

    def __repr__(self) -> str:
        return f"SizedCluster({self.answer!r})"

    @property
    def answer(self) -> str:
        """The chosen cluster, its time and its cost as text."""
        return explain_size(self.sizing, self.job.spec.cluster.device_name or "device")


def size_job(job: LoadedJob, goal: Goal, reporter: Reporter) -> SizedCluster:
    """Try cluster sizes.

    Raises:
        UserError: The job is not a decoder on GPUs with an open layout, no cluster holds the model, or none
            meets the goal.
    """
    spec = job.spec
    if (
        not isinstance(spec.model, DecoderModel)
        or spec.cluster.device != "cuda"
        or spec.layout.mode != "auto"
    ):
        rule = "sizes clusters of GPUs for decoders; the layout must be left to the planner"
        fix = "Give a cluster, such as 8x8xh100-sxm, and no degrees of the layout"
        raise UserError(Problem("plan-sizing-not-here", rule, path="tokens", fix=fix, is_argument=True))
    if goal.max_cost is not None and spec.cluster.cost_per_hour is None:
        rule, fix = "needs the price of a device", "Set cluster.cost_per_hour, in USD"
        raise UserError(Problem("plan-no-price", rule, path="max_cost", fix=fix, is_argument=True))
    pins = pinned_keys(spec.layout, job.named_layout_keys())
    with reporter.activity("") as update:
        sizing = size_cluster(
            spec, goal, pins, simulate_run_length, lambda devices: update(f"trying {devices} devices")
        )
    if not sizing.tried:
        raise search_error(spec, pins, find_layouts(spec, pins, 1))
    if sizing.answer is None:
        raise unmet_goal_error(sizing, spec.cluster.device_name or "device")
    answer = sizing.answer.prediction.job
    return SizedCluster(
        sizing, dataclasses.replace(job, spec=dataclasses.replace(answer, layout=spec.layout))
    )

"""Finds the smallest cluster that trains on a number of tokens before a deadline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.core.errors import Problem, UserError
from meshwright.plan.search.failure import search_error
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.space import pinned_keys
from meshwright.plan.sizing import Sizing, size_cluster
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class SizedCluster:
    """The sizes that were tried, and the job on the cluster that was chosen."""

    sizing: Sizing
    job: LoadedJob
    """On the smallest cluster that meets the deadline, or on the fastest one."""


def size_job(job: LoadedJob, tokens: float, deadline_s: float, reporter: Reporter) -> SizedCluster:
    """Try cluster sizes.

    Raises:
        UserError: The job is not a decoder on GPUs with an open layout, or no cluster holds the model.
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
    pins = pinned_keys(spec.layout, job.named_layout_keys())
    with reporter.activity("") as update:
        sizing = size_cluster(
            spec, tokens, deadline_s, pins, lambda devices: update(f"trying {devices} devices")
        )
    if not sizing.tried:
        raise search_error(spec, pins, find_layouts(spec, pins, 1))
    answer = (sizing.answer or sizing.fastest).prediction.job
    return SizedCluster(
        sizing, dataclasses.replace(job, spec=dataclasses.replace(answer, layout=spec.layout))
    )

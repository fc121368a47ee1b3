"""The legality table: which settings can be combined, and why not.

Each module of this package has the rules of one axis or section. A rule with ``built=False`` describes a
valid combination that is not implemented yet: it can be planned, not run. The others can never run.
``nearest.py`` finds the nearest legal layout.
"""

from __future__ import annotations

import dataclasses

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import (
    all_reduce,
    backup,
    cluster,
    context,
    expert,
    images,
    model,
    pipeline,
    placement,
    sharding,
    stores,
    tensor,
    training,
)
from meshwright.spec.legality.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *model.RULES,
            *images.RULES,
            *tensor.RULES,
            *pipeline.RULES,
            *context.RULES,
            *expert.RULES,
            *sharding.RULES,
            *backup.RULES,
            *all_reduce.RULES,
            *placement.RULES,
            *training.RULES,
            *cluster.RULES,
            *stores.RULES,
        ),
        key=lambda rule: not rule.built,
    )
)
"""All rules: first combinations that can never run, then those that are not implemented yet."""
DEGREE_RULES = frozenset(
    f"layout-{what}"
    for what in (
        "accumulate-zero", "context-cp", "interleaved", "prefetch-zero", "schedule-pp",
        "sequence-parallel-tp", "virtual-stages", "virtual-stages-pp", "zero-unsharded",
    )
)  # fmt: skip
"""Rules of settings that need a parallel degree. They do not apply while the planner chooses degrees."""


def find_problems(job: Job, to_run: bool = True) -> list[Problem]:
    """The problems of a job, at most one per key: the first rule that it breaks.

    Args:
        job: The job.
        to_run: False for a job that is only planned. Combinations that are not implemented yet are then
            allowed.

    Settings whose degree the planner has still to choose are allowed.
    """
    searched = job.layout.mode == "auto"
    found: dict[str, Problem] = {}
    for rule in RULES:
        problem = rule.check(job) if rule.applies(to_run) else None
        if problem is not None and not (searched and problem.code in DEGREE_RULES):
            found.setdefault(problem.path, problem)
    return list(found.values())


def with_layout(job: Job, layout: Layout) -> Job:
    """The same job with another layout."""
    return dataclasses.replace(job, layout=layout)

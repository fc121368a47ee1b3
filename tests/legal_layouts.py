"""All legal layouts of a small job, for tests that hold in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "zero")


def list_legal_jobs(asked: Job, replicas: int = 2) -> Iterator[Job]:
    """The job, which has two layers, in all its legal layouts on at most 16 ranks, with degrees up to four.

    Args:
        asked: The job.
        replicas: Degree of ``dp_replicate`` besides 1.
    """
    for values in itertools.product((1, 2), (1, replicas), *[(1, 2, 4)] * 5, range(4)):
        degrees = dict(zip(NAMES, values, strict=True))
        layers = (1, 1) if degrees["pp"] > 1 else None
        layout = Layout(mode="given", micro_batch=1, stage_layers=layers, **degrees)
        ranks = layout.dp_shard * layout.cp * layout.tp
        job = with_layout(asked, layout)
        if layout.world_size <= 16 and ranks % (layout.ep * layout.etp) == 0 and not find_problems(job):
            yield job

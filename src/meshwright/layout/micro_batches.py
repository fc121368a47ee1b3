"""How many micro-batches a step has."""

from __future__ import annotations

from meshwright.spec.job import Job


def count_micro_batches(job: Job, samples: int) -> int:
    """Micro-batches of the fullest rank."""
    share = -(-samples // job.layout.data_degree)
    return -(-share // (job.layout.micro_batch or 1))

"""How many samples and micro-batches (gradient accumulation) a step has on one rank."""

from __future__ import annotations

from meshwright.spec.job import Job


def count_rank_samples(job: Job, samples: int | None = None) -> int:
    """Samples of the data-parallel rank that gets the most of them.

    Args:
        job: The job.
        samples: Samples of all ranks; those of a training step if left out.
    """
    return -(-(samples or job.train.global_batch) // job.layout.data_degree)


def count_micro_batches(job: Job, samples: int | None = None) -> int:
    """Micro-batches of that rank; a micro-batch size that is left out counts as 1."""
    return -(-count_rank_samples(job, samples) // (job.layout.micro_batch or 1))

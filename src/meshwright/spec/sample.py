"""What a job's samples are made of, in words; every report and page takes the name from here."""

from __future__ import annotations

from meshwright.spec.job import Job


def sample_unit(job: Job) -> str:
    """What the events' field ``tokens`` counts, as a plural noun."""
    del job  # every model reads text today
    return "tokens"

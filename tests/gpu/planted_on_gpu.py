"""Entries for ranks on GPUs that do something otherwise on purpose."""

from __future__ import annotations

import functools

from meshwright.run import worker


def through_gloo(run_dir, listener):
    """Ranks that may share a device: gloo carries what NCCL would refuse to."""
    worker.join_ranks = functools.partial(worker.join_ranks, backend="gloo")
    return worker.run_rank(run_dir, listener)

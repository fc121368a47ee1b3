"""Layouts for fewer devices than a job was planned for: after a loss, and in simulations of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.spec.job import Job
from meshwright.spec.layout import Layout


def list_fewer(most: int) -> tuple[int, ...]:
    """Numbers of devices, or of nodes, to plan a layout for if there are at most so many; largest first.

    Degrees of a layout multiply to the number of devices, and most of them are powers of two. So each number
    has more factors of two than all larger ones: of 7 the numbers 7, 6 and 4. Unused devices are idle.
    """
    found = []
    while most > 0:
        found.append(most)
        factors = (most & -most).bit_length()
        most = (most - 1) >> factors << factors
    return tuple(found)


def list_data_layouts(layout: Layout, devices: int, job: Job) -> Iterator[Layout]:
    """Layouts with other data-parallel degrees, those with most ranks first.

    ``pp``, ``cp`` and ``tp`` stay. ``ep``, which divides the data-parallel ranks, may become a divisor of
    itself. The micro-batch stays, or the planner chooses another one.

    Args:
        layout: Layout of the whole run.
        devices: Devices that are left.
        job: Job of the run.
    """
    for degree in range(min(devices // (layout.pp * layout.cp * layout.tp), job.train.global_batch), 0, -1):
        changed = _with_degree(layout, degree)
        yield changed
        if layout.micro_batch is not None:
            yield dataclasses.replace(changed, micro_batch=None)


def _with_degree(layout: Layout, degree: int) -> Layout:
    """The layout with another number of data-parallel ranks."""
    replicate, shard = degree, 1
    if layout.dp_shard > 1:
        replicate, shard = divmod(degree, layout.dp_shard)
        if shard != 0 or replicate == 0:  # no whole shard groups
            replicate, shard = 1, degree
        else:
            shard = layout.dp_shard
    slices = layout.dp_replicate - layout.backup_replicas
    backups = max(0, replicate - slices) if layout.backup_replicas else 0  # left out first
    changed = dataclasses.replace(
        layout, dp_replicate=replicate, dp_shard=shard, backup_replicas=min(layout.backup_replicas, backups)
    )
    if shard * layout.cp == 1:
        changed = dataclasses.replace(changed, zero=0, accumulate="sharded")
    room = shard * layout.cp * layout.tp
    ep = next(n for n in range(layout.ep, 0, -1) if layout.ep % n == 0 and room % (n * layout.etp) == 0)
    return dataclasses.replace(changed, ep=ep)

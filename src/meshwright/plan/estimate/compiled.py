"""The peak of compiled steps whose layers are not sharded (``plan.memory.compiled``), on columns.

The peak depends on the micro-batch, activation checkpointing and persistence of gradients alone. So each such
case is walked once for all layouts that share it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES, count_parameters, list_parameters, with_gradients
from meshwright.plan.estimate.grid import RECOMPUTES, Flags, Grid
from meshwright.plan.estimate.memory_snapshots import NOTHING, GridMemorySnapshot
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.memory.compiled import list_compiled_snapshots
from meshwright.plan.memory.snapshots import ALL_GRADS, PersistentGrads
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout, Recompute
from meshwright.spec.model import DecoderModel


def find_compiled_peak(job: Job, grid: Grid, unsharded: Flags, persistent: Flags) -> GridMemorySnapshot:
    """The peak of each layout that does not shard its layers.

    Args:
        job: With compiled blocks.
        grid: The layouts.
        unsharded: Which of them do not shard their layers.
        persistent: Where gradients live through the whole step.
    """
    held = np.zeros((3, len(grid)))
    cases = np.stack((grid.micro_batch, grid.recompute, persistent, may_keep_bf16_grads(grid)))
    found, indices = np.unique(cases[:, unsharded], axis=1, return_inverse=True)
    parts = [
        _find_peak(job, int(micro), int(recompute), bool(kept), bool(bf16_grads))
        for micro, recompute, kept, bf16_grads in found.T
    ]
    held[:, unsharded] = np.array(parts).T[:, indices.reshape(-1)]
    activations, temporary, gradients = held
    return GridMemorySnapshot(
        "peak of a compiled step",
        Sum((Term("saved by compiled blocks", (activations,)),)),
        NOTHING,
        Sum((Term("temporary buffers of a block or the loss", (temporary,)),)),
        NOTHING,
        gradients,
        unsharded,
    )


def may_keep_bf16_grads(grid: Grid) -> Flags:
    """Flags of layouts that may keep 16-bit gradients, if their micro-batch is the whole batch."""
    return np.asarray((grid.world_size == 1) & (grid.offload == 0))


@functools.lru_cache(maxsize=1024)
def _find_peak(
    job: Job, micro_batch: int, recompute: int, persistent: bool, bf16_grads: bool
) -> tuple[float, float, float]:
    """Activations and temporary bytes at the peak, and the fraction of the gradients that exists."""
    model = job.model
    assert isinstance(model, DecoderModel), "only decoders are compiled"
    layout = Layout("given", micro_batch=micro_batch, recompute=cast(Recompute, RECOMPUTES[recompute]))
    job = dataclasses.replace(job, layout=layout)
    if not bf16_grads:
        job = dataclasses.replace(job, train=dataclasses.replace(job.train, grad_dtype="fp32"))
    snapshots = list_compiled_snapshots(
        job,
        model,
        with_gradients(job, list_parameters(model)),
        micro_batch,
        ALL_GRADS if persistent else PersistentGrads(),
    )
    top = max(snapshots, key=lambda snapshot: snapshot.bytes)
    every = count_parameters(model) * FLOAT32_BYTES
    return float(top.activations), float(top.temporary), top.gradients / every

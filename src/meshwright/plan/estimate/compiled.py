"""Compiled steps of whole layers, as ``plan/memory/compiled.py`` lists them, on columns.

Of a step only micro-batch, recomputation and whether gradients live through it decide what its moments hold,
so each such case is listed once, and all layouts that have it get its fullest moment.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES, count_parameters, list_parameters, with_gradients
from meshwright.plan.estimate.grid import RECOMPUTES, Flags, Grid
from meshwright.plan.estimate.snapshots import NOTHING, GridSnapshot
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.memory.compiled import list_compiled_snapshots
from meshwright.plan.memory.snapshots import ALL_GRADS, PersistentGrads
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout, Recompute
from meshwright.spec.model import DecoderModel


def has_whole_layers(grid: Grid) -> Flags:
    """Which layouts have steps that are described here, if their job is compiled."""
    return np.asarray((grid.pp * grid.tp * grid.cp == 1) & (grid.zero < 2))


def find_compiled_peak(job: Job, grid: Grid, whole: Flags, sums: Flags) -> GridSnapshot:
    """The fullest moment of each layout with whole layers.

    Args:
        job: A compiled one.
        grid: The layouts.
        whole: Which of them are described here.
        sums: Where gradients live through the whole step.
    """
    held = np.zeros((3, len(grid)))
    cases = np.stack((grid.micro_batch, grid.recompute, sums, may_narrow(grid)))
    found, places = np.unique(cases[:, whole], axis=1, return_inverse=True)
    parts = [
        _fullest(job, int(micro), int(recompute), bool(kept), bool(narrow))
        for micro, recompute, kept, narrow in found.T
    ]
    held[:, whole] = np.array(parts).T[:, places.reshape(-1)]
    activations, temporary, gradients = held
    return GridSnapshot(
        "fullest of a compiled step",
        Sum((Term("kept by compiled blocks", (activations,)),)),
        NOTHING,
        Sum((Term("made by a block or the loss", (temporary,)),)),
        NOTHING,
        gradients,
        whole,
    )


def may_narrow(grid: Grid) -> Flags:
    """Which layouts may keep gradients in 16 bits, if their micro-batch is all of the batch."""
    return np.asarray((grid.world_size == 1) & (grid.offload == 0))


@functools.lru_cache(maxsize=1024)
def _fullest(
    job: Job, micro_batch: int, recompute: int, sums: bool, narrow: bool
) -> tuple[float, float, float]:
    """What is kept and what is made then, and the part of the gradients that exists."""
    model = job.model
    assert isinstance(model, DecoderModel), "decoders are compiled"
    layout = Layout("given", micro_batch=micro_batch, recompute=cast(Recompute, RECOMPUTES[recompute]))
    job = dataclasses.replace(job, layout=layout)
    if not narrow:
        job = dataclasses.replace(job, train=dataclasses.replace(job.train, grad_dtype="fp32"))
    snapshots = list_compiled_snapshots(
        job,
        model,
        with_gradients(job, list_parameters(model)),
        micro_batch,
        ALL_GRADS if sums else PersistentGrads(),
    )
    top = max(snapshots, key=lambda snapshot: snapshot.bytes)
    every = count_parameters(model) * FLOAT32_BYTES
    return float(top.activations), float(top.temporary), top.gradients / every

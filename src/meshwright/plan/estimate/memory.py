"""Memory of a rank, by class of pipeline stage, for every layout of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.moments import Job, Moment, list_moments, steady_buffers
from meshwright.plan.estimate.stages import CLASSES, Stage, split_stages
from meshwright.plan.estimate.state import state_lines
from meshwright.plan.estimate.weights import hold_weights
from meshwright.plan.estimate.workload import Workload

BESIDE = {
    "allocated": ("allocator", "context"),
    "reserved": ("context",),
    "device": (),
    "formula": ("allocator", "context", "buffers", "logits", "workspace", "gathered"),
}
"""Lines that a way of counting memory leaves out: what torch calls allocated, what it calls reserved, what
nvidia-smi shows, and what papers add up (state and activations)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank of each layout."""

    peak_bytes: Floats
    """What the device holds at the worst moment: allocated, kept by the allocator, and the context."""
    lines: dict[str, Floats]
    """The parts of it, of the fullest class of ranks; they add up to the peak."""
    classes: dict[str, Floats]
    """The peak of each class of pipeline ranks (first, middle, last); 0 where a layout has none."""
    between_bytes: Floats
    """State after the backward pass and before the optimizer's step, nothing gathered, on the fullest rank."""

    def fits(self, workload: Workload) -> Flags:
        """Which layouts stay within the device."""
        return np.asarray(self.peak_bytes <= workload.cluster.memory_bytes)

    def counted_as(self, kind: str) -> Floats:
        """The peak as `allocated`, `reserved`, `device` or `formula` counts it."""
        beside = (self.lines[name] for name in BESIDE[kind] if name in self.lines)
        return self.peak_bytes - sum(beside, np.zeros(len(self.peak_bytes)))


def estimate_memory(workload: Workload, grid: Grid) -> MemoryEstimate:
    """The fullest rank of each layout, line by line."""
    job = Job.of(workload, grid)
    stages = split_stages(workload.model, grid, workload.global_batch)
    ledgers = [_stage_lines(job, stage) for stage in stages if stage.exists.any()]
    totals = [sum(lines.values(), np.zeros(len(grid))) for lines in ledgers]
    found = [stage for stage in stages if stage.exists.any()]
    peaks = [np.where(stage.exists, total, 0.0) for stage, total in zip(found, totals, strict=True)]
    fullest = np.argmax(peaks, axis=0)
    lines = {name: np.choose(fullest, [ledger[name] for ledger in ledgers]) for name in ledgers[0]}
    classes = {name: np.zeros(len(grid)) for name in CLASSES}
    classes.update({stage.name: peak for stage, peak in zip(found, peaks, strict=True)})
    state = ("parameters", "gradients", "master weights", "optimizer")
    between = [sum((ledger[name] for name in state), np.zeros(len(grid))) for ledger in ledgers]
    return MemoryEstimate(
        peak_bytes=np.maximum.reduce(peaks),
        lines=lines,
        classes=classes,
        between_bytes=np.maximum.reduce(
            [np.where(s.exists, b, 0.0) for s, b in zip(found, between, strict=True)]
        ),
    )


def _stage_lines(job: Job, stage: Stage) -> dict[str, Floats]:
    """The lines of one class at its fullest moment."""
    workload, grid = job.workload, job.grid
    rules = workload.profile.memory
    held = hold_weights(workload.model, job.weights, grid, stage, rules.vocabulary_multiple)
    lines = state_lines(workload, grid, held, job.sharding)
    top = _fullest(list_moments(job, stage, held), lines["gradients"])
    lines["gradients"] = lines["gradients"] * top.gradients
    lines["activations"] = top.activations
    lines["logits"] = top.logits
    lines["workspace"] = top.workspace
    lines["gathered"] = top.gathered
    lines["buffers"] = steady_buffers(job, stage, held)
    allocated = sum(lines.values(), np.zeros(len(grid)))
    cuda = workload.cluster.device == "cuda"
    lines["allocator"] = allocated * (rules.reserve if cuda else 0.0)
    lines["context"] = np.full(len(grid), rules.context_bytes if cuda else 0.0)
    return lines


def _fullest(moments: list[Moment], gradients: Floats) -> Moment:
    """The largest of the moments, layout by layout."""
    if len(moments) == 1:
        return moments[0]
    sums = [np.where(m.possible, m.bytes + m.gradients * gradients, -1.0) for m in moments]
    which = np.argmax(sums, axis=0)

    def pick(name: str) -> Floats:
        columns = [np.broadcast_to(getattr(m, name), gradients.shape) for m in moments]
        return np.asarray(np.choose(which, columns))

    return Moment(pick("activations"), pick("logits"), pick("workspace"), pick("gathered"), pick("gradients"))

"""Chooses the layout: one process, or how many replicas; shards where no replica fits.

"One device is enough" is a valid answer.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from meshwright.core.errors import UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.comms import Traffic, predict_traffic
from meshwright.plan.compute import StepTime, estimate_step
from meshwright.plan.learning_rate import explain_lr
from meshwright.plan.ledger import Ledger, predict_ledger
from meshwright.plan.stage_times import split_layers
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import BATCH_NORM_NOTE, DecoderModel, ResNetModel
from meshwright.spec.numbers import divisors
from meshwright.spec.recipe import explain_defaults

USABLE_MEMORY = 0.92
"""Share of a device's memory that tensors may take: the rest is the framework's and the allocator's."""


@dataclass(frozen=True)
class Candidate:
    """One layout with everything that was predicted of it."""

    layout: Layout
    share: int
    """Samples of the fullest rank in one step."""
    micro_batches: int
    ledger: Ledger
    traffic: tuple[Traffic, ...]
    time: StepTime
    fits: bool

    @property
    def name(self) -> str:
        """How it is spoken of."""
        replicas, shards = self.layout.dp_replicate, self.layout.dp_shard
        split = f"{self.layout.tp} ranks a matrix" if self.layout.tp > 1 else ""
        if shards > 1:
            copies = f"{replicas} replicas of " if replicas > 1 else ""
            return f"{copies}{shards} shards (zero={self.layout.zero}){split and f', {split}'}"
        if replicas > 1:
            return f"{replicas} replicas{split and f', {split}'}"
        return split or "one process"


@dataclass(frozen=True)
class Search:
    """What was looked at and what was found, best first."""

    candidates: tuple[Candidate, ...]
    evaluated: int
    illegal: int
    """Layouts that a rule forbids, or that a given micro-batch rules out."""
    seconds: float

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Those whose predicted peak fits the device."""
        return tuple(c for c in self.candidates if c.fits)


def search_layouts(job: Job) -> Search:
    """Evaluate the given layout, or every number of replicas that the cluster holds.

    Raises:
        UserError: The rules forbid every one of them, now that its micro-batch is settled.
    """
    started = time.perf_counter()
    illegal = 0
    if job.layout.mode == "given":
        degrees = [job.layout.dp_replicate]
    else:
        degrees = list(range(1, min(job.cluster.world_size, job.train.global_batch) + 1))
        legal = [n for n in degrees if _can_deal(job, n)]
        illegal, degrees = len(degrees) - len(legal), legal
    evaluated = [
        evaluate(job, dataclasses.replace(job.layout, mode="given", dp_replicate=n)) for n in degrees
    ]
    # The job's rules were checked with the micro-batch left open; here it is settled.
    problems = [find_problems(with_layout(job, c.layout)) for c in evaluated]
    candidates = [c for c, found in zip(evaluated, problems, strict=True) if not found]
    if not candidates:
        raise UserError(*problems[0])
    illegal += len(evaluated) - len(candidates)
    if job.layout.mode == "auto" and not any(c.fits for c in candidates):
        candidates += _fitting_shards(job, degrees)
    candidates.sort(key=lambda c: (not c.fits, c.time.total_s))
    return Search(tuple(candidates), len(candidates), illegal, time.perf_counter() - started)


def _fitting_shards(job: Job, degrees: list[int]) -> list[Candidate]:
    """ZeRO-3 over as many ranks as there may be, where that fits; asked only if no replica does."""
    layouts = [
        dataclasses.replace(job.layout, mode="given", dp_replicate=1, dp_shard=n, zero=3)
        for n in degrees
        if n > 1
    ]
    legal = [layout for layout in layouts if not find_problems(with_layout(job, layout))]
    found = [evaluate(job, layout) for layout in legal]
    return [c for c in found if c.fits and not find_problems(with_layout(job, c.layout))]


def _can_deal(job: Job, ranks: int) -> bool:
    """Whether the micro-batch, where it is given, suits the share of a rank."""
    batch, micro = job.train.global_batch, job.layout.micro_batch or 1
    if isinstance(job.model, ResNetModel) and job.mixes_samples:  # nothing may be padded
        return batch % (ranks * micro) == 0 and batch // ranks >= job.model.least_micro_batch
    return micro <= -(-batch // ranks)


def evaluate(job: Job, layout: Layout) -> Candidate:
    """Memory, bytes and time of one layout; picks the micro-batch if it is left open."""
    share = -(-job.train.global_batch // layout.data_degree)
    usable = int(job.cluster.memory_bytes * USABLE_MEMORY)
    micro = layout.micro_batch or _largest_micro_batch(job, layout, share, usable)
    layout = dataclasses.replace(layout, micro_batch=micro)
    if layout.stage_layers is None:
        layout = dataclasses.replace(layout, stage_layers=split_layers(with_layout(job, layout)))
    placed = dataclasses.replace(job, layout=layout)
    micro_batches = -(-share // micro)
    ledger = predict_ledger(placed, micro, micro_batches)
    traffic = tuple(predict_traffic(placed))
    step = estimate_step(placed, micro_batches, ledger.touched_bytes, traffic)
    return Candidate(layout, share, micro_batches, ledger, traffic, step, ledger.first_peak_bytes <= usable)


def _largest_micro_batch(job: Job, layout: Layout, share: int, usable: int) -> int:
    """The largest that fits and leaves at least 2 x pp micro-batches, evened out; 1 if none does."""
    low, high = 1, -(-share // min(share, 2 * layout.pp))
    placed = dataclasses.replace(job, layout=layout)
    if isinstance(job.model, ResNetModel) and job.mixes_samples:
        return _largest_divisor(placed, job.model.least_micro_batch, high, share, usable)
    while low < high:
        middle = (low + high + 1) // 2
        if predict_ledger(placed, middle, -(-share // middle)).first_peak_bytes <= usable:
            low = middle
        else:
            high = middle - 1
    return -(-share // -(-share // low))


def _largest_divisor(job: Job, least: int, most: int, share: int, usable: int) -> int:
    """The same where nothing may be padded: the largest that fits of those that divide the share."""
    sizes = [d for d in divisors(share) if least <= d <= max(least, most)] or [share]
    for size in reversed(sizes):
        if predict_ledger(job, size, share // size).first_peak_bytes <= usable:
            return size
    return sizes[0]


def explain_choice(job: Job, search: Search) -> list[str]:
    """Why the best is best, in sentences."""
    best = search.candidates[0]
    if job.layout.mode == "given":
        reasons = [f"{best.name}: given in the job"]
    else:
        reasons = [f"{best.name}: the shortest predicted step of {search.evaluated} layouts"]
        if best.layout.dp_shard > 1:
            reasons[0] += "; the whole state on every rank does not fit"
    if best.layout.world_size == 1 and job.layout.mode == "auto" and job.cluster.world_size > 1:
        reasons[0] += "; one device is enough, communication would cost more than it gives"
    reasons += [_why_not(best, other) for other in search.candidates[1:4]]
    if job.layout.micro_batch is None:
        rule = "the largest that fits and leaves two micro-batches a stage"
        rule += " and divides a rank's share" if job.mixes_samples else ""
        reasons.append(f"micro_batch={best.layout.micro_batch}: {rule}")
    if job.mixes_samples:
        reasons.append(BATCH_NORM_NOTE)
    padding = best.layout.data_degree * best.micro_batches * (best.layout.micro_batch or 1)
    if padding > job.train.global_batch:
        empty = padding - job.train.global_batch
        reasons.append(
            f"{empty} of {padding} samples a step are zero-weight padding, so that all ranks run alike"
        )
    return reasons + explain_positions(job) + explain_lr(job.train) + explain_defaults(job.train)


def explain_positions(job: Job) -> list[str]:
    """A warning where sequences are longer than what a model with rotary positions was made for."""
    model, length = job.model, job.data.seq_len
    if not isinstance(model, DecoderModel) or model.max_positions is None or length <= model.max_positions:
        return []
    known = f"model.max_positions={model.max_positions}, the longest sequence that the model knows"
    unseen = "weights that were trained before have never seen the positions behind it"
    return [f"warning: data.seq_len={length} is more than {known}: {unseen}"]


def _why_not(best: Candidate, other: Candidate) -> str:
    if not other.fits:
        return f"not {other.name}: its peak of {format_bytes(other.ledger.first_peak_bytes)} does not fit"
    slower = other.time.total_s / best.time.total_s - 1
    return f"not {other.name}: {format_seconds(other.time.total_s)} a step, {slower:.0%} more"

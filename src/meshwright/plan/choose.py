"""Chooses the layout: one process, or how many replicas; shards where no replica fits.

"One device is enough" is a valid answer.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.errors import UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.axes import dense_shard_axis
from meshwright.plan.comms import Traffic, join_places, predict_traffic
from meshwright.plan.learning_rate import explain_lr
from meshwright.plan.ledger import Ledger, predict_ledger
from meshwright.plan.parts import read_schedule, schedule_of
from meshwright.plan.time.stages import part_costs, split_layers
from meshwright.plan.time.step import StepTime, predict_step
from meshwright.spec.compiled import explain_gradients
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import BATCH_NORM_NOTE, DecoderModel, ResNetModel
from meshwright.spec.numbers import divisors
from meshwright.spec.recipe import explain_defaults

USABLE_MEMORY = 0.92
"""Share of a device's memory that tensors may take: the rest is the framework's and the allocator's."""
MOST_LISTED = 12
"""Stages whose layers are listed one by one."""


@dataclass(frozen=True)
class Candidate:
    """One layout with everything that was predicted of it."""

    layout: Layout
    share: int
    """Samples of the fullest rank in one step."""
    micro_batches: int
    ledgers: tuple[Ledger, ...]
    """Of a rank at each place of the pipelines; one where there are none."""
    traffic: tuple[Traffic, ...]
    time: StepTime
    fits: bool

    @property
    def ledger(self) -> Ledger:
        """Of the fullest rank."""
        return max(self.ledgers, key=lambda ledger: ledger.first_peak_bytes)

    @property
    def name(self) -> str:
        """How it is spoken of."""
        layout, words = self.layout, []
        if layout.pp > 1:
            words.append(f"{len(layout.stage_layers or ())} stages ({_order(layout)}) on {layout.pp} ranks")
        replicas = f"{layout.dp_replicate} replicas" if layout.dp_replicate > 1 else ""
        shards = dense_shard_axis(layout).size
        if shards > 1:
            words.append(f"{replicas and f'{replicas} of '}{shards} shards (zero={layout.zero})")
        elif replicas:
            words.append(replicas)
        if layout.cp > 1:
            words.append(f"{layout.cp} ranks a sequence ({layout.context})")
        if layout.tp > 1:
            words.append(f"{layout.tp} ranks a matrix")
        if layout.ep > 1:
            words.append(f"experts over {layout.ep} ranks")
        if layout.etp > 1:
            words.append(f"{layout.etp} ranks an expert")
        return ", ".join(words) or "one process"


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
    settled = [
        settle_layout(job, dataclasses.replace(job.layout, mode="given", dp_replicate=n)) for n in degrees
    ]
    # The job's rules were checked with the micro-batch left open; here it is settled.
    problems = [find_problems(with_layout(job, layout)) for layout in settled]
    candidates = [evaluate(job, layout) for layout, found in zip(settled, problems, strict=True) if not found]
    if not candidates:
        raise UserError(*problems[0])
    illegal += len(settled) - len(candidates)
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
    settled = [settle_layout(job, layout) for layout in legal]
    found = [evaluate(job, layout) for layout in settled if not find_problems(with_layout(job, layout))]
    return [candidate for candidate in found if candidate.fits]


def _can_deal(job: Job, ranks: int) -> bool:
    """Whether the micro-batch, where it is given, suits the share of a rank."""
    batch, micro = job.train.global_batch, job.layout.micro_batch or 1
    if isinstance(job.model, ResNetModel) and job.mixes_samples:  # nothing may be padded
        return batch % (ranks * micro) == 0 and batch // ranks >= job.model.least_micro_batch
    return micro <= -(-batch // ranks)


def evaluate(job: Job, layout: Layout) -> Candidate:
    """Memory, bytes and time of one layout; what it leaves open is settled."""
    layout = settle_layout(job, layout)
    share, micro = _share(job, layout), layout.micro_batch or 1
    placed = dataclasses.replace(job, layout=layout)
    micro_batches = -(-share // micro)
    places = range(layout.pp)
    ledgers = tuple(predict_ledger(placed, micro, micro_batches, place) for place in places)
    traffic = tuple(join_places([predict_traffic(placed, place) for place in places]))
    step = predict_step(placed, micro_batches, sum(ledger.touched_bytes for ledger in ledgers), traffic)
    fits = max(ledger.first_peak_bytes for ledger in ledgers) <= _usable_bytes(job)
    return Candidate(layout, share, micro_batches, ledgers, traffic, step, fits)


def settle_layout(job: Job, layout: Layout) -> Layout:
    """The layout with what it leaves open: the micro-batch, then the layers of a pipeline's stages."""
    micro = layout.micro_batch or _largest_micro_batch(job, layout)
    return _with_micro_batch(job, layout, micro)


def _with_micro_batch(job: Job, layout: Layout, micro: int) -> Layout:
    layout = dataclasses.replace(layout, micro_batch=micro)
    if layout.schedule_file is not None:  # a file may be for another pipeline
        schedule_of(dataclasses.replace(job, layout=layout), -(-_share(job, layout) // micro))
    layers = layout.stage_layers or split_layers(dataclasses.replace(job, layout=layout))
    return dataclasses.replace(layout, stage_layers=layers)


def _share(job: Job, layout: Layout) -> int:
    """Samples of the fullest rank."""
    return -(-job.train.global_batch // layout.data_degree)


def _usable_bytes(job: Job) -> int:
    return int(job.cluster.memory_bytes * USABLE_MEMORY)


def _peak_bytes(job: Job, layout: Layout, micro: int) -> int:
    """Of the fullest rank with this micro-batch."""
    placed = dataclasses.replace(job, layout=_with_micro_batch(job, layout, micro))
    micro_batches = -(-_share(job, layout) // micro)
    ledgers = [predict_ledger(placed, micro, micro_batches, place) for place in range(layout.pp)]
    return max(ledger.first_peak_bytes for ledger in ledgers)


def _largest_micro_batch(job: Job, layout: Layout) -> int:
    """The largest that fits and leaves at least 2 x pp micro-batches, evened out; 1 if none does."""
    share, usable = _share(job, layout), _usable_bytes(job)
    if layout.pp > 1:
        sizes = _pipeline_sizes(layout, share)
        if len(sizes) == 1:  # perhaps one that the schedule does not take: the rules say so
            return sizes[0]
        fitting = bisect.bisect_right(sizes, usable, key=lambda micro: _peak_bytes(job, layout, micro))
        return sizes[max(fitting - 1, 0)]
    low, high = 1, -(-share // min(share, 2))
    if isinstance(job.model, ResNetModel) and job.mixes_samples:
        placed = dataclasses.replace(job, layout=layout)
        return _largest_divisor(placed, job.model.least_micro_batch, high, share, usable)
    while low < high:
        middle = (low + high + 1) // 2
        if _peak_bytes(job, layout, middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return -(-share // -(-share // low))


def _pipeline_sizes(layout: Layout, share: int) -> list[int]:
    """Micro-batches, smallest first, of which there are enough, and as many as the schedule takes.

    Where no number of them is enough, any that the schedule takes; where it takes none, 1.
    """
    counts = {-(-share // count): -(-share // -(-share // count)) for count in range(1, share + 1)}
    if layout.schedule_file is not None:
        wanted = read_schedule(layout.schedule_file).micro_batches
        return [size for size, count in counts.items() if count == wanted] or [1]
    rounds = layout.pp if layout.schedule == "interleaved" else 1
    taken = sorted(size for size, count in counts.items() if count % rounds == 0)
    enough = [size for size in taken if counts[size] >= 2 * layout.pp]
    return enough or taken[:1] or [1]


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
    reasons += explain_stages(job, best)
    if job.layout.micro_batch is None:
        rule = "the largest that fits and leaves two micro-batches a stage"
        if best.layout.schedule == "interleaved":
            rule += ", and a multiple of layout.pp of them"
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
    reasons += explain_gradients(with_layout(job, best.layout))
    return reasons + explain_positions(job) + explain_lr(job.train) + explain_defaults(job.train)


def explain_stages(job: Job, candidate: Candidate) -> list[str]:
    """Why a pipeline's stages have the layers that they have, and how long its ranks are planned to wait."""
    layout, planned = candidate.layout, candidate.time.pipeline
    if planned is None:
        return []
    layers = _list_layers(layout.stage_layers or ())
    if job.layout.stage_layers is not None:
        why = "given in the job"
    else:
        costs = part_costs(dataclasses.replace(job, layout=layout))
        head, embedding = costs.head_blocks, costs.embedding_blocks
        why = f"the head costs as much as {head:.1f} layers"
        why += f", the embedding as {embedding:.1f}" if embedding >= 0.1 else ""
    count = candidate.micro_batches
    return [
        f"stages of {layers} layers: {why}",
        f"bubble {planned.bubble:.1%} of the ranks' time, planned: {_order(layout)}, {count} micro-batches",
    ]


def _order(layout: Layout) -> str:
    """What a pipeline's schedule is called."""
    return layout.schedule_file or layout.schedule


def _list_layers(counts: Sequence[int]) -> str:
    """The layers of each stage; runs of equal ones together where there are many."""
    if len(counts) <= MOST_LISTED:
        return ", ".join(map(str, counts))
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" for count, times in runs)


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

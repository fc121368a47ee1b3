"""The prediction of one layout: memory of every pipeline rank, collectives, step time.

Where this version trains the layout, memory and collectives are exact: a run is audited against them. For
plan-only jobs (a model that is not implemented, another framework) memory is estimated
(``estimate.memory_report``), and the prediction is marked as not exact.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.flops import flops_per_token, peak_rate
from meshwright.layout.optimizer_offload import offloaded_state
from meshwright.layout.pipeline_schedules import read_schedule, schedule_of
from meshwright.layout.placement import RANK_ORDER, Slots, given_slots
from meshwright.plan.contract import CollectiveTraffic, name_classes
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.memory_report import estimate_ledgers
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.fit import MemoryNeed, usable_bytes
from meshwright.plan.memory.ledger import Ledger, predict_ledger
from meshwright.plan.time.interval import Interval, step_interval
from meshwright.plan.time.stages import split_layers
from meshwright.plan.time.step import StepTime, predict_step
from meshwright.plan.traffic.predict import merge_pp_ranks, predict_traffic
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.spec.numbers import divisors


@dataclass(frozen=True)
class Memory:
    """Memory of a layout's ranks."""

    ledgers: tuple[Ledger, ...]
    """One per pp rank: its data-parallel rank with the largest shards; if estimated, one per rank class."""
    needs: tuple[MemoryNeed, ...]
    """Needs of the same ranks."""
    cpu_bytes: int = 0
    """CPU memory that a rank keeps offloaded state in."""

    @property
    def need(self) -> MemoryNeed:
        """The need of the rank that needs most."""
        return max(self.needs, key=lambda need: need.needed_bytes)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the same rank."""
        return self.ledgers[self.needs.index(self.need)]


@dataclass(frozen=True)
class Prediction:
    """One layout with its predicted memory, collectives and time."""

    job: Job
    """With this layout, complete."""
    micro_batches: int
    """Per step, on the rank with most samples."""
    memory: Memory
    traffic: tuple[CollectiveTraffic, ...]
    """Collectives of every rank; rows of one pipeline rank carry ``pp_rank``. Empty for other runtimes."""
    time: StepTime
    exact: bool
    """Whether this version trains the layout: a run is audited against memory and collectives."""
    placement: Slots = RANK_ORDER
    """The slot of each rank; empty: in rank order."""
    placement_reason: str = ""
    """Why ranks are placed so; empty on one node."""

    def __repr__(self) -> str:
        degrees = self.layout.named_degrees() or "one rank"
        return f"Prediction({degrees}, step_s={self.step_s:.4g}, needed_bytes={self.needed_bytes})"

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.job.layout

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.total_s

    @property
    def need(self) -> MemoryNeed:
        """The memory need of the rank that needs most memory."""
        return self.memory.need

    @property
    def needed_bytes(self) -> int:
        """Device memory of that rank, allocator and context included."""
        return self.need.needed_bytes

    @property
    def ledger(self) -> Ledger:
        """The ledger of the rank that needs most memory."""
        return self.memory.ledger

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return does_fit(self.job, self.memory)

    @property
    def shortage(self) -> str:
        """Why it does not fit: which peak exceeds the memory, and by how much."""
        return f"does not fit: {'; '.join(list_shortages(self.job, self.memory))}"

    @property
    def step_and_memory(self) -> str:
        """Step time and memory as text."""
        return format_step_and_memory(self.step_s, self.needed_bytes)

    @property
    def classes(self) -> dict[str, int]:
        """Classes of ranks with equal memory, by name, and their index in the ledgers."""
        return name_classes(self.job, self.exact, len(self.memory.ledgers))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks; images for a ResNet."""
        return self.job.train.global_batch * self.job.data.seq_len / self.step_s

    @cached_property
    def interval(self) -> Interval:
        """Factors between which the measured step is expected, and their basis."""
        return step_interval(self.job)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: share of the peak rate, without recomputed FLOPs."""
        flops = flops_per_token(self.job.model, self.job.data.seq_len)
        rate, _ = peak_rate(self.job.cluster, self.job.train.precision)
        return self.tokens_per_s * flops / self.layout.world_size / rate


def format_step_and_memory(step_s: float, needed_bytes: int) -> str:
    """Step time and memory of a layout as text."""
    return f"{format_seconds(step_s)}/step, {format_bytes(needed_bytes)} per rank"


def is_exact(job: Job) -> bool:
    """Whether this version trains the job, so that its memory is exact."""
    return not find_problems(job)


def predict(job: Job, layout: Layout) -> Prediction:
    """Memory, collectives and time of one layout, which is completed first."""
    settled = with_layout(job, complete_layout(job, layout))
    exact = is_exact(settled)
    return predict_with_memory(settled, predict_memory(settled, exact), exact)


def predict_with_memory(settled: Job, memory: Memory, exact: bool) -> Prediction:
    """The prediction of a job with a complete layout and known memory."""
    micro_batches = count_micro_batches(settled)
    traffic: tuple[CollectiveTraffic, ...] = ()
    if settled.train.runtime == "meshwright":  # for plan-only models: what they would send
        rows = [predict_traffic(settled, pp_rank) for pp_rank in range(settled.layout.pp)]
        traffic = tuple(merge_pp_ranks(rows))
    touched = sum(ledger.touched_bytes for ledger in memory.ledgers)
    slots = given_slots(settled.layout)
    time = predict_step(settled, micro_batches, touched, traffic, slots)
    return Prediction(settled, micro_batches, memory, traffic, time, exact, slots)


def place_ranks(prediction: Prediction, slots: Slots, reason: str) -> Prediction:
    """The prediction with placed ranks: another step time, if axes cross other links."""
    touched = sum(ledger.touched_bytes for ledger in prediction.memory.ledgers)
    time = prediction.time
    if slots != prediction.placement:
        time = predict_step(prediction.job, prediction.micro_batches, touched, prediction.traffic, slots)
    return dataclasses.replace(prediction, time=time, placement=slots, placement_reason=reason)


def predict_memory(job: Job, exact: bool) -> Memory:
    """Memory of every pipeline rank of a job with a complete layout; if not exact, of each class of them."""
    micro, micro_batches = job.layout.micro_batch or 1, count_micro_batches(job)
    if not exact:
        return _estimate_memory(job)
    ledgers = tuple(predict_ledger(job, micro, micro_batches, rank) for rank in range(job.layout.pp))
    needs = tuple(_need_of(job, ledger) for ledger in ledgers)
    cpu_bytes = max(sum(offloaded_state(job, ledger.state_bytes).values()) for ledger in ledgers)
    return Memory(ledgers, needs, cpu_bytes if job.cluster.device == "cuda" else 0)


def _need_of(job: Job, ledger: Ledger) -> MemoryNeed:
    return MemoryNeed.of(job, ledger.peak_bytes, ledger.first_peak_bytes)


def needed_at_ends(job: Job) -> int:
    """Memory of the first and the last pipeline rank; quicker than that of all."""
    micro, micro_batches = job.layout.micro_batch or 1, count_micro_batches(job)
    ranks = {0, job.layout.pp - 1}
    needs = [_need_of(job, predict_ledger(job, micro, micro_batches, rank)) for rank in ranks]
    return max(need.needed_bytes for need in needs)


def _estimate_memory(job: Job) -> Memory:
    workload, grid = Workload.of(job), Grid.of([job.layout])
    ledgers = tuple(estimate_ledgers(workload, job.layout))
    needs = tuple(_need_of(job, ledger) for ledger in ledgers)
    cpu_bytes = int(estimate_memory(workload, grid).cpu_bytes[0])
    return Memory(ledgers, needs, cpu_bytes)


def does_fit(job: Job, memory: Memory, room_bytes: int | None = None) -> bool:
    """Whether the ranks fit their devices, and offloaded state the CPU memory.

    Args:
        job: For its cluster.
        memory: Memory of a layout.
        room_bytes: Memory that a rank may need; the usable memory of a device by default.
    """
    room = usable_bytes(job.cluster) if room_bytes is None else room_bytes
    fits_cpu_memory = memory.cpu_bytes <= (job.cluster.host_memory_bytes or memory.cpu_bytes)
    return memory.need.needed_bytes <= room and fits_cpu_memory


def list_shortages(job: Job, memory: Memory) -> list[str]:
    """Missing device memory, with the peak that exceeds it, and missing CPU memory for offloaded state."""
    need, cluster, found = memory.need, job.cluster, []
    over = need.needed_bytes - usable_bytes(cluster)
    if over > 0:
        needed = f"needs {format_bytes(need.needed_bytes)}, {format_bytes(over)} more than usable"
        found.append(f"{need.limited_by} {needed}")
    room = cluster.host_memory_bytes
    if room and memory.cpu_bytes > room:
        more = f"{format_bytes(memory.cpu_bytes - room)} more than cluster.host_memory_bytes"
        found.append(f"offloaded state needs {format_bytes(memory.cpu_bytes)} of CPU memory, {more}")
    return found


def samples_per_rank(job: Job, layout: Layout) -> int:
    """Samples per step on the rank with most of them."""
    return -(-job.train.global_batch // layout.data_degree)


def complete_layout(job: Job, layout: Layout) -> Layout:
    """The layout with its open keys chosen: the micro-batch, then the layers of each pipeline stage."""
    micro = layout.micro_batch or _largest_micro_batch(job, layout)
    return _with_micro_batch(job, layout, micro)


def _with_micro_batch(job: Job, layout: Layout, micro: int) -> Layout:
    layout = dataclasses.replace(layout, micro_batch=micro)
    if layout.schedule_file is not None:  # a file may be for another pipeline
        schedule_of(with_layout(job, layout), -(-samples_per_rank(job, layout) // micro))
    layers = layout.stage_layers or split_layers(with_layout(job, layout))
    return dataclasses.replace(layout, stage_layers=layers)


def _needed_bytes(job: Job, layout: Layout, micro: int, exact: bool) -> int:
    """Memory of the rank that needs most with this micro-batch."""
    settled = with_layout(job, _with_micro_batch(job, layout, micro))
    return predict_memory(settled, exact).need.needed_bytes


def _largest_micro_batch(job: Job, layout: Layout) -> int:
    """The largest size that fits with at least 2 x pp micro-batches; the smallest if none does."""
    share = samples_per_rank(job, layout)
    sizes = _micro_batch_sizes(job, layout, share)
    if len(sizes) == 1:  # the schedule may not allow it: the legality rules report that
        return sizes[0]
    exact = is_exact(with_layout(job, dataclasses.replace(layout, micro_batch=sizes[0])))
    usable = usable_bytes(job.cluster)
    fitting = bisect.bisect_right(sizes, usable, key=lambda micro: _needed_bytes(job, layout, micro, exact))
    return sizes[max(fitting - 1, 0)]


def _micro_batch_sizes(job: Job, layout: Layout, share: int) -> Sequence[int]:
    """Possible sizes, smallest first."""
    if isinstance(job.model, ResNetModel) and job.mixes_samples:
        least, most = job.model.least_micro_batch, -(-share // min(share, 2))
        return [d for d in divisors(share) if least <= d <= max(least, most)] or [share]
    if layout.pp > 1:
        return _pipeline_sizes(layout, share)
    return sorted({-(-share // count) for count in range(min(share, 2), share + 1)})


def _pipeline_sizes(layout: Layout, share: int) -> list[int]:
    """Sizes, smallest first, with at least 2 x pp micro-batches and a number that the schedule allows.

    If there are none, the smallest size that the schedule allows, else 1.
    """
    counts = {-(-share // count): -(-share // -(-share // count)) for count in range(1, share + 1)}
    if layout.schedule_file is not None:
        wanted = read_schedule(layout.schedule_file).micro_batches
        return [size for size, count in counts.items() if count == wanted] or [1]
    rounds = layout.pp if layout.schedule == "interleaved" else 1
    taken = sorted(size for size, count in counts.items() if count % rounds == 0)
    enough = [size for size in taken if counts[size] >= 2 * layout.pp]
    return enough or taken[:1] or [1]


def require_decoder(job: Job) -> DecoderModel:
    """The job's model, which must be a decoder."""
    assert isinstance(job.model, DecoderModel), "layouts are searched for decoders"
    return job.model

"""All that is predicted of single layouts: memory by lines, the step by parts, walked, and its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.core.units import format_bytes
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory, ledger_stages
from meshwright.plan.estimate.memory_report import ClassLedger, explain_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.find import Ranked
from meshwright.plan.search.traffic import Moved, list_traffic
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.flops import flops_per_token, peak_rate
from meshwright.plan.time.interval import Interval, step_interval
from meshwright.plan.time.pipeline import walk_pipeline
from meshwright.plan.time.step import predict_layout, predict_step
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, Layout

EVERY_RANK = "every rank"
WALKED = 50
"""Layouts whose schedules are walked before the first of them is called the best."""
CLOSED_FORM_ERROR = 0.01
"""Twice what tests allow closed forms to differ from walked schedules."""


@dataclass(frozen=True)
class Prediction:
    """One layout with all that is known of it."""

    job: Job
    """With this layout."""
    peak_bytes: float
    """Of the fullest rank."""
    classes: dict[str, dict[str, float]]
    """Lines of each class of pipeline ranks, `first`, `middle`, `last`; without a pipeline of every rank."""
    host_bytes: float
    """What a rank keeps in its host's memory."""
    fits: bool
    step_s: float
    breakdown_s: dict[str, float]
    """Parts that add up to the step, without those that are nothing."""
    hidden_s: dict[str, float]
    walked: bool
    """Whether the pipeline's schedule was generated and walked; else its closed form stands."""

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.job.layout

    @cached_property
    def workload(self) -> Workload:
        """What the formulas read."""
        return Workload.of(self.job)

    @cached_property
    def traffic(self) -> list[Moved]:
        """What one rank moves."""
        return list_traffic(self.workload, self.layout)

    def job_to_plan(self) -> Job:
        """The job with its layout open again."""
        return dataclasses.replace(self.job, layout=Layout())

    @cached_property
    def peaks(self) -> dict[str, float]:
        """Bytes of each class of ranks at its worst moment."""
        return {name: sum(lines.values()) for name, lines in self.classes.items()}

    @property
    def fullest(self) -> str:
        """The class whose ranks hold most."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def lines(self) -> dict[str, float]:
        """What the fullest ranks hold."""
        return self.classes[self.fullest]

    @cached_property
    def ledger(self) -> ClassLedger:
        """The fullest ranks' lines with their formulas, and their peaks at named times."""
        classes = explain_memory(self.workload, self.layout)
        return max(classes, key=lambda found: found.peak_bytes)

    @property
    def shortage(self) -> str:
        """What is missing where it does not fit: bytes over the device, or over its share of the host."""
        cluster = self.job.cluster
        over = self.peak_bytes - cluster.memory_bytes
        if over > 0 or not cluster.host_memory_bytes:
            return f"{format_bytes(over)} over"
        more, room = self.host_bytes - cluster.host_memory_bytes, format_bytes(cluster.host_memory_bytes)
        return f"{format_bytes(more)} over the {room} of host memory that a device has"

    @cached_property
    def interval(self) -> Interval:
        """Factors between which the measured step is expected, and what that rests on."""
        return step_interval(self.job)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Where the step time is expected to lie."""
        return self.step_s * self.interval.low, self.step_s * self.interval.high

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.job.train.global_batch * self.job.data.seq_len / self.step_s

    @property
    def mfu(self) -> float:
        """Share of the peak rate, by the FLOPs that the definition counts."""
        rate = peak_rate(self.job.cluster, self.job.train.precision)[0]
        flops = flops_per_token(self.workload.model, self.job.data.seq_len)
        return self.tokens_per_s * flops / self.layout.world_size / rate

    def summary(self, reasons: Sequence[str] = (), formulas: bool = False) -> dict[str, Any]:
        """The layout for ``--json``; ``formulas`` of the fullest ranks' lines take a few milliseconds."""
        low, high = self.interval_s
        memory: dict[str, Any] = {
            name: {
                "peak": round(sum(lines.values())),
                "lines": [{"name": line, "bytes": round(count)} for line, count in lines.items()],
            }
            for name, lines in self.classes.items()
        }
        if formulas:
            ledger = self.ledger
            memory[self.fullest] |= {
                "peak_at": ledger.fullest_at,
                "peaks": ledger.peaks,
                "lines": [dataclasses.asdict(line) for line in ledger.lines],
            }
        return {
            "layout": {k: v for k, v in dataclasses.asdict(self.layout).items() if v is not None},
            "step_s": self.step_s,
            "step_s_low": low,
            "step_s_high": high,
            "tokens_per_s_per_device": self.tokens_per_s / self.layout.world_size,
            "mfu": self.mfu,
            "memory_bytes": memory,
            "breakdown_s": self.breakdown_s,
            "collectives": [row.as_dict() for row in self.traffic],
            "reasons": list(reasons),
            "fits": self.fits,
            "interval_basis": self.interval.basis,
            "walked": self.walked,
        }


def predict_layouts(job: Job, layouts: Sequence[Layout], walk: bool = True) -> list[Prediction]:
    """Predict layouts whose micro-batch is settled; ``walk`` replaces closed forms by walked schedules."""
    if not layouts:
        return []
    workload, grid = Workload.of(job), Grid.of(layouts)
    memory, step = estimate_memory(workload, grid), estimate_step(workload, grid)
    stages = ledger_stages(workload, grid)
    fits = memory.fits(workload)
    micro_batches = grid.micro_batches(workload.global_batch)
    found = []
    for place, layout in enumerate(layouts):
        placed = dataclasses.replace(job, layout=layout)
        time = predict_layout(placed, int(micro_batches[place]), step, place, walk)
        classes = {
            ledger.stage.name: {k: float(v[place]) for k, v in ledger.lines.items() if v[place] > 0}
            for ledger in stages
            if ledger.stage.exists[place]
        }
        found.append(
            Prediction(
                job=placed,
                peak_bytes=float(memory.peak_bytes[place]),
                classes=classes if layout.pp > 1 else {EVERY_RANK: classes["first"]},
                host_bytes=float(memory.host_bytes[place]),
                fits=bool(fits[place]),
                step_s=time.total_s,
                breakdown_s=time.parts,
                hidden_s=time.hidden,
                walked=time.pipeline is not None,
            )
        )
    return found


def predict_best(job: Job, best: Ranked) -> Prediction:
    """The best of a ranking by time, walked as those are that closed forms cannot tell from it."""
    near = np.flatnonzero(best.step_s <= best.step_s[0] * (1 + CLOSED_FORM_ERROR))
    return min(predict_layouts(job, [best.grid.layout(int(place)) for place in near]), key=lambda p: p.step_s)


def walk_passes(prediction: Prediction) -> list[list[tuple[str, float, float]]]:
    """Kind (`F`, `B`, `W`), start and end of each rank's passes in seconds; none without a pipeline."""
    layout, workload = prediction.layout, prediction.workload
    if layout.pp == 1 or not prediction.walked:
        return []
    micro_batches = int(Grid.of([layout]).micro_batches(workload.global_batch)[0])
    planned = predict_step(prediction.job, micro_batches).pipeline
    assert planned is not None, "the schedule was walked"
    schedule, walk = walk_pipeline(prediction.job, micro_batches, planned)
    return [
        [(a.kind.value, s, e) for a, s, e in zip(row, starts, ends, strict=True)]
        for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
    ]


def layout_words(layout: Layout) -> str:
    """A layout in a line: degrees above one, then settings that are not the plain ones."""
    degrees = [*AXES, "ep", "etp"]
    words = [f"{axis}={getattr(layout, axis)}" for axis in degrees if getattr(layout, axis) > 1]
    words = words or ["one device"]
    if layout.zero:
        words.append(f"zero={layout.zero}")
    if layout.pp > 1:
        stages = f" x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.schedule}{stages}")
    if layout.cp > 1:
        words.append(layout.context)
    if layout.sequence_parallel:
        words.append("sequence_parallel")
    if layout.recompute != "none":
        words.append(f"recompute={layout.recompute}")
    if layout.offload != "none":
        words.append(f"offload={layout.offload}")
    if layout.micro_batch is not None:
        words.append(f"micro_batch={layout.micro_batch}")
    return " ".join(words)


def layout_overrides(layout: Layout) -> str:
    """The overrides that ask for exactly this layout."""
    names = [*AXES, "ep", "etp", "zero", "sequence_parallel", "schedule", "virtual_stages"]
    names += ["context", "micro_batch", "recompute", "offload"]
    plain = Layout()
    changed = [n for n in names if getattr(layout, n) != getattr(plain, n)]
    shown = changed if any(n in AXES for n in changed) else ["dp_replicate", *changed]
    return " ".join(f"layout.{n}={str(getattr(layout, n)).lower()}" for n in shown)


def overrides_from(before: Layout, layout: Layout) -> str:
    """The overrides that lead from a job with one layout to another; they name the whole new one."""
    named = layout_overrides(layout)
    for field in dataclasses.fields(Layout):
        value = getattr(layout, field.name)
        changed = field.name != "mode" and value is not None and value != getattr(before, field.name)
        if changed and f"layout.{field.name}=" not in named:  # back to its default
            words = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()
            named += f" layout.{field.name}={words}"
    return named

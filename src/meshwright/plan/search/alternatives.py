"""Alternatives to a layout: layouts one change away, each predicted exactly.

Used in three cases. A rule rejects the layout: the nearest legal one (``spec.legality.nearest``), with step
time and memory. The layout does not fit: the changes that fit. The layout is recommended: why each neighbour
was rejected. Layouts that this version cannot train are left out, unless the layout itself is plan-only.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem
from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.text import overrides_from
from meshwright.plan.estimate.grid import CONTEXTS, OFFLOADS, RECOMPUTES, Grid
from meshwright.plan.memory.fit import usable_bytes
from meshwright.plan.predict import (
    Prediction,
    complete_layout,
    does_fit,
    format_step_and_memory,
    is_exact,
    predict,
    predict_memory,
    samples_per_rank,
)
from meshwright.plan.search.find import Objective, SearchResult, complexity, score
from meshwright.plan.search.runtimes import runtime_support
from meshwright.plan.search.space import micro_batch_choices, virtual_stage_choices
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, V_SCHEDULES, Layout
from meshwright.spec.legality.nearest import nearest_legal_layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.model import DecoderModel, ResNetModel

RELATIVE_TOLERANCE = 1e-6
"""Relative difference below which two times, or two peaks, count as equal."""
MOST_ALTERNATIVES = 3
SHORTEST_SEQUENCE = 128
OOM_MARGIN = 0.1
"""Share by which a change must need less memory after an OOM that was not predicted."""


# --- Layouts one change away ---


def list_neighbours(job: Job, layout: Layout) -> list[tuple[str, Layout]]:
    """Legal layouts one change away, each with a description: a degree doubled or halved, or one setting.

    Ranks of a changed degree come from, or go to, data parallelism. The micro-batch is capped at the samples
    per rank.
    """
    to_run = is_exact(with_layout(job, layout))
    seen: set[Layout] = {_normalize(job, layout)}
    found = []
    for text, changed in _list_changes(job, layout):
        settled = _normalize(job, changed)
        if settled not in seen and not find_problems(with_layout(job, settled), to_run=to_run):
            found.append((text, settled))
        seen.add(settled)
    return found


def _list_changes(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    support = runtime_support(job)
    for axis in ("tp", "pp", "cp"):
        if axis in support.axes:
            yield from _moved_degree(layout, axis)
    yield from _moved_data(layout)
    if layout.pp > 1:
        yield from _other_schedules(job, layout)
    micro = layout.micro_batch or 1
    values: dict[str, Sequence[Any]] = {
        "ep": (layout.ep * 2, layout.ep // 2) if "ep" in support.axes else (),
        "etp": (1, layout.tp) if "etp" in support.axes else (),
        "zero": [stage for stage in support.zeros if stage] if layout.zero else (),
        "sequence_parallel": (not layout.sequence_parallel,),
        "context": CONTEXTS if layout.cp > 1 else (),
        "recompute": RECOMPUTES,
        "offload": OFFLOADS if job.cluster.device == "cuda" else (),  # on CPUs all state is there already
        "micro_batch": (micro * 2, micro // 2),
    }
    for key, options in values.items():
        for value in options:
            if value != getattr(layout, key) and (value != 0 or isinstance(value, bool)):
                yield _describe_change(layout, key, value), dataclasses.replace(layout, **{key: value})


def _moved_data(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Half of dp_shard moved to dp_replicate, and back; all of dp_replicate moved to dp_shard."""
    if layout.dp_replicate > 1:
        for stage in (1, 2, 3):
            sharded = dataclasses.replace(layout, dp_replicate=1, dp_shard=layout.data_degree, zero=stage)
            yield f"dp_shard={sharded.dp_shard} zero={stage} (instead of dp_replicate)", sharded
    for giver, taker in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        if getattr(layout, giver) % 2 == 0:
            changes = {giver: getattr(layout, giver) // 2, taker: getattr(layout, taker) * 2}
            text = _describe_change(layout, taker, changes[taker])
            if taker == "dp_shard" and layout.zero == 0:  # without it dp_shard means ZeRO-3
                changes["zero"] = 1
                text = text.replace(" (", " zero=1 (")
            yield text, dataclasses.replace(layout, **changes)


def _moved_degree(layout: Layout, axis: str) -> Iterator[tuple[str, Layout]]:
    """A degree doubled, with half the data parallelism; and halved, with twice of it."""
    degree = getattr(layout, axis)
    for data in ("dp_shard", "dp_replicate"):
        if getattr(layout, data) % 2 == 0:
            changes = {axis: degree * 2, data: getattr(layout, data) // 2}
            yield _describe_change(layout, axis, degree * 2), dataclasses.replace(layout, **changes)
            break
    if degree % 2 == 0:
        data = "dp_replicate" if layout.dp_replicate > 1 and layout.dp_shard == 1 else "dp_shard"
        changes = {axis: degree // 2, data: getattr(layout, data) * 2}
        yield _describe_change(layout, axis, degree // 2), dataclasses.replace(layout, **changes)


def _other_schedules(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    for name in runtime_support(job).schedules:
        if name != layout.schedule:
            stages = 2 if name in V_SCHEDULES or name == "interleaved" else 1
            changes: dict[str, Any] = {"schedule": name, "virtual_stages": stages}
            yield _describe_change(layout, "schedule", name), dataclasses.replace(layout, **changes)
    if layout.schedule == "interleaved" and isinstance(job.model, DecoderModel):
        for stages in virtual_stage_choices(job.model.num_layers, layout.pp):
            if stages in (layout.virtual_stages * 2, layout.virtual_stages // 2):
                text = _describe_change(layout, "virtual_stages", stages)
                yield text, dataclasses.replace(layout, virtual_stages=stages)


def _describe_change(layout: Layout, key: str, value: Any) -> str:
    before = getattr(layout, key)
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={shown}" if isinstance(before, bool) else f"{key}={shown} (instead of {before})"


def _normalize(job: Job, layout: Layout) -> Layout:
    """Reset settings that have no effect with these degrees; choose a ZeRO stage where there are shards."""
    changes: dict[str, Any] = {}
    if layout.tp == 1:
        changes["sequence_parallel"] = False
    if layout.pp == 1:
        changes |= {"schedule": "1f1b", "virtual_stages": 1}
    if layout.cp == 1:
        changes["context"] = "ring"
    if layout.dp_shard * layout.cp == 1:
        changes["zero"] = 0
    elif layout.dp_shard > 1 and layout.zero == 0:
        changes["zero"] = 1
    if layout.zero != 3:
        changes["prefetch"] = 1
    if layout.zero < 2:
        changes["accumulate"] = "sharded"
    if layout.micro_batch and layout.micro_batch > samples_per_rank(job, layout):
        changes["micro_batch"] = samples_per_rank(job, layout)
    if not isinstance(layout.placement, str):  # slots are those of the other layout
        changes["placement"] = "auto"
    return dataclasses.replace(layout, stage_layers=None, **changes)


# --- Neighbours of a recommended layout ---


def explain_neighbours(found: SearchResult) -> list[str]:
    """Why each neighbour of the best layout was rejected; those that do not fit share the first sentence.

    A changed degree is also tried with the largest micro-batch that fits: the present one suits another
    degree.
    """
    best, objective = found.best[0], found.objective
    explained, unfit = [], []
    for change, layout in list_neighbours(best.job, best.layout):
        tries = [predict(best.job, layout)]
        if any(getattr(layout, axis) != getattr(best.layout, axis) for axis in AXES):
            open_ = complete_layout(best.job, dataclasses.replace(layout, micro_batch=None))
            if open_.micro_batch != layout.micro_batch:
                tries.append(predict(best.job, open_))
        other = min(tries, key=lambda p: (not p.fits, score(objective, p) if p.fits else p.needed_bytes))
        text = change
        if other.layout.micro_batch != best.layout.micro_batch and not change.startswith("micro_batch"):
            text += f", micro_batch={other.layout.micro_batch}"
        if other.fits:
            explained.append(
                (score(objective, other), f"{text}: {compare(best, other, objective, found.pins)}")
            )
        else:
            unfit.append(f"{change.partition(' (')[0]} ({_describe_shortage(other)})")
    return [*_join_unfit(unfit), *(sentence for _, sentence in sorted(explained))]


def _describe_shortage(other: Prediction) -> str:
    if other.needed_bytes > usable_bytes(other.job.cluster):
        return format_bytes(other.needed_bytes)
    return f"{format_bytes(other.memory.cpu_bytes)} of CPU memory"


def _join_unfit(unfit: list[str]) -> list[str]:
    if not unfit:
        return []
    return [f"because {'they do' if len(unfit) > 1 else 'it does'} not fit: {', '.join(unfit)}"]


def compare(
    best: Prediction,
    other: Prediction,
    objective: Objective = "time",
    pins: Mapping[str, Any] | None = None,
) -> str:
    """Why the other layout is worse: it does not fit, or which parts of the step take longer.

    Args:
        best: The recommended layout.
        other: The layout to compare.
        objective: What the best layout minimizes.
        pins: Layout keys that the job fixes.
    """
    if not other.fits:
        return other.shortage
    change, more = other.step_s / best.step_s - 1, other.needed_bytes - best.needed_bytes
    if abs(more) < RELATIVE_TOLERANCE * best.needed_bytes and (
        objective == "memory" or abs(change) < RELATIVE_TOLERANCE
    ):
        return (
            "same time and memory" if abs(change) < RELATIVE_TOLERANCE else f"same memory, {change:+.1%} time"
        )
    if objective == "memory" and more > 0:
        return f"{format_bytes(more)} more memory"
    if abs(change) < RELATIVE_TOLERANCE:
        return f"same time, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
    if objective == "memory":
        return f"{format_bytes(-more)} less memory, {change:+.1%} time"
    if change < 0:
        devices = other.layout.world_size / best.layout.world_size
        if objective == "cost" and devices * (1 + change) > 1:
            return f"{devices * (1 + change) - 1:.1%} more device time"
        why_not = _why_not_faster(best, other, pins or {})
        return f"{-change:.1%} faster, {format_bytes(other.needed_bytes)} per rank, but {why_not}"
    return f"{change:.1%} slower: {_describe_parts(best, other)}"


def _why_not_faster(best: Prediction, other: Prediction, pins: Mapping[str, Any]) -> str:
    """Why a layout with a shorter step is not recommended."""
    fixed = {key: value for key, value in pins.items() if getattr(other.layout, key) != value}
    if fixed:
        return f"the job fixes {describe_pins(fixed)}"
    simple, other_one = complexity(Grid.of([best.layout, other.layout]))
    return "more complex" if other_one > simple else "not searched unless the job names it"


def describe_pins(pins: Mapping[str, Any]) -> str:
    """Layout keys as overrides."""
    return " ".join(f"layout.{key}={str(value).lower()}" for key, value in pins.items())


def _describe_parts(best: Prediction, other: Prediction, most: int = 2) -> str:
    """The parts that grow most, longest first."""
    differences = part_differences(best, other)
    large = sorted(differences.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in large if value > 0.02 * abs(large[0][1])][:most]
    return ", ".join(f"{name} +{format_seconds(value)}" for name, value in shown)


def part_differences(best: Prediction, other: Prediction) -> dict[str, float]:
    """Seconds that each part takes in the other step, less those in the best one."""
    here, there = best.time.parts, other.time.parts
    names = [*here, *(name for name in there if name not in here)]
    return {name: there.get(name, 0.0) - here.get(name, 0.0) for name in names}


# --- Changes that fit ---


@dataclass(frozen=True)
class Alternative:
    """A changed layout that fits, with its predicted memory and time."""

    overrides: str
    """Command-line overrides; they name the whole layout, so that nothing else is chosen anew."""
    needed_bytes: int
    """Device memory, allocator and context included."""
    step_s: float

    @property
    def step_and_memory(self) -> str:
        """Step time and memory as text."""
        return format_step_and_memory(self.step_s, self.needed_bytes)


def memory_budget_after_oom(
    needed_bytes: int, room_bytes: int, requested_bytes: int | None, live_bytes: int | None
) -> int:
    """Memory that an alternative may need, after a rank ran out of memory.

    At most the free memory, and at most live tensors plus the failed request: the allocator lost the rest.
    Where the prediction was below that, it missed something: then the prediction less the failed request, or
    less a tenth.
    """
    reached = room_bytes if live_bytes is None else min(room_bytes, live_bytes + (requested_bytes or 0))
    if needed_bytes > reached:
        return reached
    return needed_bytes - max(requested_bytes or 0, int(needed_bytes * OOM_MARGIN))


def find_alternatives(
    job: Job, room_bytes: int | None = None, most: int = MOST_ALTERNATIVES
) -> list[Alternative]:
    """Changed layouts that fit, fastest first.

    Shorter sequences change what is trained: they fill up the list only where few layouts fit.

    Args:
        job: With a complete layout.
        room_bytes: Memory that a rank may need; the usable memory of the cluster's devices if left out.
        most: Length of the list.
    """
    room = usable_bytes(job.cluster) if room_bytes is None else room_bytes
    found: dict[frozenset[str], Alternative] = {}
    for changed in _list_candidates(job):
        prediction = _largest_that_fits(job, changed, room)
        if prediction is None:
            continue
        keys = _differences(job.layout, prediction.layout)
        alternative = _build_alternative(job.layout, prediction)
        if keys and (keys not in found or alternative.step_s < found[keys].step_s):
            found[keys] = alternative
    # A change that contains another one which fits by itself comes last.
    order = sorted(found, key=lambda keys: (any(other < keys for other in found), found[keys].step_s))
    order = [keys for keys in order if not _is_redundant(keys, found)]
    best = sorted((found[keys] for keys in order[:most]), key=lambda alternative: alternative.step_s)
    return best + _shorter_sequence(job, room)[: most - len(best)]


def _is_redundant(keys: frozenset[str], found: dict[frozenset[str], Alternative]) -> bool:
    """Whether a part of the change fits by itself and is no slower."""
    return any(other < keys and found[other].step_s <= found[keys].step_s for other in found)


def _list_candidates(job: Job) -> Iterator[Layout]:
    """The layout and its neighbours, each also with more activation checkpointing."""
    layout = dataclasses.replace(job.layout, stage_layers=None)
    for changed in (layout, *(changed for _, changed in list_neighbours(job, layout))):
        yield changed
        for mode in RECOMPUTES[RECOMPUTES.index(changed.recompute) + 1 :]:
            yield dataclasses.replace(changed, recompute=mode)  # type: ignore[arg-type]


def _largest_that_fits(job: Job, layout: Layout, room_bytes: int) -> Prediction | None:
    """The layout with the largest legal micro-batch that fits, up to its present one."""
    if layout.world_size > job.cluster.world_size:
        return None  # ranks on one device share its memory
    to_run = is_exact(job)
    share = samples_per_rank(job, layout)
    most = layout.micro_batch or share
    tries = [
        dataclasses.replace(layout, micro_batch=size) for size in micro_batch_choices(share) if size <= most
    ]
    legal = [tried for tried in tries if not find_problems(with_layout(job, tried), to_run=to_run)]

    def needed(tried: Layout) -> int:
        completed = with_layout(job, complete_layout(job, tried))
        return predict_memory(completed, to_run).need.needed_bytes

    fitting = bisect.bisect_right(legal, room_bytes, key=needed)
    found = predict(job, legal[fitting - 1]) if fitting else None
    return found if found is not None and does_fit(job, found.memory, room_bytes) else None


def _differences(one: Layout, other: Layout) -> frozenset[str]:
    names = [field.name for field in dataclasses.fields(Layout) if field.name != "stage_layers"]
    return frozenset(name for name in names if getattr(one, name) != getattr(other, name))


def _build_alternative(before: Layout, prediction: Prediction, also: str = "") -> Alternative:
    named = overrides_from(before, prediction.layout) + also
    return Alternative(named, prediction.needed_bytes, prediction.step_s)


def _shorter_sequence(job: Job, room_bytes: int) -> list[Alternative]:
    """The longest sequence that fits: half, a quarter, and so on."""
    if isinstance(job.model, ResNetModel):
        return []
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        short = with_seq_len(job, length)
        if not find_problems(short, to_run=is_exact(job)):
            prediction = predict(short, job.layout)
            if does_fit(short, prediction.memory, room_bytes):
                return [_build_alternative(job.layout, prediction, f" data.seq_len={length}")]
        length //= 2
    return []


def with_seq_len(job: Job, seq_len: int) -> Job:
    """The job with another sequence length."""
    return dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=seq_len))


# --- The nearest legal layout ---


@dataclass(frozen=True)
class NearestLegal:
    """The legal layout nearest to one that a rule rejects, with its prediction."""

    runs: bool
    """False: plan-only."""
    overrides: str
    prediction: Prediction

    @property
    def line(self) -> str:
        """Step time and memory as text."""
        kind = "nearest layout that runs" if self.runs else "nearest legal layout"
        fits = "" if self.prediction.fits else f"; {self.prediction.shortage}"
        return f"{kind}: {self.overrides} (predicted {self.prediction.step_and_memory}{fits})"

    @property
    def alternatives(self) -> list[Alternative]:
        """Changes with which it would fit; none if it fits."""
        return [] if self.prediction.fits else find_alternatives(self.prediction.job)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        found = self.prediction
        predicted = {"step_s": found.step_s, "needed_bytes": found.needed_bytes, "fits": found.fits}
        return {"runs": self.runs, "layout": self.overrides, **predicted}


def find_nearest_legal(job: Job, problems: Sequence[Problem]) -> list[NearestLegal]:
    """The nearest layout that runs, else the nearest plan-only one; none if the layout is legal.

    Args:
        job: With the rejected layout.
        problems: The rules that it breaks.
    """
    runs = _find_nearest(job, to_run=True)
    if runs or not isinstance(job.model, DecoderModel):
        return runs
    codes = [problem.code for problem in problems if not problem.path.startswith("model.")]
    never = codes and all(code.startswith("layout-") and not code.endswith("-not-built") for code in codes)
    if not never or any(p.path.startswith("model.") for p in find_problems(job, to_run=False)):
        return []  # the model cannot be planned
    return _find_nearest(job, to_run=False)


def _find_nearest(requested: Job, to_run: bool) -> list[NearestLegal]:
    layout = nearest_legal_layout(requested, to_run)
    job = with_layout(requested, layout)
    if layout == requested.layout:
        return []  # the layout is not what the rules reject
    if any(problem.code.startswith(("layout-", "model-")) for problem in find_problems(job, to_run)):
        return []
    prediction = predict(job, layout)
    return [NearestLegal(to_run, overrides_from(requested.layout, prediction.layout), prediction)]

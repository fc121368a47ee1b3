"""``meshwright plan`` for decoders on any cluster: the best layout, whole, and why the others lost."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cli.output import Output
from meshwright.core.units import format_bytes, format_count, format_rate, format_seconds
from meshwright.explain.plan_picture import PlanPicture
from meshwright.plan.choose import explain_positions
from meshwright.plan.contract import Plan, build_plan
from meshwright.plan.learning_rate import explain_lr
from meshwright.plan.search.find import By, Found, Progress, find_layouts, no_progress
from meshwright.plan.search.neighbours import compare, explain_neighbours
from meshwright.plan.search.predict import (
    WALKED,
    Prediction,
    layout_overrides,
    layout_words,
    predict_layouts,
    walk_passes,
)
from meshwright.plan.search.rescue import explain_failure, nothing_fits, remedies_for_layout
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.plan.search.traffic import bytes_by_axis
from meshwright.plan.search.write import estimated_plan
from meshwright.plan.shapes import count_parameters
from meshwright.plan.time.flops import peak_rate
from meshwright.spec.compiled import explain_gradients
from meshwright.spec.hf import notes_on
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems
from meshwright.spec.model import DecoderModel
from meshwright.spec.recipe import explain_defaults

MOST_ROWS = 12
"""Layouts in the table for people; ``--json`` has as many as ``--top`` says."""
FORMULA_WIDTH = 90
LONG_SEARCH = 300_000
"""Layouts from which a bar is shown, on a terminal."""
WORTH_IT, NO_GAIN = 0.5, 1.05
"""Speed-up over devices below which one device is worth a thought; speed-up below which there is none."""
PASS_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
BEST = {
    "time": "the shortest predicted step",
    "cost": "the least device time a step",
    "memory": "the most memory left",
}


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found, or what is predicted of one given layout."""

    job: Job
    found: Found
    shown: list[Prediction]
    """Best first."""
    reasons: list[str]

    @property
    def best(self) -> Prediction:
        """The first."""
        return self.shown[0]

    def plan(self) -> Plan:
        """What is written: exact where the layout runs today, and there with the time of this estimate."""
        best = self.best
        if find_problems(best.job):
            return estimated_plan(best, self.reasons)
        exact, _ = build_plan(best.job)
        return dataclasses.replace(
            exact, step_s=best.step_s, breakdown_s=best.breakdown_s, reasons=tuple(self.reasons)
        )

    def describe(self, output: Output) -> None:
        """For people."""
        describe_prediction(output, self.best, self.reasons)
        if len(self.shown) > 1:
            rows = [_row(p, self.best) for p in self.shown[:MOST_ROWS]]
            output.say()
            columns = ("layout", "step", "a device", "MFU", "peak", "")
            output.table("Layouts, best first", columns, rows)
        found = self.found
        if self.job.layout.mode == "given":
            return
        output.say(
            f"\n{found.evaluated:,} layouts priced in {format_seconds(found.seconds)}, {found.fit:,} fit; "
            f"{found.pruned:,} ruled out by bounds, {found.illegal:,} combinations by rules"
        )

    def picture(self) -> PlanPicture:
        """What is drawn."""
        best, found = self.best, self.found
        tokens = self.job.train.global_batch * self.job.data.seq_len
        device_s = (
            np.concatenate(found.rates) if found.rates else np.array([best.step_s * best.layout.world_size])
        )
        return PlanPicture(
            title=f"{self.job.name}: {layout_words(best.layout)}",
            memory=best.classes,
            room_bytes=self.job.cluster.memory_bytes,
            steps=[(layout_words(p.layout), p.breakdown_s) for p in self.shown],
            rates=tokens / device_s,
            pipeline=[
                (f"rank {rank}", [(PASS_NAMES[kind], start, end) for kind, start, end in row])
                for rank, row in enumerate(walk_passes(best))
            ],
        )

    def summary(self) -> dict[str, Any]:
        """For programs."""
        found, best = self.found, self.best
        rest = [p.summary([compare(best, p, found.by)]) for p in self.shown[1:]]
        return {
            **found.counts(),
            "layouts": [best.summary(self.reasons, formulas=True), *rest],
        }


def is_estimated(job: Job) -> bool:
    """Whether layouts are estimated, as on clusters of GPUs; else those that run here are predicted exactly.

    Of a model that does not run yet there is nothing but the estimate, on CPUs too.
    """
    if not isinstance(job.model, DecoderModel):
        return False
    on_gpus = job.cluster.device == "cuda" and job.cluster.preset != "local"
    return on_gpus or any(problem.path.startswith("model.") for problem in find_problems(job))


def search_outcome(output: Output, job: Job, pins: dict[str, Any], top: int, by: By) -> SearchOutcome:
    """Search, and predict the best ones whole.

    Raises:
        UserError: Nothing fits; it says what would.
    """
    with search_progress(output) as progress:
        found = find_layouts(job, pins, max(top, WALKED), by, progress)
    if found.best is None:
        raise explain_failure(job, pins, found)
    shown = predict_layouts(job, [found.best.grid.layout(n) for n in range(len(found.best))])
    if by != "memory":  # walked schedules may change the order a little
        shown.sort(key=lambda p: p.step_s * (p.layout.world_size if by == "cost" else 1))
    return SearchOutcome(job, found, shown[:top], explain_best(job, found, shown[0]))


def given_outcome(job: Job) -> SearchOutcome:
    """The prediction of the one layout that the job gives, which need not run yet.

    Raises:
        UserError: It does not fit; it says what would.
    """
    layout = settle_micro_batch(job, job.layout)
    (best,) = predict_layouts(job, [layout])
    if not best.fits:
        raise nothing_fits(job, best, remedies_for_layout(job, layout))
    found = Found(job, "time", evaluated=1, fit=1)
    reasons = [f"{layout_words(layout)}: given in the job"]
    if job.layout.micro_batch is None:
        reasons.append(
            f"micro_batch={layout.micro_batch}: the largest that fits and leaves two micro-batches a stage"
        )
    return SearchOutcome(job, found, [best], [*reasons, *_not_yet(best.job), *_notes(best)])


def explain_best(job: Job, found: Found, best: Prediction) -> list[str]:
    """Why the best is best, and why each neighbour is not."""
    first = f"{layout_words(best.layout)}: {BEST[found.by]} of {found.fit:,} layouts that fit"
    if best.layout.world_size == 1 < job.cluster.world_size:
        first += "; one device is enough, communication would cost more than it gives"
    elif best.layout.world_size < job.cluster.world_size:
        first += f"; the other {job.cluster.world_size - best.layout.world_size} devices would not help"
    if best.layout.offload != "none" and found.by != "memory":
        without = found.without_offload_s
        slow = "nothing fits" if without is None else f"{format_seconds(without)}, recomputing everything"
        first += f"; without offloading {slow}"
    near = [f"not {sentence}" for sentence in explain_neighbours(best, found.by)]
    return [first, *_one_device(job, best), *near, *_not_yet(best.job), *_notes(best)]


def _one_device(job: Job, best: Prediction) -> list[str]:
    """A line where one device is not much slower than all that the best layout takes."""
    devices = best.layout.world_size
    alone = find_layouts(dataclasses.replace(job, layout=Layout()), {"offload": "none"}, 1, worlds=[1])
    if devices == 1 or alone.best is None:
        return []
    times = float(alone.best.step_s[0]) / best.step_s
    if times > WORTH_IT * devices:
        return []
    (one,) = predict_layouts(job, [alone.best.grid.layout(0)])
    advice = "use one device" if times < NO_GAIN else "consider one device"
    words = f"{layout_words(one.layout)} takes {format_seconds(one.step_s)} a step"
    return [f"{advice}: {words}; {devices} devices are {times:.2f} times as fast"]


def _not_yet(job: Job) -> list[str]:
    """A line where the layout is predicted and cannot be trained."""
    codes = [problem.code for problem in find_problems(job)]
    if not codes:
        return []
    return [f"planned only: train does not run it yet ({', '.join(codes)})"]


def _notes(best: Prediction) -> list[str]:
    job, layout = best.job, best.layout
    share = -(-job.train.global_batch // layout.data_degree)
    micro = layout.micro_batch or 1
    padded = layout.data_degree * -(-share // micro) * micro
    notes = []
    if padded > job.train.global_batch:
        empty = padded - job.train.global_batch
        notes.append(
            f"{empty} of {padded} samples a step are zero-weight padding, so that all ranks run alike"
        )
    return [
        *notes,
        *explain_positions(job),
        *explain_lr(job.train),
        *explain_defaults(job.train),
        *explain_gradients(job),
        *notes_on(job.model),
    ]


def describe_prediction(output: Output, best: Prediction, reasons: list[str]) -> None:
    """One layout: its reasons, ledger, step and bytes."""
    job, cluster = best.job, best.job.cluster
    name = cluster.preset or cluster.file or "given"
    used = f"{best.layout.world_size} of {cluster.world_size} devices"
    count = format_count(count_parameters(best.workload.model))
    output.say(f"{job.name}: {count} parameters on {used} ({cluster.device_name}, {name})")
    train, length = job.train, job.data.seq_len
    tokens = format_count(train.global_batch * length)
    samples = f"{train.global_batch:,} samples of {length:,} tokens, {tokens} tokens in all"
    output.say(f"  a step: {samples}, in {train.precision}; as {train.runtime} runs it")
    for reason in reasons:
        output.say(f"  {reason}")
    low, high = (format_seconds(value) for value in best.interval_s)
    rate = format_rate(best.tokens_per_s, "tokens")
    output.say(
        f"  predicted step {format_seconds(best.step_s)} ({low} to {high}), {rate}, MFU {best.mfu:.1%}"
    )
    _, peak = peak_rate(job.cluster, job.train.precision)
    output.say(f"  interval: {best.interval.basis}; MFU counts against {peak}")
    output.say(f"  rates: {cluster.basis}")
    output.say(f"  overrides: {layout_overrides(best.layout)}")
    _ledger(output, best)
    _step(output, best)
    moved = [
        (axis, tier, format_bytes(count), _ops(best, axis, tier))
        for (axis, tier), count in bytes_by_axis(best.traffic).items()
    ]
    if moved:
        output.say()
        output.table("Bytes that a rank moves in a step", ("axis", "within", "bytes", "calls"), moved)


def _ledger(output: Output, best: Prediction) -> None:
    ledger, room = best.ledger, best.job.cluster.memory_bytes
    rows = [(line.name, format_bytes(line.bytes), shorten_formula(line.formula)) for line in ledger.lines]
    share = f"at: {ledger.fullest_at}; {best.peak_bytes / room:.1%} of {format_bytes(room)}"
    rows.append(("peak in a step", format_bytes(best.peak_bytes), share))
    whose = "every rank" if len(best.classes) == 1 else f"the {best.fullest} stage's ranks"
    output.say()
    output.table(f"Memory of {whose}", ("", "bytes", "formula"), rows)
    times = [f"{name} {format_bytes(count)}" for name, count in ledger.peaks.items() if name != "in step"]
    output.say(", ".join(times))
    others = [f"{name} {format_bytes(peak)}" for name, peak in best.peaks.items() if name != best.fullest]
    if others:
        output.say(f"other stages: {', '.join(others)}")


def shorten_formula(formula: str) -> str:
    """A formula for a table: long fractions cut, its first terms; ``--json`` has it whole."""
    short = re.sub(r"(\d+\.\d{3})\d+", r"\1", formula)
    return f"= {short}" if len(short) <= FORMULA_WIDTH else f"= {short[: FORMULA_WIDTH - 4].rstrip()} ..."


def _step(output: Output, best: Prediction) -> None:
    rows = [
        (name, format_seconds(value), f"{value / best.step_s:.1%}")
        for name, value in sorted(best.breakdown_s.items(), key=lambda part: -part[1])
    ]
    rows += [(f"{name}, hidden", format_seconds(value), "") for name, value in best.hidden_s.items()]
    walked = ", schedule walked" if best.walked else ""
    output.say()
    output.table(f"The step{walked}", ("", "time", "share"), rows)


def _ops(best: Prediction, axis: str, tier: str) -> str:
    rows = [row for row in best.traffic if (row.axis, row.tier) == (axis, tier)]
    return ", ".join(f"{row.calls:,} {row.op}" for row in rows)


def _row(prediction: Prediction, best: Prediction) -> tuple[str, ...]:
    slower = prediction.step_s / best.step_s - 1
    return (
        layout_words(prediction.layout),
        format_seconds(prediction.step_s),
        format_rate(prediction.tokens_per_s / prediction.layout.world_size, "tokens"),
        f"{prediction.mfu:.1%}",
        format_bytes(prediction.peak_bytes),
        "" if prediction is best else f"{slower:+.2%}",
    )


@contextmanager
def search_progress(output: Output) -> Iterator[Progress]:
    """A bar on standard error for long searches, where there is a terminal."""
    if not output.errors.is_terminal:
        yield no_progress
        return
    from rich.progress import Progress as Bar  # noqa: PLC0415  (most searches are over before it is loaded)

    with Bar(console=output.errors, transient=True) as bar:
        task = None

        def show(done: int, total: int) -> None:
            nonlocal task
            if total < LONG_SEARCH:
                return
            if task is None:
                task = bar.add_task("searching", total=total)
            bar.update(task, completed=done, total=total)

        yield show

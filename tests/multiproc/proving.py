"""Proofs of many layouts against one reference each model: what `meshwright prove` runs, side by side."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from meshwright.cli.output import Output
from meshwright.cli.prove import ENTRY, REFERENCE_ENTRY, run_side
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.explain.proof import Verdict, judge
from meshwright.explain.record import RunRecord, read_record
from meshwright.plan.contract import Plan, build_plan
from meshwright.plan.proof import Findings, ProofTask, ReferenceNotes, proof_job, reference_job
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.spec.job import Job
from meshwright.spec.load import require_runnable


@dataclass(frozen=True)
class Step:
    """What a rank said of a step."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Proof:
    """One layout beside the reference, with all that its ranks wrote."""

    plan: Plan
    verdict: Verdict
    findings: list[Findings]
    notes: ReferenceNotes
    record: RunRecord
    steps: list[list[Step]]
    """Of each rank."""
    reference_steps: list[Step]


class Prover:
    """Runs layouts; the reference of a model and its batch is run once, when it is first needed."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self._folder, self._data_dir = folder, data_dir
        self._output = Output(as_json=True)
        self._number = itertools.count()
        self._references: dict[object, tuple[Path, list[float | None]]] = {}

    def prove(self, job: Job, entry: str = ENTRY) -> Proof:
        """Run the job's layout and compare; blocks are compiled if the job says so, as the command does not.

        Args:
            job: With its layout given.
            entry: Of a rank: `prove`'s own, or one with a defect.
        """
        here = proof_job(job, machine_memory_bytes())
        home, losses = self._reference(here)
        asked = {key: getattr(job.train, key) for key in ("compile", "compile_backend")}
        here = dataclasses.replace(here, train=dataclasses.replace(here.train, **asked))
        require_runnable(here)
        plan, place = build_plan(here)[0], self._place()
        task = ProofTask(self._positions(here), str(home))
        found = run_side(self._output, entry, plan, place, task, self._data_dir)
        findings = [Findings.read(place, rank) for rank in range(plan.world_size)]
        notes = ReferenceNotes.read(home)
        verdict = judge(notes, findings, found, losses)
        steps = [read_steps(place, rank) for rank in range(plan.world_size)]
        return Proof(plan, verdict, findings, notes, read_record(place), steps, read_steps(home, 0))

    def _reference(self, job: Job) -> tuple[Path, list[float | None]]:
        """One process; how it cuts its batch is rounding, so that all micro-batches share one."""
        one = reference_job(job)
        key = (one.model, one.data, one.train)
        if key not in self._references:
            plan, place = build_plan(one)[0], self._place()
            task = ProofTask(self._positions(one))
            losses = run_side(self._output, REFERENCE_ENTRY, plan, place, task, self._data_dir)
            self._references[key] = place, losses
        return self._references[key]

    @staticmethod
    def _positions(job: Job) -> tuple[int, ...]:
        """All samples: whichever a rank holds, the reference has them."""
        return tuple(range(job.train.global_batch))

    def _place(self) -> Path:
        return self._folder / str(next(self._number))


def read_steps(folder: Path, rank: int) -> list[Step]:
    """What a rank said of its steps."""
    return [
        Step(event["loss"], event["grad_norm"])
        for event in read_events(folder / EVENTS_FILE).events
        if event["event"] == "step" and event["rank"] == rank
    ]

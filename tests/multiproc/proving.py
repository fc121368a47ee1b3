"""Proofs of many layouts against one reference each model: what `meshwright prove` runs, side by side."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.record import RunRecord, read_record
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.layout.stages import StageSpec, local_parameters, local_stages, pp_rank_of
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.runs.prove import ENTRY, REFERENCE_ENTRY, run_proof_side
from meshwright.runs.reporter import SILENT
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.spec.job import Job
from meshwright.spec.load import require_runnable
from meshwright.verify.proof_task import (
    GRADIENT_STEPS,
    GRADIENT_TOLERANCE,
    PROOF_PHASE,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    proof_job,
    reference_job,
)
from meshwright.verify.verdict import Verdict, judge


@dataclass(frozen=True)
class Step:
    """What a rank said of a step."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Proof:
    """One layout beside the reference, with all that its ranks wrote."""

    plan: PlanContract
    verdict: Verdict
    findings: list[RankFindings]
    notes: ReferenceRecord
    record: RunRecord
    steps: list[list[Step]]
    """Of each rank."""
    reference_steps: list[Step]
    loads: list[list[dict[str, Any]]]
    """Of every expert."""
    reference_loads: list[list[dict[str, Any]]]


class Prover:
    """Runs layouts; the reference of a model and its batch is run once, when it is first needed."""

    def __init__(self, folder: Path, data_dir: Path, reference: str = REFERENCE_ENTRY) -> None:
        """Run in a folder.

        Args:
            folder: Empty.
            data_dir: Prepared.
            reference: Entry of the one process.
        """
        self._folder, self._data_dir, self._entry = folder, data_dir, reference
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
        asked = {key: getattr(job.train, key) for key in ("block_backend", "compile_backend")}
        here = dataclasses.replace(here, train=dataclasses.replace(here.train, **asked))
        require_runnable(here)
        plan, place = build_plan(here)[0], self._place()
        task = ProofTask(self._positions(here), str(home))
        found = run_proof_side(entry, plan, place, task, self._data_dir, SILENT)
        findings = [RankFindings.read(place, rank) for rank in range(plan.world_size)]
        notes = ReferenceRecord.read(home)
        verdict = judge(notes, findings, found, losses)
        steps = [read_steps(place, rank) for rank in range(plan.world_size)]
        return Proof(
            plan,
            verdict,
            findings,
            notes,
            record=read_record(place),
            steps=steps,
            reference_steps=read_steps(home, 0),
            loads=read_loads(place),
            reference_loads=read_loads(home),
        )

    def _reference(self, job: Job) -> tuple[Path, list[float | None]]:
        """One process; how it cuts its batch is rounding, so that all micro-batches share one."""
        one = reference_job(job)
        key = (one.model, one.data, one.train)
        if key not in self._references:
            plan, place = build_plan(one)[0], self._place()
            task = ProofTask(self._positions(one))
            losses = run_proof_side(self._entry, plan, place, task, self._data_dir, SILENT)
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


def read_loads(folder: Path) -> list[list[dict[str, Any]]]:
    """The load of every expert, layer by layer, of each step that tells it; none without experts."""
    return [event["layers"] for event in read_events(folder / EVENTS_FILE).of("experts")]


def hold(prover: Prover, job: Job, entry: str = "planted_proofs:audited") -> Proof:
    """Prove a layout, with one step audited, and look at everything that came of it but its peak."""
    proof = prover.prove(job, entry)
    assert proof.verdict.equal, proof.verdict.first_divergence
    require_all_compared(proof)
    for steps in proof.steps:
        assert steps == proof.steps[0], "every rank tells the loss and the gradient norm of all"
    for found, expected in zip(proof.steps[0], proof.reference_steps, strict=True):
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=GRADIENT_TOLERANCE)
    audit = audit_run(proof.plan, proof.record)
    assert [row for row in audit.collectives if row.phase != PROOF_PHASE and not row.equal] == []
    assert {row.phase for row in audit.collectives if row.calls} >= {"step"}
    state = [row for row in audit.state if not row.tolerance]  # peaks are for models of some size
    assert [row for row in state if not row.ok] == []
    assert {row.rank for row in state} == set(range(job.layout.world_size))
    assert proof.loads == proof.reference_loads, "where tokens go does not depend on the layout"
    return proof


def require_all_compared(proof: Proof) -> None:
    """Every rank has compared the gradients and modules of its stages, and together they have all."""
    job, modules = proof.plan.job, set[str]()
    for found in proof.findings:
        place = pp_rank_of(job, found.rank)
        held = {parameter.name for parameter in local_parameters(job, place)}
        for step in map(str, GRADIENT_STEPS):
            assert found.gradients[step].keys() == held
            assert held <= proof.notes.gradient_norms[step].keys()
        assert found.not_compared == []
        seen = {row.module for row in found.activations if row.what == "output"}
        if found.activations:  # else the rank has zero-weight samples alone
            parts = local_stages(job, place)
            assert seen == {name for name in proof.notes.modules if any(is_in(name, part) for part in parts)}
        modules |= seen
    assert modules == set(proof.notes.modules)


def is_in(module: str, part: StageSpec) -> bool:
    """Whether a stage has a module."""
    owner, _, rest = module.partition(".")
    if owner == "blocks":
        return int(rest.partition(".")[0]) in part.layers
    return part.first if owner in ("embed", "positions") else part.last

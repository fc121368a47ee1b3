"""Proves many layouts against one reference per model, with the parts of `meshwright prove`."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import read_record
from meshwright.audit.record import RunRecord
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.layout.stages import StageSpec, local_parameters, local_stages, pp_rank_of
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.runs.prove import ENTRY, run_proof_side
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
    RunFigures,
    mixed_job,
    proof_job,
    reference_job,
)
from meshwright.verify.verdict import Verdict, judge


@dataclass(frozen=True)
class Step:
    """Loss and gradient norm that a rank reports for a step."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Proof:
    """Verdict on one layout, with everything that its ranks and the reference wrote."""

    plan: PlanContract
    verdict: Verdict
    findings: list[RankFindings]
    reference: ReferenceRecord
    record: RunRecord
    steps: list[list[Step]]
    """Per rank."""
    reference_steps: list[Step]
    loads: list[list[dict[str, Any]]]
    """Expert load per step and layer."""
    reference_loads: list[list[dict[str, Any]]]


class Prover:
    """Runs layouts. The reference of a model and batch is run once, on first use."""

    def __init__(self, folder: Path, data_dir: Path, reference: str = ENTRY) -> None:
        """Set the folder and the data.

        Args:
            folder: Empty folder for the runs.
            data_dir: Prepared corpus.
            reference: Entry point of the reference process.
        """
        self._folder, self._data_dir, self._entry = folder, data_dir, reference
        self._number = itertools.count()
        self._references: dict[object, tuple[Path, RunFigures]] = {}

    def prove(self, job: Job, entry: str = ENTRY, precision: str = "fp32") -> Proof:
        """Run the job's layout and compare it with the reference.

        The job's block backend is kept. The command always proves eager blocks.

        Args:
            job: Job with a complete layout.
            entry: Entry point of a rank: that of `prove`, or one of ``parallelism_bugs``.
            precision: Of the pass: float32, or the job's own.
        """
        spec = proof_job(job, machine_memory_bytes())
        if precision != "fp32":
            spec = mixed_job(spec, precision, job.train.loss_scale)
        reference_dir, expected = self._reference(spec)
        backend = {key: getattr(job.train, key) for key in ("block_backend", "compile_backend")}
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, **backend))
        require_runnable(spec)
        plan, run_dir = build_plan(spec)[0], self._new_run_dir()
        task = ProofTask(self._positions(spec), str(reference_dir), precision=precision)
        figures = run_proof_side(entry, plan, run_dir, task, self._data_dir, SILENT)
        findings = [RankFindings.read(run_dir, rank) for rank in range(plan.world_size)]
        reference = ReferenceRecord.read(reference_dir)
        return Proof(
            plan,
            judge(reference, findings, figures, expected, task.tolerances),
            findings,
            reference,
            record=read_record(run_dir),
            steps=[read_steps(run_dir, rank) for rank in range(plan.world_size)],
            reference_steps=read_steps(reference_dir, 0),
            loads=read_loads(run_dir),
            reference_loads=read_loads(reference_dir),
        )

    def _reference(self, job: Job) -> tuple[Path, RunFigures]:
        """The run of one process. Its micro-batch size changes rounding only, so one run serves all sizes."""
        spec = reference_job(job)
        key = (spec.model, spec.data, spec.train)
        if key not in self._references:
            plan, run_dir = build_plan(spec)[0], self._new_run_dir()
            task = ProofTask(self._positions(spec), precision=spec.train.precision)
            figures = run_proof_side(self._entry, plan, run_dir, task, self._data_dir, SILENT)
            self._references[key] = run_dir, figures
        return self._references[key]

    @staticmethod
    def _positions(job: Job) -> tuple[int, ...]:
        """All samples of a batch: the reference records every sample that any rank can have."""
        return tuple(range(job.train.global_batch)) if job.train.precision == "fp32" else ()

    def _new_run_dir(self) -> Path:
        return self._folder / str(next(self._number))


def read_steps(folder: Path, rank: int) -> list[Step]:
    """A rank's steps, from the events."""
    return [
        Step(event["loss"], event["grad_norm"])
        for event in read_events(folder / EVENTS_FILE).events
        if event["event"] == "step" and event["rank"] == rank
    ]


def read_loads(folder: Path) -> list[list[dict[str, Any]]]:
    """Expert load per recorded step and layer; empty for dense models."""
    return [event["layers"] for event in read_events(folder / EVENTS_FILE).of("experts")]


def require_equal_and_planned(prover: Prover, job: Job, entry: str = "parallelism_bugs:audited") -> Proof:
    """Prove a layout and audit one of its steps: all checks of `prove` and `audit` but the peak memory."""
    proof = prover.prove(job, entry)
    assert proof.verdict.equal, proof.verdict.first_divergence
    require_all_compared(proof)
    for steps in proof.steps:
        assert steps == proof.steps[0], "all ranks report the same loss and gradient norm"
    for found, expected in zip(proof.steps[0], proof.reference_steps, strict=True):
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=GRADIENT_TOLERANCE)
    audit = audit_run(proof.plan, proof.record)
    assert [row for row in audit.collectives if row.phase != PROOF_PHASE and not row.equal] == []
    assert {row.phase for row in audit.collectives if row.calls} >= {"step"}
    state = [row for row in audit.state if not row.tolerance]  # the peak is checked on larger models
    assert [row for row in state if not row.ok] == []
    assert {row.rank for row in state} == set(range(job.layout.world_size))
    assert proof.loads == proof.reference_loads, "routing does not depend on the layout"
    return proof


def require_all_compared(proof: Proof) -> None:
    """Every rank compared all gradients and modules of its stages; together they compared all modules."""
    job, modules = proof.plan.job, set[str]()
    for found in proof.findings:
        pp_rank = pp_rank_of(job, found.rank)
        local = {parameter.name for parameter in local_parameters(job, pp_rank)}
        for step in map(str, GRADIENT_STEPS):
            assert found.gradients[step].keys() == local
            assert local <= proof.reference.gradient_norms[step].keys()
        assert found.not_compared == []
        compared = {row.module for row in found.activations if row.what == "output"}
        if found.activations:  # none if the rank has only zero-weight samples
            stages = local_stages(job, pp_rank)
            assert compared == {m for m in proof.reference.modules if any(is_in_stage(m, s) for s in stages)}
        modules |= compared
    assert modules == set(proof.reference.modules)


def is_in_stage(module: str, stage: StageSpec) -> bool:
    """Whether a stage has a module."""
    owner, _, rest = module.partition(".")
    if owner == "blocks":
        return int(rest.partition(".")[0]) in stage.layers
    return stage.first if owner in ("embed", "positions") else stage.last

"""Types of the objects that the public API returns, for annotations.

A type is imported from its own module when it is first used: importing this module is fast.
"""

# ruff: noqa: PLC0414  (an alias tells type checkers that the name may be imported from here)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.audit.compare import Audit as Audit
    from meshwright.checkpoint.inventory import StoredCheckpoint as StoredCheckpoint
    from meshwright.layout.no_effect import UnusedSetting as UnusedSetting
    from meshwright.plan.contract import PlanContract as PlanContract
    from meshwright.plan.contract import RankPrediction as RankPrediction
    from meshwright.plan.predict import Prediction as Prediction
    from meshwright.plan.search.alternatives import NearestLegal as NearestLegal
    from meshwright.plan.search.find import Objective as Objective
    from meshwright.plan.search.find import SearchResult as SearchResult
    from meshwright.plan.sizing import ClusterSize as ClusterSize
    from meshwright.runs.collective_bench import CollectiveBench as CollectiveBench
    from meshwright.runs.dry_run import DryRun as DryRun
    from meshwright.runs.evaluate import Evaluation as Evaluation
    from meshwright.runs.explain import LayoutExplanation as LayoutExplanation
    from meshwright.runs.faults.suite import FaultReport as FaultReport
    from meshwright.runs.probe import ProbeResult as ProbeResult
    from meshwright.runs.prove import Proof as Proof
    from meshwright.runs.scaling import ScalingResult as ScalingResult
    from meshwright.runs.size import SizedCluster as SizedCluster
    from meshwright.runs.tune import TuneResult as TuneResult
    from meshwright.schedule.pipeline.actions import PipelineSchedule as PipelineSchedule
    from meshwright.simulate.collective_choice import CollectiveComparison as CollectiveComparison
    from meshwright.simulate.months import FailureSimulation as FailureSimulation
    from meshwright.simulate.months import Range as Range
    from meshwright.simulate.step import Lane as Lane
    from meshwright.simulate.step import StepTimeline as StepTimeline
    from meshwright.validation.evaluate import Outcome as Outcome
    from meshwright.validation.metrics import Validation as Validation
    from meshwright.verify.verdict import Verdict as Verdict

MODULES = {
    "Audit": "meshwright.audit.compare",
    "CollectiveBench": "meshwright.runs.collective_bench",
    "CollectiveComparison": "meshwright.simulate.collective_choice",
    "ClusterSize": "meshwright.plan.sizing",
    "DryRun": "meshwright.runs.dry_run",
    "Evaluation": "meshwright.runs.evaluate",
    "FailureSimulation": "meshwright.simulate.months",
    "FaultReport": "meshwright.runs.faults.suite",
    "Lane": "meshwright.simulate.step",
    "LayoutExplanation": "meshwright.runs.explain",
    "NearestLegal": "meshwright.plan.search.alternatives",
    "Objective": "meshwright.plan.search.find",
    "Outcome": "meshwright.validation.evaluate",
    "PipelineSchedule": "meshwright.schedule.pipeline.actions",
    "PlanContract": "meshwright.plan.contract",
    "Prediction": "meshwright.plan.predict",
    "ProbeResult": "meshwright.runs.probe",
    "Proof": "meshwright.runs.prove",
    "Range": "meshwright.simulate.months",
    "RankPrediction": "meshwright.plan.contract",
    "ScalingResult": "meshwright.runs.scaling",
    "SearchResult": "meshwright.plan.search.find",
    "SizedCluster": "meshwright.runs.size",
    "StepTimeline": "meshwright.simulate.step",
    "StoredCheckpoint": "meshwright.checkpoint.inventory",
    "TuneResult": "meshwright.runs.tune",
    "UnusedSetting": "meshwright.layout.no_effect",
    "Validation": "meshwright.validation.metrics",
    "Verdict": "meshwright.verify.verdict",
}
"""The module of each type."""


def __getattr__(name: str) -> Any:
    """Import a type when it is first used."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return list(MODULES)

"""A plan for two ranks, and the events of a run that kept it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.record import RunRecord
from meshwright.plan.contract import PLAN_FILE, Plan, build_plan, write_plan
from meshwright.spec.load import build_job

STEPS, EVALUATIONS = 4, 2
Events = list[dict[str, Any]]


@pytest.fixture(scope="session")
def plan() -> Plan:
    """Two replicas of the tiny model; three buckets."""
    job = build_job(
        {
            "model": {"preset": "tiny"},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 2},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 8},
            "layout": {"dp_replicate": 2, "bucket_mb": 0.1},
        }
    )
    return build_plan(job)[0]


@pytest.fixture(scope="session")
def pipeline_plan() -> Plan:
    """Two stages of the tiny model."""
    job = build_job(
        {
            "model": {"preset": "tiny"},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 2},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": STEPS, "global_batch": 8},
            "layout": {"pp": 2},
        }
    )
    return build_plan(job)[0]


@pytest.fixture
def kept(plan: Plan, events_of: Callable[..., Events]) -> Callable[..., Events]:
    """Events of a run that did what the plan promised, on every rank."""
    return functools.partial(events_of, plan)


@pytest.fixture
def events_of() -> Callable[..., Events]:
    """The same of any plan."""

    def events(plan: Plan, generation: int = 0) -> Events:
        found: Events = []
        times = {"setup": 1, "step": STEPS, "eval": EVALUATIONS, "save": 0}
        for promised in plan.ranks:
            head = {"v": 1, "time": 0.0, "rank": promised.rank, "generation": generation}
            found.append({**head, "event": "ready", "step": 0, "steps": STEPS, "peak_basis": "a matmul"})
            for step in range(1, STEPS + 1):
                facts = {"loss": 6.0 - step, "step_s": 0.5, "mfu": 0.25, "tokens": 256}
                found.append({**head, "event": "step", "step": step, **facts})
            found.append({**head, "event": "eval", "step": STEPS, "loss": 5.5, "samples": 64})
            state = {"state_bytes": dict(promised.state_bytes), "peak_bytes": promised.peak_bytes}
            state["activation_bytes"] = promised.activation_bytes
            found.append({**head, "event": "state", "step": 1, "first_step": False, **state})
            rows = [
                {
                    **{k: v for k, v in dataclasses.asdict(t).items() if k != "pp_rank"},
                    "calls": t.calls * times[t.phase],
                    "bytes": t.bytes * times[t.phase],
                }
                for t in plan.collectives_of(promised.rank)
            ]
            counts = {"rows": rows, "steps": STEPS, "evaluations": EVALUATIONS}
            found.append({**head, "event": "collectives", **counts})
            found.append({**head, "event": "finished", "status": "complete", "step": STEPS, "steps": STEPS})
        return found

    return events


def pick(events: Events, name: str, rank: int) -> dict[str, Any]:
    """The one event of that name and rank."""
    (event,) = [e for e in events if e["event"] == name and e["rank"] == rank]
    return event


@pytest.fixture
def find() -> Callable[..., dict[str, Any]]:
    """``find(events, "state", rank=1)``."""
    return pick


@pytest.fixture
def record_of() -> Callable[[Events], RunRecord]:
    """Events folded, as a live run does it."""

    def fold(events: Events) -> RunRecord:
        record = RunRecord()
        for event in events:
            record.feed(event)
        return record

    return fold


@pytest.fixture
def run_folder(plan: Plan, tmp_path: Path) -> Callable[[Events], Path]:
    """A run's folder with the plan and these events."""

    def write(events: Events) -> Path:
        write_plan(plan, tmp_path / PLAN_FILE)
        lines = [json.dumps(event) + "\n" for event in events]
        (tmp_path / "events.jsonl").write_text("".join(lines))
        return tmp_path

    return write

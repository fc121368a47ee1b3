"""Training under torchrun: settings that only our own launcher obeys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.runs.torchrun import REFUSED, _plan_for_all


def test_spares_are_refused_on_all_ranks(job_file, monkeypatch):
    """Rank 0 raises the error, and the other ranks read from the store that the run is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = {}
    store_like = type("Store", (), {"set": lambda _, key, value: store.update({key: value})})()
    job = LoadedJob.load(str(job_file), ("elastic.spares=1",))
    with pytest.raises(UserError) as refused:
        _plan_for_all(store_like, job, "no", Reporter())
    assert refused.value.problems[0].code == "elastic-spares-torchrun"
    assert store == {"run_dir": REFUSED}


SLOW_NODES = (
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.nic_bytes_per_s=1e6",
    "cluster.nic_latency_s=1e-5",
    "layout.tp=2",
    "layout.dp_replicate=2",
    "train.global_batch=2",
)
"""Jobs whose replicas belong on one node."""


def test_a_list_of_slots_is_refused(job_file, monkeypatch):
    """Torchrun starts ranks in rank order."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = type("Store", (), {"set": lambda *_: None})()
    job = LoadedJob.load(str(job_file), (*SLOW_NODES, "layout.placement=[0,2,1,3]"))
    with pytest.raises(UserError) as refused:
        _plan_for_all(store, job, "no", Reporter())
    assert refused.value.problems[0].code == "layout-placement-torchrun"


def test_a_placement_that_the_planner_found_is_reported_and_not_used(job_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    store, warnings = {}, []
    store_like = type("Store", (), {"set": lambda _, key, value: store.update({key: value})})()
    reporter = Reporter()
    monkeypatch.setattr(reporter, "warning", warnings.append)
    job = LoadedJob.load(str(job_file), SLOW_NODES)
    assert build_plan(job.spec)[0].placement == (0, 2, 1, 3)
    run_dir = _plan_for_all(store_like, job, "no", reporter)
    assert read_plan(Path(run_dir) / "plan.toml").placement == ()
    (warning,) = [text for text in warnings if "torchrun" in text]
    assert "[0, 2, 1, 3] is not used" in warning

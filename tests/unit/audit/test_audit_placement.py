"""The audit of rank placement: ranks that ran elsewhere are named."""

from __future__ import annotations

import pytest

from meshwright.audit.compare import audit_run
from meshwright.plan.build import build_plan


@pytest.fixture
def plan(make_job):
    """Two replicas on two nodes of one device."""
    cluster = {"device": "cpu", "nodes": 2, "devices_per_node": 1}
    return build_plan(make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}, cluster=cluster))[0]


@pytest.fixture
def record_with(matching_events, record_of):
    """``record_with((host, node, device), ...)``: a run that matches its plan, and where its ranks ran."""

    def build(*places, more=()):
        events = matching_events()
        for event in events:
            if event["event"] == "ready":
                host, node, device = places[event["rank"]]
                event |= {"host": host, "node": node, "device": device}
        return record_of([*events, *more])

    return build


def test_ranks_on_their_planned_devices_are_clean(plan, record_with):
    audit = audit_run(plan, record_with(("a", 0, 0), ("b", 1, 0)))
    assert audit.ok, audit.differences
    assert [(row.rank, row.node, row.device, row.ok) for row in audit.placement] == [
        (0, 0, 0, True),
        (1, 1, 0, True),
    ]
    assert audit.as_dict()["placement"][1]["planned_node"] == 1


def test_a_rank_on_another_node_is_named(plan, record_with):
    audit = audit_run(plan, record_with(("a", 0, 0), ("a", 0, 1)))
    (difference,) = audit.differences
    assert difference == (
        "generation 0, rank 1: ran on device 1 of node 0 (a), planned on device 0 of node 1"
    )


def test_ranks_of_one_node_are_on_one_host(make_job, record_with):
    cluster = {"device": "cpu", "devices_per_node": 2}
    plan = build_plan(make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}, cluster=cluster))[0]
    (difference,) = audit_run(plan, record_with(("a", 0, 0), ("b", 0, 1))).differences
    assert difference == "generation 0: the ranks of node 0 ran on several hosts: a, b"


def test_launchers_that_do_not_number_nodes_are_not_judged(plan, record_with):
    assert audit_run(plan, record_with(("a", None, None), ("b", None, None))).ok


def test_older_runs_did_not_report_where_ranks_ran(plan, matching_events, record_of):
    audit = audit_run(plan, record_of(matching_events()))
    assert audit.ok
    assert audit.placement == ()


def test_a_later_layout_is_judged_by_the_devices_that_were_left(plan, matching_events, record_of):
    """Node 0 is lost: the plan's slots are devices of node 1."""
    changed = {
        "v": 1, "event": "layout_changed", "time": 5.0, "rank": 0, "generation": 0, "reason": "a node left",
        "layout": {}, "ranks_before": 3, "ranks": 2, "step": 0, "placement": [[1, 0], [1, 1]],
    }  # fmt: skip
    after = matching_events(1)
    for event in after:
        if event["event"] == "ready":
            event |= {"host": "b", "node": 1, "device": event["rank"]}
    started = {**changed, "event": "note", "note": ""}
    record = record_of([{**started, "event": "started", "pid": 1, "host": "a"}, changed, *after])
    rows = audit_run(plan, record, {0: plan}).placement
    assert [(row.rank, row.planned_node, row.planned_device, row.ok) for row in rows] == [
        (0, 1, 0, True),
        (1, 1, 1, True),
    ]

"""The audit with uneven expert load: predicted memory follows the measured number of routed rows."""

from __future__ import annotations

import pytest

from meshwright.audit.compare import audit_run
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.spec.load import build_job


@pytest.fixture(scope="module")
def plan() -> PlanContract:
    """Two ranks with two experts each, in two layers."""
    tree = {
        "model": {"preset": "tiny", "num_experts": 4, "experts_per_token": 2},
        "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 2},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 8},
        "layout": {"dp_shard": 2, "ep": 2, "zero": 3},
    }
    return build_plan(build_job(tree))[0]


@pytest.fixture
def audit_of(plan, events_of, record_of):
    """``audit_of(more_bytes, more_rows)``: audit of a run whose rank 0 has extra routed rows and bytes."""

    def audit(more_bytes, more_rows):
        events = events_of(plan)
        share = plan.ranks[0].routed_rows
        state = next(e for e in events if e["event"] == "state" and e["rank"] == 0)
        rows = [share + more_rows] * 2
        state["routed_rows"] = {"fullest": rows, "mean": rows}
        state["activation_bytes"] += more_bytes
        return audit_run(plan, record_of(events))

    return audit


def row_of(audit, kind):
    return next(row for row in audit.state if (row.rank, row.kind) == (0, kind))


@pytest.mark.parametrize("share", [0.5, -0.5])
def test_predicted_activations_follow_the_measured_rows(plan, audit_of, share):
    """50% more or fewer rows change activations by more than the tolerance.

    The row passes with these bytes only.
    """
    predicted = plan.ranks[0]
    rows = round(predicted.routed_rows * share)
    more = 2 * rows * predicted.row_bytes
    assert abs(more) > 0.05 * predicted.activation_bytes
    row = row_of(audit_of(more, rows), "activations")
    assert (row.predicted, row.expert_load_bytes) == (predicted.activation_bytes + more, more)
    assert row.ok
    assert not row_of(audit_of(0, rows), "activations").ok


def test_the_predicted_peak_follows_the_measured_rows(plan, audit_of):
    """The saved rows of all layers change the peak, and so do the temporary buffers of the current layer."""
    rows = plan.ranks[0].routed_rows // 2
    saved = 2 * rows * plan.ranks[0].row_bytes
    assert row_of(audit_of(saved, rows), "peak").expert_load_bytes > saved
    assert row_of(audit_of(-saved, -rows), "peak").expert_load_bytes < 0


def test_a_rank_with_uneven_load_is_named(plan, audit_of):
    rows = plan.ranks[0].routed_rows // 2
    audit = audit_of(2 * rows * plan.ranks[0].row_bytes, rows)
    [sentence] = audit.load
    assert sentence.startswith("rank 0: its experts read 50.0% more rows than with an even load: +")
    assert audit.as_dict()["load"] == [sentence]


def test_an_even_load_is_not_reported(plan, audit_of, events_of, record_of):
    assert audit_of(0, 0).load == ()
    assert audit_of(0, 0).ok, audit_of(0, 0).differences
    assert audit_run(plan, record_of(events_of(plan))).ok, "records without routed rows are still audited"

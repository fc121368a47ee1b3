"""Experts that are not equally busy: a rank is held to what the rows that came make it hold."""

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
    """The audit of a run whose first rank measured so many bytes more, for so many rows more in a layer."""

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
def test_the_prediction_is_for_the_rows_that_came(plan, audit_of, share):
    """Half a share more, or less: far beyond what is allowed, and held; without the bytes it is not."""
    promised = plan.ranks[0]
    rows = round(promised.routed_rows * share)
    more = 2 * rows * promised.row_bytes
    assert abs(more) > 0.05 * promised.activation_bytes
    row = row_of(audit_of(more, rows), "activations")
    assert (row.predicted, row.expert_load_bytes) == (promised.activation_bytes + more, more)
    assert row.ok
    assert not row_of(audit_of(0, rows), "activations").ok


def test_the_peak_moves_with_the_rows(plan, audit_of):
    """By all layers' rows, and by what the layer at work makes of its own."""
    rows = plan.ranks[0].routed_rows // 2
    kept = 2 * rows * plan.ranks[0].row_bytes
    assert row_of(audit_of(kept, rows), "peak").expert_load_bytes > kept
    assert row_of(audit_of(-kept, -rows), "peak").expert_load_bytes < 0


def test_the_fullest_and_the_emptiest_rank_are_named(plan, audit_of):
    rows = plan.ranks[0].routed_rows // 2
    audit = audit_of(2 * rows * plan.ranks[0].row_bytes, rows)
    [sentence] = audit.load
    assert sentence.startswith("rank 0: its experts read 50.0% more rows than with an even load: +")
    assert audit.as_dict()["load"] == [sentence]


def test_an_even_load_is_not_worth_a_word(plan, audit_of, events_of, record_of):
    assert audit_of(0, 0).load == ()
    assert audit_of(0, 0).ok, audit_of(0, 0).differences
    assert audit_run(plan, record_of(events_of(plan))).ok, "records from before rows were written down"

"""Changes for a rank that ran out of memory: each runs, fits, and is the cheapest of its kind."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.choose import USABLE_MEMORY, evaluate
from meshwright.plan.lighten import cheapest_changes, room_to_plan_for
from meshwright.spec.load import build_job, job_tree, read_tree

TABLES = {
    "model": {"preset": "demo-2m"},
    "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 4},
    "data": {"path": "text", "seq_len": 256},
    "train": {"steps": 4, "global_batch": 64},
}


def settled(**layout):
    job = build_job({**TABLES, "layout": layout})
    return dataclasses.replace(job, layout=evaluate(job, job.layout).layout)


def peak_of(job):
    return evaluate(job, job.layout).ledger.first_peak_bytes


def pasted(job, overrides, tmp_path):
    """The job that a user gets who pastes the overrides behind the file that ran out."""
    import tomli_w

    from meshwright.spec.load import load_job

    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(job_tree(job)))
    assert "layout" in read_tree(str(path))
    return load_job(str(path), overrides.split())


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 4, "micro_batch": 16},
        {"dp_replicate": 4, "micro_batch": 1},
        {"dp_shard": 4, "zero": 1, "micro_batch": 16},
        {"dp_replicate": 2, "dp_shard": 2, "micro_batch": 8},
        {"dp_replicate": 1, "micro_batch": 64},
        {"dp_replicate": 1, "micro_batch": 64, "recompute": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.9, 0.6])
def test_each_change_fits_when_it_is_pasted_and_costs_what_is_said(layout, share, tmp_path):
    job = settled(**layout)
    room = int(peak_of(job) * share)
    found = cheapest_changes(job, room)
    assert [r.step_s for r in found[:2]] == sorted(r.step_s for r in found[:2])
    assert len({r.overrides for r in found}) == len(found) <= 3
    for remedy in found:
        again = pasted(job, remedy.overrides, tmp_path)
        candidate = evaluate(again, again.layout)
        assert candidate.ledger.first_peak_bytes == remedy.peak_bytes <= room
        assert candidate.time.total_s == pytest.approx(remedy.step_s)


def test_recomputation_and_a_smaller_micro_batch_are_both_offered():
    found = cheapest_changes(job := settled(dp_replicate=4, micro_batch=16), int(peak_of(job) * 0.7))
    named = [remedy.overrides for remedy in found]
    assert any("micro_batch=8" in text and "recompute" not in text for text in named), named
    assert any("recompute=" in text for text in named), named


def test_state_that_is_too_large_is_sharded():
    """A micro-batch of one cannot be smaller; of four replicas the state can be cut."""
    job = settled(dp_replicate=4, micro_batch=1, recompute="full")
    found = cheapest_changes(job, int(peak_of(job) * 0.8))
    assert found
    assert all("layout.dp_shard=4" in r.overrides and "layout.dp_replicate=1" in r.overrides for r in found)


def test_nothing_is_offered_where_nothing_fits():
    assert cheapest_changes(settled(dp_replicate=1, micro_batch=1), 1000) == []


def test_the_room_is_what_was_there_or_what_was_reached():
    assert room_to_plan_for(1000, 500, 10, None) == int(500 * USABLE_MEMORY)
    assert room_to_plan_for(1000, 500, 10, 390) == int(400 * USABLE_MEMORY)
    assert room_to_plan_for(1000, 5000, None, None) == 900, "more was taken than predicted"
    assert room_to_plan_for(1000, 5000, 300, None) == 700

"""The simulated step against the plan: equal times for every kind of layout, and lanes without overlap."""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import pytest

from meshwright import load_job
from meshwright.core.errors import UserError
from meshwright.plan.profiles import PROFILES
from meshwright.simulate.step import AFTER, IDLE, WORK, Lane, StepTimeline
from meshwright.simulate.step_trace import PASSES, PIECES, write_trace

ROOM = ("cluster.memory_bytes=10_000_000_000_000", "train.global_batch=32", "layout.micro_batch=1")
DENSE = ("llama3-8b", *ROOM)
EXPERTS = ("mixtral-8x7b", *ROOM)
LAYOUTS = {
    "one rank": (*DENSE, "layout.recompute=full"),
    "ddp": (*DENSE, "layout.dp_replicate=16"),
    "zero1": (*DENSE, "layout.dp_shard=16", "layout.zero=1"),
    "zero2": (*DENSE, "layout.dp_shard=16", "layout.zero=2"),
    "zero3": (*DENSE, "layout.dp_shard=16", "layout.zero=3", "layout.recompute=full"),
    "hsdp": (*DENSE, "layout.dp_shard=8", "layout.dp_replicate=2", "layout.zero=3"),
    "offload": (*DENSE, "layout.dp_shard=16", "layout.zero=3", "layout.offload=all"),
    "tp": (*DENSE, "layout.tp=8", "layout.recompute=selective"),
    "tp sp": (*DENSE, "layout.tp=8", "layout.sequence_parallel=true", "layout.recompute=full"),
    "cp": (*DENSE, "layout.cp=4", "layout.dp_shard=4", "layout.zero=3"),
    "ulysses": (*DENSE, "layout.cp=4", "layout.dp_shard=4", "layout.context=ulysses"),
    "gpipe": (*DENSE, "layout.pp=4", "layout.schedule=gpipe"),
    "1f1b": (*DENSE, "layout.pp=4", "layout.dp_shard=4", "layout.zero=1"),
    "interleaved": (*DENSE, "layout.pp=4", "layout.schedule=interleaved", "layout.virtual_stages=2"),
    "zb-h1": (*DENSE, "layout.pp=4", "layout.tp=2", "layout.schedule=zb-h1"),
    "zbv": (*DENSE, "layout.pp=4", "layout.dp_shard=2", "layout.schedule=zbv"),
    "dualpipe-v": (*DENSE, "layout.pp=4", "layout.dp_shard=2", "layout.schedule=dualpipe-v"),
    "ep": (*EXPERTS, "layout.dp_shard=16", "layout.ep=8", "layout.zero=1"),
    "ep pp tp": (*EXPERTS, "layout.dp_shard=4", "layout.ep=4", "layout.pp=2", "layout.tp=2"),
    "tp pp cp": (*DENSE, "layout.pp=2", "layout.tp=2", "layout.cp=2", "layout.dp_shard=2", "layout.zero=1"),
    "megatron": (*DENSE, "layout.pp=4", "layout.tp=4", "train.runtime=megatron-core"),
    "blocking sends": (*DENSE, "layout.pp=8", "train.runtime=megatron-lm"),
    "resnet": ("resnet-tiny", "layout.dp_replicate=2"),
}


@functools.cache
def simulate(name: str) -> StepTimeline:
    return plan_step(name)


def plan_step(name: str) -> StepTimeline:
    source, *overrides = LAYOUTS[name]
    on = None if source.startswith("resnet") else "2x8xh100-sxm"
    return load_job(source, *overrides, on=on).simulate_step()


def check_lane(lane: Lane, step_s: float) -> None:
    """Events follow each other from 0 to the end of the step; overlapped ones of an axis are apart."""
    slack = 1e-9 * step_s
    assert lane.events[0].start_s == 0
    assert lane.events[-1].end_s == pytest.approx(step_s, rel=1e-9)
    for before, after in pairwise(lane.events):
        assert abs(before.end_s - after.start_s) <= slack
    assert sum(lane.totals().values()) == pytest.approx(step_s, rel=1e-9)
    for events in (lane.actions, *lane.overlapped.values()):
        assert all(before.end_s <= after.start_s + slack for before, after in pairwise(events))
        assert all(0 <= one.start_s < one.end_s <= step_s + slack for one in events)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_simulated_step_is_the_planned_one(name):
    """Step time, exposed communication, bubble and overlapped communication."""
    timeline = simulate(name)
    plan, lanes = timeline.plan, list(timeline.lanes())
    assert timeline.step_s == pytest.approx(plan.step_s, rel=1e-9)
    for lane in lanes:
        check_lane(lane, plan.step_s)
    totals = [lane.totals() for lane in lanes]
    planned = {part: plan.breakdown_s.get(part, 0.0) for part in (*WORK, *IDLE, *AFTER)}
    assert set(plan.breakdown_s) <= set(planned)
    for part in WORK:  # the plan has the average rank
        mean = sum(row.get(part, 0.0) for row in totals) / len(totals)
        assert mean == pytest.approx(planned[part], rel=1e-6, abs=1e-9 * plan.step_s), part
    for row in totals:
        for part in AFTER:
            assert row.get(part, 0.0) == pytest.approx(planned[part], rel=1e-9, abs=1e-12)
    least_idle = min(sum(row.get(part, 0.0) for part in IDLE) for row in totals)
    assert least_idle == pytest.approx(planned["bubble"] + planned["pipeline transfers"], abs=1e-9)
    for lane in lanes:
        hidden = lane.overlapped_totals().get("dp", 0.0)
        assert hidden == pytest.approx(plan.hidden_s.get("data parallel", 0.0), rel=1e-9)


def test_every_communication_axis_and_kind_of_work_is_somewhere_in_the_matrix():
    """The matrix above would pass if nothing but compute were drawn."""
    names, axes = set(), set()
    for layout in LAYOUTS:
        for lane in simulate(layout).lanes():
            names |= {event.name for event in lane.events}
            axes |= set(lane.overlapped)
    assert axes >= {"dp_shard", "cp", "dp"}
    assert names >= {
        "forward", "backward", "input gradient", "weight gradient", "recompute", "tensor parallel",
        "context parallel", "expert parallel", "sharded data parallel", "bubble", "pipeline transfers",
        "gradient reduction", "optimizer", "step overhead",
    }  # fmt: skip


def test_every_pass_is_drawn_once():
    timeline = simulate("zbv")
    schedule = timeline.schedule
    assert schedule is not None
    names = {"F": "forward", "B": "backward", "W": "weight gradient"}
    expected = sorted((names[a.kind], a.stage, a.micro_batch) for row in schedule.ranks for a in row)
    drawn = sorted((a.name, a.stage, a.micro_batch) for lane in timeline.lanes() for a in lane.actions)
    assert drawn == expected


def test_a_rank_waits_for_its_own_blocking_sends():
    timeline = simulate("blocking sends")
    assert not PROFILES["megatron-lm"].time.overlap_p2p
    last = timeline.lane(7)
    assert last.totals()["pipeline transfers"] > 0


def test_a_schedule_that_is_too_large_becomes_an_average_rank(monkeypatch):
    """The plan's closed form is kept: the step is as long."""
    monkeypatch.setattr("meshwright.plan.time.step.plan_pipeline", lambda *_: None)
    timeline = plan_step("1f1b")
    assert timeline.schedule is None
    (lane,) = timeline.lanes()
    check_lane(lane, timeline.plan.step_s)
    assert lane.totals() == pytest.approx(timeline.plan.breakdown_s, rel=1e-6)


def test_the_trace_has_the_events_and_the_transfers(tmp_path):
    timeline = simulate("1f1b")
    path = tmp_path / "trace.json"
    write_trace(timeline, path)
    trace = json.loads(path.read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.step_s * 1e6, rel=1e-9)
    for rank, lane in enumerate(timeline.lanes()):
        found = [e for e in slices if (e["pid"], e["tid"]) == (rank, PIECES)]
        assert [e["ts"] for e in found] == pytest.approx([e.start_s * 1e6 for e in lane.events])
    starts = [e for e in trace["traceEvents"] if e["ph"] == "s"]
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert len(starts) == 2 * 3 * timeline.plan.micro_batches  # three boundaries, both directions
    send_s = timeline.plan.pipeline.send_s
    assert all(ends[e["id"]]["ts"] - e["ts"] >= send_s * 1e6 * (1 - 1e-6) for e in starts)
    passes = [e for e in slices if e["tid"] == PASSES]
    for arrow in starts:  # each begins inside a pass of its rank
        inside = [
            e for e in passes if e["pid"] == arrow["pid"] and e["ts"] < arrow["ts"] < e["ts"] + e["dur"]
        ]
        assert len(inside) == 1
        assert arrow["tid"] == PASSES


def test_a_trace_of_too_many_passes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.simulate.step_trace.MAX_ACTIONS", 40)
    timeline = simulate("1f1b")
    with pytest.raises(UserError, match="trace-too-large"):
        write_trace(timeline, tmp_path / "trace.json")
    write_trace(timeline, tmp_path / "trace.json", [0])
    with pytest.raises(UserError, match="trace-not-written"):
        write_trace(timeline, tmp_path / "missing" / "trace.json", [0])

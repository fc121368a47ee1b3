"""In-flight activations of a pp rank against a count through its actions."""

from __future__ import annotations

import pytest

from meshwright.schedule.pipeline.actions import Kind, PipelineSchedule, consumer_of, producer_of
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import load_schedule
from meshwright.schedule.pipeline.in_flight import (
    STEADY,
    StageState,
    WeightGrads,
    count_in_flight,
    steady_state_from,
)
from meshwright.schedule.pipeline.transfers import find_releases, list_needed, receiver_of

SIZES = [
    ("gpipe", 1, 3, 1),
    ("gpipe", 4, 6, 1),
    ("1f1b", 2, 1, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 6, 3),
    ("interleaved", 4, 8, 2),
    ("zb-h1", 3, 2, 1),
    ("zb-h1", 4, 9, 1),
    ("zbv", 2, 1, 2),
    ("zbv", 4, 11, 2),
    ("dualpipe-v", 4, 8, 2),
    ("dualpipe-v", 3, 10, 2),
]
OWN = """0F0,1F0,0F1,3F0,1F1,3B0,3F1,1B0,3B1,0B0,1B1,0B1
2F0,2F1,2B0,2B1
"""
"""A schedule file with stages 0, 1 and 3 on one rank."""


def read_state(passes: str, micro_batches: int, split: bool) -> StageState:
    """The state of a stage after some passes, given as a string of F, B and W."""
    whole = "W" if split else "B"
    grads = WeightGrads.NONE
    if "B" in passes:
        grads = WeightGrads.ALL if whole in passes else WeightGrads.HALF
    return StageState(
        grads,
        in_use="F" in passes and passes.count("B") < micro_batches,
        after_forward=passes.replace("W", "").endswith("F"),
        unreduced=split and passes.replace("F", "").endswith("B"),
        last=passes.count(whole) >= micro_batches - 1,
    )


def walk(schedule: PipelineSchedule, rank: int) -> list[tuple[object, ...]]:
    """Every action of a rank with the live tensors at its start."""
    row, stages = schedule.ranks[rank], schedule.stages_of(rank)
    releases, needed = find_releases(schedule, rank), list_needed(schedule, rank)
    receives = [at for at, a in enumerate(row) if producer_of(a, schedule.stages) in needed]
    waiting: dict[tuple[int, int], Kind] = {}
    passes = dict.fromkeys(stages, "")
    names = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}
    sent, inside, found = set(), 0, []
    for at, action in enumerate(row):
        kind, stage, m = action
        producer = producer_of(action, schedule.stages)
        if producer is not None and producer.stage != stage:
            inside -= schedule.rank_of(producer.stage) == rank
            sent -= set(releases.get(producer, ()))
        others = [(s, after) for (s, other), after in waiting.items() if (s, other) != (stage, m)]
        counts = [others.count((s, after)) for after in (Kind.FORWARD, Kind.BACKWARD) for s in stages]
        posted = int(bool(receives) and at < receives[-1])
        states = [read_state(p, schedule.micro_batches, schedule.split_backward) for p in passes.values()]
        held = (kind, stages.index(stage), tuple(states))
        found.append((held, [*counts, len(sent), inside, posted], m))
        waiting.pop((stage, m), None)
        if kind is Kind.FORWARD or (kind is Kind.BACKWARD and schedule.split_backward):
            waiting[stage, m] = kind
        passes[stage] += names[kind]
        if receiver_of(action, schedule) is not None:
            sent.add(action)
        elif consumer_of(action, schedule.stages) is not None:
            inside += 1
    return found


def check(schedule: PipelineSchedule) -> None:
    """Compare the table of every rank with the count."""
    for rank, found in enumerate(count_in_flight(schedule)):
        first: dict[str, tuple[object, ...]] = {}
        for held, counts, micro_batch in walk(schedule, rank):
            first.setdefault(repr((held, counts)), (held, counts, micro_batch))
        table = [
            (found.states[state], counts, micro_batch)
            for state, counts, micro_batch in zip(
                found.state.tolist(), found.counts.tolist(), found.micro_batch.tolist(), strict=True
            )
        ]
        assert table == list(first.values())
        assert found.split_backward is schedule.split_backward


@pytest.mark.parametrize(("name", "pp", "micro_batches", "stages"), SIZES)
def test_table_has_each_distinct_state_once(name, pp, micro_batches, stages):
    check(build_schedule(name, pp, micro_batches, stages))


def test_any_stages_on_a_rank_are_counted(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(OWN, encoding="utf-8")
    check(load_schedule(path))


def test_more_micro_batches_add_no_rows():
    """Twice the micro-batches repeat the steady state."""
    short, long = (count_in_flight(build_schedule("zbv", 4, count, 2)) for count in (40, 80))
    assert [len(rank.state) for rank in short] == [len(rank.state) for rank in long]


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zb-h1", 1),
        ("zbv", 2),
        ("dualpipe-v", 2),
    ],
)
def test_long_step_has_the_rows_of_a_shorter_one(name, stages, pp):
    """Live tensors do not grow with the micro-batches of a step.

    GPipe is an exception and counted in full.
    """
    rounds = [7 * pp, 13 * pp] if name == "interleaved" else [7 * pp, 7 * pp + 1, 9 * pp - 1, 13 * pp]
    for micro_batches in rounds:
        fewer = steady_state_from(name, pp, micro_batches)
        assert (fewer == micro_batches) == (name == "gpipe")
        whole = count_in_flight(build_schedule(name, pp, micro_batches, stages))
        short = count_in_flight(build_schedule(name, pp, fewer, stages))
        longer = [rank.with_more(micro_batches - fewer, STEADY * pp) for rank in short]
        for one, other in zip(whole, longer, strict=True):
            assert one.states == other.states
            for column in ("state", "counts", "micro_batch"):
                assert (getattr(one, column) == getattr(other, column)).all(), (column, micro_batches)

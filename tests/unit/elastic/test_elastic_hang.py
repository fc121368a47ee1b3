"""The hang verdict as a table: constructed flight recorders, and what is said about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.core.flight_ring import CallRecord, Channel, Flight, RankProgress
from meshwright.elastic.hang import RankState, find_hang

NOW_NS = 100_000_000_000
LIMIT_S = 4.0
STEP = [("dp", "all_reduce", 1000), ("dp", "all_reduce", 300), ("control", "all_reduce", 5)]
"""The calls of one step of two or three data-parallel ranks: axis, op, elements."""


def flight(rank, calls, ranks, phase="update", at="train.py:7", raised="", waits=True):
    """A recorder with these calls, 0.1 s apart, the last one 5 s ago. ``None`` begins the next step."""
    counts, records, step = Counter(), [], 1
    begin_ns = NOW_NS - 5_000_000_000 - len(calls) * 100_000_000
    for call in calls:
        begin_ns += 100_000_000
        if call is None:
            step += 1
            continue
        axis, op, numel = call
        direction = axis.partition(" ")[2]
        members = tuple(int(r) for r in direction.split(">")) if direction else tuple(range(ranks))
        channel = Channel(axis.partition(" ")[0], f"group of {axis}", direction, members)
        counts[channel.group, channel.direction] += 1
        records.append(
            CallRecord(
                channel=channel,
                sequence=counts[channel.group, channel.direction],
                op=op,
                dtype="float32",
                numel=numel,
                shape=(numel,),
                source=f"{axis.partition(' ')[0]}.py:{numel}",
                step=step,
                phase="backward",
                begin_ns=begin_ns,
            )
        )
    last = records[-1] if records else None
    in_call = waits and last is not None
    progress = RankProgress(
        pid=100 + rank,
        rank=rank,
        generation=0,
        heartbeat_ns=NOW_NS,
        source=last.source if in_call else at,
        step=step,
        phase="backward" if in_call else phase,
        phase_begin_ns=(last.begin_ns if in_call else NOW_NS - 4_900_000_000),
        phase_changes=step,
        calls=len(records),
        wait_begin_ns=0,
        raised=raised,
    )
    return Flight(progress, tuple(records), dict(counts))


def idle(rank, calls, ranks=2, silent_s=0.0, stopped=False, **options):
    """A rank that uses no CPU time."""
    return RankState(rank, flight(rank, calls, ranks, **options), "", stopped, silent_s, 5.0)


def busy(rank, calls, ranks=2, **options):
    """A rank that computes."""
    return RankState(rank, flight(rank, calls, ranks, waits=False, **options))


TWICE = [*STEP, None, *STEP, None]
P2P = [("pp 0>1", "send", 64), ("control", "all_reduce", 5)]

TABLE = {
    "rank 1 is stopped while rank 0 waits": (
        [
            idle(0, [*TWICE, STEP[0]]),
            idle(1, TWICE, silent_s=5.0, stopped=True, waits=False, phase="forward"),
        ],
        {"cause": "stopped", "rank": 1, "axis": "dp", "op": "all_reduce", "source": "train.py:7"},
        [
            "rank 1 has been stopped (SIGSTOP) for 5.0 s in forward of step 3",
            "rank 0 waits for it in all_reduce of dp",
        ],
    ),
    "rank 1 is stopped in an all-reduce that both have called": (
        [idle(0, [*TWICE, STEP[0]]), idle(1, [*TWICE, STEP[0]], silent_s=5.0, stopped=True)],
        {"cause": "stopped", "rank": 1, "axis": "dp", "waiting": (0,)},
        ["rank 0 waits for it in all_reduce of dp"],
    ),
    "rank 1 has no heartbeat": (
        [idle(0, [*TWICE, STEP[0]]), idle(1, TWICE, silent_s=5.0, waits=False)],
        {"cause": "silent", "rank": 1},
        ["rank 1 has had no heartbeat and no CPU time for 5.0 s"],
    ),
    "rank 0 was killed": (
        [replace(idle(0, TWICE), exit="killed by SIGKILL"), idle(1, [*TWICE, STEP[0]])],
        {"cause": "ended", "rank": 0, "axis": "control"},
        ["rank 0 ended (killed by SIGKILL)"],
    ),
    "rank 1 raised and ended, then rank 0 lost its peer and ended": (
        [
            replace(idle(0, [*TWICE, STEP[0]]), exit="exit status 75"),
            replace(idle(1, TWICE, raised="ValueError: bad sample"), exit="exit status 1"),
        ],
        {"cause": "raised", "rank": 1},
        ["rank 1 raised ValueError: bad sample"],
    ),
    "rank 2 calls another shape": (
        [idle(r, [*TWICE, ("dp", "all_reduce", 7 if r == 2 else 1000)], 3) for r in range(3)],
        {"cause": "mismatch", "rank": 2, "axis": "dp", "op": "all_reduce", "source": "dp.py:7", "step": 3},
        ["rank 2 called all_reduce of dp with shape [7] float32 at dp.py:7", "ranks 0 and 1 called"],
    ),
    "of two ranks the one that differs from its last step calls another op": (
        [idle(0, [*TWICE, ("dp", "broadcast", 1000)]), idle(1, [*TWICE, STEP[0]])],
        {"cause": "mismatch", "rank": 0, "op": "broadcast"},
        ["rank 0 called broadcast of dp", "rank 1 called all_reduce of dp"],
    ),
    "a wrong shape made a rank abort": (
        [
            replace(idle(0, [*TWICE, STEP[0]]), exit="killed by SIGABRT"),
            idle(1, [*TWICE, ("dp", "all_reduce", 7)]),
        ],
        {"cause": "mismatch", "rank": 1},
        [],
    ),
    "rank 1 skips the second all-reduce and waits in the next one": (
        [idle(0, [*TWICE, *STEP[:2]]), idle(1, [*TWICE, STEP[0], STEP[2]])],
        {
            "cause": "skipped",
            "rank": 1,
            "axis": "dp",
            "op": "all_reduce",
            "source": "control.py:5",
            "step": 3,
        },
        ["rank 1 skipped all_reduce of dp at dp.py:300 in step 3", "went on to all_reduce of control"],
    ),
    "rank 1 skips the first all-reduce, and its next one has another shape": (
        [idle(0, [*TWICE, STEP[0]]), idle(1, [*TWICE, STEP[1]])],
        {"cause": "skipped", "rank": 1, "axis": "dp", "step": 3},
        ["rank 1 skipped all_reduce of dp at dp.py:1000"],
    ),
    "of three ranks in the first step, one skips a call": (
        [idle(r, [STEP[0], *STEP[1 + (r == 1) : 2 + (r == 1)]], 3) for r in range(3)],
        {"cause": "skipped", "rank": 1, "axis": "dp", "source": "control.py:5"},
        ["rank 1 waits in all_reduce of control", "did not call all_reduce of dp at dp.py:300"],
    ),
    "rank 1 waits for data": (
        [
            idle(0, [*TWICE, STEP[0]]),
            idle(1, TWICE, waits=False, phase="waiting for data", at="batches.py:9"),
        ],
        {"cause": "data", "rank": 1, "axis": "dp", "source": "batches.py:9"},
        ["rank 1 has waited for data in step 3 at batches.py:9 for 4.9 s", "rank 0 waits for it"],
    ),
    "all ranks wait for data": (
        [idle(r, TWICE, waits=False, phase="waiting for data") for r in range(2)],
        {"cause": "data", "rank": 0, "axis": ""},
        [],
    ),
    "rank 0 waits for storage": (
        [idle(0, TWICE, waits=False, phase="checkpoint"), idle(1, [*TWICE, STEP[0]])],
        {"cause": "storage", "rank": 0, "axis": "dp"},
        ["rank 0 has waited for storage to save step 3"],
    ),
    "rank 1 sleeps in its update": (
        [idle(0, [*TWICE, *STEP]), idle(1, [*TWICE, *STEP[:2]], waits=False, at="user.py:3")],
        {"cause": "blocked", "rank": 1, "axis": "control", "source": "user.py:3"},
        ["rank 1 has been blocked outside of any collective in update of step 3 at user.py:3"],
    ),
    "stage 1 waits for stage 0, which waits for data": (
        [
            idle(0, [*P2P, None], waits=False, phase="waiting for data"),
            idle(1, [("pp 0>1", "recv", 64), P2P[1], None, ("pp 0>1", "recv", 64)]),
        ],
        {"cause": "data", "rank": 0, "axis": "pp", "op": "recv"},
        ["rank 1 waits for it in recv of pp from rank 0 to rank 1"],
    ),
    "a message of another size": (
        [idle(0, [("pp 0>1", "send", 64)]), idle(1, [("pp 0>1", "recv", 32)])],
        {"cause": "mismatch", "axis": "pp"},
        [],
    ),
    "both ranks are in the same all-reduce and nothing arrives": (
        [idle(r, [*TWICE, STEP[0]]) for r in range(2)],
        {"cause": "partition", "rank": None, "axis": "dp", "op": "all_reduce", "source": "dp.py:1000"},
        ["ranks 0 and 1 all called all_reduce of dp", "no data arrive"],
    ),
    "rank 2 waits for rank 1, which waits for rank 0, which sleeps": (
        [
            idle(0, [], waits=False, at="user.py:3"),
            idle(1, [("pp 0>1", "recv", 1)]),
            idle(2, [("pp 1>2", "recv", 1)]),
        ],
        {"cause": "blocked", "rank": 0, "waiting": (1, 2)},
        ["rank 1 waits for it in recv of pp from rank 0 to rank 1"],
    ),
    "rank 1 computes while rank 0 waits": (
        [idle(0, [*TWICE, STEP[0]]), busy(1, TWICE, phase="forward")],
        {"cause": "computing", "rank": 1, "waiting": (0,)},
        ["no rank is stuck: rank 1 computes in forward of step 3 at train.py:7", "rank 0 waits for it"],
    ),
    "rank 0 computes and rank 1 waits for data that nobody needs yet": (
        [busy(0, TWICE), idle(1, TWICE, waits=False, phase="waiting for data")],
        {"cause": "running"},
        [],
    ),
    "rank 1 loads weights during setup": (
        [idle(0, [("dp", "broadcast", 3)]), idle(1, [], waits=False, phase="setup")],
        {"cause": "running"},
        [],
    ),
    "rank 1 has finished": (
        [
            busy(0, TWICE, phase="checkpoint"),
            replace(idle(1, TWICE, waits=False, phase="finished"), exit="gone"),
        ],
        {"cause": "running"},
        [],
    ),
    "an all-to-all may send different sizes": (
        [busy(0, [("ep", "all_to_all", 10)]), busy(1, [("ep", "all_to_all", 20)])],
        {"cause": "running"},
        [],
    ),
    "rank 1 has not started": ([idle(0, [], phase="setup"), RankState(1, None)], {"cause": "running"}, []),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_verdict_names_cause_rank_and_collective(case):
    states, expected, phrases = TABLE[case]
    found = find_hang(states, NOW_NS, LIMIT_S)
    assert {key: getattr(found, key) for key in expected} == expected, found.verdict
    assert [phrase for phrase in phrases if phrase not in found.verdict] == [], found.verdict
    assert "\n" not in found.verdict


def test_only_hangs_that_cannot_resolve_themselves_end_a_run():
    causes = {find_hang(states, NOW_NS, LIMIT_S) for states, _, _ in TABLE.values()}
    ending = {found.cause for found in causes if found.ends_run}
    assert ending == {"ended", "raised", "mismatch", "skipped", "stopped", "silent"}
    assert {found.cause for found in causes if not found.is_hang} == {"computing", "running"}


def test_ranks_of_an_older_generation_are_not_compared():
    """A rank that has not joined the new generation made other calls."""
    old, new = idle(0, [*TWICE, ("dp", "broadcast", 1)]), busy(1, [STEP[0]])
    new = replace(new, flight=replace(new.flight, progress=replace(new.flight.progress, generation=1)))
    assert find_hang([old, new], NOW_NS, LIMIT_S).cause == "running"

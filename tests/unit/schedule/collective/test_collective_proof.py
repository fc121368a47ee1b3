"""The prover of collective schedules: a schedule broken in any way is refused, with rank and step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective_reference import make_inputs, run_schedule, wrong_chunks
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.proof import MAX_VIOLATIONS, ViolationKind, prove_collective
from meshwright.schedule.collective.steps import Combine, Receive, Send, Step

EVERY = [(op, algorithm) for op in Op for algorithm in list_algorithms(op)]


def ring(ranks=4):
    return build_collective("all_reduce", "ring", ranks)


def with_step(schedule, rank, at, step):
    """The schedule with one step replaced, or removed with None."""
    row = list(schedule.rows[rank])
    row[at : at + 1] = [] if step is None else [step]
    rows = [*schedule.rows]
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


def kinds_of(schedule):
    return {v.kind for v in prove_collective(schedule).violations}


def test_dropped_send_shifts_the_messages_behind_it():
    good = ring()
    broken = with_step(good, 1, 2, good.rows[1][2]._replace(sends=()))
    found = prove_collective(broken).violations
    assert str(found[0]) == "rank 2, step 2: adds chunk 2 from rank 1, which sends chunk 1 in its step 3"
    assert found[-1].kind in (ViolationKind.UNMATCHED, ViolationKind.DEADLOCK)


def test_dropped_last_send_is_unmatched():
    good = ring()
    broken = with_step(good, 1, 5, good.rows[1][5]._replace(sends=()))
    assert [str(v) for v in prove_collective(broken).violations] == [
        "rank 2, step 5: copies chunk 3 from rank 1, which never sends it"
    ]


def test_dropped_receive_leaves_its_sender_waiting():
    good = ring()
    broken = with_step(good, 2, 5, good.rows[2][5]._replace(receives=()))
    assert [str(v) for v in prove_collective(broken).violations] == [
        "rank 1, step 5: sends chunk 3 to rank 2, which never receives it"
    ]


def test_dropped_message_lacks_a_contribution():
    good = ring()
    broken = with_step(good, 1, 5, good.rows[1][5]._replace(sends=()))
    broken = with_step(broken, 2, 5, good.rows[2][5]._replace(receives=()))
    assert [str(v) for v in prove_collective(broken).violations] == [
        "rank 2, step 1: chunk 3, last received in this step, lacks the data of rank 3 at the end"
    ]


def test_contribution_counted_twice_is_named():
    good = build_collective("reduce", "naive", 3)
    send, receive = good.rows[2][0], good.rows[0][0]
    doubled = with_step(good, 2, 0, send._replace(sends=send.sends * 2))
    doubled = with_step(doubled, 0, 0, receive._replace(receives=receive.receives * 2))
    assert [str(v) for v in prove_collective(doubled).violations] == [
        "rank 0, step 0: adds chunk 0 from rank 2: the data of rank 2 would count twice in chunk 0"
    ]


def test_adding_a_finished_sum_again_is_doubled():
    good = ring(3)
    step = good.rows[0][2]
    summed = step._replace(receives=tuple(r._replace(combine=Combine.REDUCE) for r in step.receives))
    found = prove_collective(with_step(good, 0, 2, summed)).violations
    assert (found[0].kind, found[0].rank, found[0].step) == (ViolationKind.DOUBLED, 0, 2)


def test_copying_a_partial_sum_loses_a_contribution():
    good = ring(3)
    step = good.rows[0][1]
    copied = step._replace(receives=tuple(r._replace(combine=Combine.COPY) for r in step.receives))
    found = prove_collective(with_step(good, 0, 1, copied)).violations
    assert found[0].kind is ViolationKind.RESULT
    assert "lacks the data of rank 0" in found[0].message


def test_swapped_peers_are_refused():
    good = build_collective("scatter", "naive", 3)
    first, second = good.rows[0]
    broken = with_step(good, 0, 0, first._replace(sends=(first.sends[0]._replace(peer=2),)))
    broken = with_step(broken, 0, 1, second._replace(sends=(second.sends[0]._replace(peer=1),)))
    assert [str(v) for v in prove_collective(broken).violations] == [
        "rank 2, step 0: copies chunk 2 from rank 0, which sends chunk 1 in its step 0",
        "rank 1, step 0: copies chunk 1 from rank 0, which sends chunk 2 in its step 1",
    ]


def test_wrong_chunk_on_both_sides_gives_a_wrong_result():
    """Rank 0 sends rank 2 the shard of rank 0 again instead of that of rank 1."""
    good = build_collective("all_gather", "naive", 3)
    broken = with_step(good, 0, 3, Step(3, (Send(2, 0, 1),), ()))
    broken = with_step(broken, 2, 1, Step(3, (), (Receive(0, 0, 1, Combine.COPY),)))
    assert [str(v) for v in prove_collective(broken).violations] == [
        "rank 2, step 1: chunk 1, never received, lacks the data of rank 1 at the end"
    ]


def test_sending_a_chunk_that_is_not_there_is_refused():
    good = build_collective("gather", "naive", 3)
    broken = with_step(good, 1, 0, Step(1, (Send(0, 2, 3),), ()))
    assert str(prove_collective(broken).violations[0]) == (
        "rank 1, step 0: sends chunk 2 to rank 0, but does not have chunk 2"
    )


def test_ranks_that_send_before_they_receive_deadlock_by_rendezvous():
    """Buffered sends would let it pass: each rank sends in one step and receives in the next."""
    good = build_collective("all_gather", "ring", 2)
    rows = tuple((Step(0, row[0].sends, ()), Step(1, (), row[0].receives)) for row in good.rows)
    found = prove_collective(replace(good, rows=rows)).violations
    assert [str(v) for v in found] == [
        "rank 0, step 0: sends chunk 0 to rank 1, which waits in its step 0",
        "rank 1, step 0: sends chunk 1 to rank 0, which waits in its step 0",
    ]
    assert {v.kind for v in found} == {ViolationKind.DEADLOCK}


def test_copy_over_a_chunk_that_the_step_sends_is_refused():
    good = build_collective("broadcast", "naive", 2)
    rows = (
        (Step(0, (Send(1, 0, 1),), (Receive(1, 0, 1, Combine.COPY),)),),
        (Step(0, (Send(0, 0, 1),), (Receive(0, 0, 1, Combine.COPY),)),),
    )
    assert ViolationKind.OVERLAP in kinds_of(replace(good, rows=rows))


@pytest.mark.parametrize("peer", [0, 9, -1])
def test_peer_that_is_no_other_rank_is_refused(peer):
    good = ring()
    broken = with_step(good, 0, 0, good.rows[0][0]._replace(sends=(Send(peer, 3, 4),)))
    assert "rank 0, step 0: sends chunk 3" in str(prove_collective(broken).violations[0])


def test_violations_are_limited():
    good = ring(9)
    empty = replace(good, rows=tuple(() for _ in good.rows))
    assert len(prove_collective(empty).violations) == MAX_VIOLATIONS


def mutate(schedule, data):
    """One message broken in one way, on one or both of its sides."""
    spots = [
        (rank, at, index)
        for rank, row in enumerate(schedule.rows)
        for at, step in enumerate(row)
        for index in range(len(step.receives))
    ]
    rank, at, index = data.draw(st.sampled_from(spots))
    step = schedule.rows[rank][at]
    receive = step.receives[index]
    change = data.draw(st.sampled_from(["drop", "peer", "chunk", "combine", "step"]))
    if change == "step":
        return with_step(schedule, rank, at, None)
    if change == "drop":
        new = ()
    elif change == "peer":
        new = (receive._replace(peer=(receive.peer + 1) % schedule.ranks),)
    elif change == "chunk":
        shift = 1 if receive.stop < schedule.chunks else -1
        new = (receive._replace(start=receive.start + shift, stop=receive.stop + shift),)
    else:
        other = Combine.COPY if receive.combine is Combine.REDUCE else Combine.REDUCE
        new = (receive._replace(combine=other),)
    return with_step(
        schedule, rank, at, step._replace(receives=step.receives[:index] + new + step.receives[index + 1 :])
    )


@settings(max_examples=150, deadline=None)
@given(pair=st.sampled_from(EVERY), ranks=st.integers(2, 9), data=st.data())
def test_a_broken_schedule_that_is_proved_gives_the_right_numbers(pair, ranks, data):
    """The prover accepts a change only if it does no harm (a repeated message, or one of no effect)."""
    op, algorithm = pair
    nodes = {"ranks_per_node": 2} if algorithm == "hierarchical" else {}
    good = build_collective(op, algorithm, ranks, **nodes)
    if good.chunks == 1:
        return
    broken = mutate(good, data)
    proof = prove_collective(broken)
    if not proof.proved:
        assert all(
            0 <= v.rank < ranks and str(v).startswith(f"rank {v.rank}, step ") for v in proof.violations
        )
        return
    elements = 4 * broken.chunks
    inputs = make_inputs(broken, elements)
    outputs = [buffer.copy() for buffer in inputs]
    run_schedule(broken, elements, outputs)
    assert wrong_chunks(broken, elements, inputs, outputs) == []

"""Faults are sentences: what is printed is read back, and nothing else is."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UserError
from meshwright.elastic.faults.schedule import (
    connect,
    fail,
    kill_supervisor,
    parse_fault,
    preempt,
    read_schedule,
    shift_clock,
    stop,
    stop_supervisor,
    write_schedule,
    wrong_collective,
)

FAULTS = [
    fail(rank=2, step=7, during="backward"),
    fail(rank=0, after_s=8.25),
    stop(rank=1, step=5, for_s=8),
    stop(rank=1, step=5, for_s=0.5, during="control all-reduce"),
    kill_supervisor(step=3, restart_after_s=5),
    stop_supervisor(step=3, for_s=20),
    preempt(step=3, grace_s=10),
    shift_clock(rank=3, step=4, by_s=-60),
    wrong_collective(rank=1, step=4, call="other op"),
    connect(step=10, connections=600),
]


def test_a_fault_reads_as_a_sentence():
    assert str(FAULTS[0]) == 'fail(rank=2, step=7, during="backward")'


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_printed_sentence_is_read_back(fault):
    assert parse_fault(str(fault)) == fault


def test_a_printed_schedule_is_read_back(tmp_path):
    path = tmp_path / "faults.txt"
    path.write_text(f"# seed 7\n\n{write_schedule(FAULTS)}")
    assert read_schedule(path) == FAULTS


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fail", "is not a fault"),
        ("fail(2, 7)", "is not a fault"),
        ("fail(rank=__import__('os').getpid(), step=1)", "is not a fault"),
        ("(lambda: fail)(rank=1)", "is not a fault"),
        ("fail(rank=1, step=2", "is not a fault"),
        ("explode(rank=1)", "no fault 'explode'"),
        ("fail(step=1)", "rank is missing"),
        ("fail(rank=1, step=1, for_s=2)", "for_s is missing or not an argument"),
        ("fail(rank=1)", "either step or after_s"),
        ("fail(rank=1, step=1, after_s=1.0)", "either step or after_s"),
        ("fail(rank=-1, step=1)", "rank must be an integer"),
        ("fail(rank=True, step=1)", "rank must be an integer"),
        ("fail(rank=1, step=0)", "step must be an integer"),
        ('fail(rank=1, step=1, during="lunch")', "during must be one of"),
        ("stop(rank=1, step=1, for_s=-2)", "for_s must be a number"),
        ('stop(rank=1, step=1, for_s="2")', "for_s must be a number"),
    ],
)
def test_other_sentences_are_refused_and_not_executed(text, part):
    with pytest.raises(UserError) as refused:
        parse_fault(text)
    assert part in str(refused.value)
    assert refused.value.problems[0].code == "faults-schedule"


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe\x00"])
def test_a_file_without_faults_is_refused(tmp_path, content):
    path = tmp_path / "faults.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="faults-schedule"):
        read_schedule(path)

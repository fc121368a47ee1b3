"""From one step to the next: a step's numbers are read before its update, and everything else is as it was.

There is no GPU here: what the host asks for, and in which order, is what a GPU's queue would see.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from meshwright.core.events import EVENTS_FILE, EventWriter
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import Ranks, Sums, join_ranks
from meshwright.plan.contract import build_plan
from meshwright.spec.load import load_job
from meshwright.train import loop
from meshwright.train.trainer import Session, build_session

STEPS = 8
ALONE = (
    "layout.micro_batch=4",
    "layout.dp_replicate=1",
    f"train.steps={STEPS}",
    "checkpoint.every_minutes=0",
)
CLOCKS = {"time", "step_s", "tokens_per_s", "mfu", "utilisation", "seconds", "path", "peak_flops_per_s"}
"""Of events: what two runs never have alike."""


class EnoughError(Exception):
    """Ends a run."""


def build_rank(job_file: Path, folder: Path, *overrides: str, listener=None) -> Session:
    plan, _ = build_plan(load_job(str(job_file), [*ALONE, *overrides]))
    folder.mkdir()
    counter = CollectiveCounter()
    assignment = Assignment(str(folder), plan.job.data.path, str(folder / "checkpoints"))
    events = EventWriter(folder / EVENTS_FILE, 0, listener=listener)
    return build_session(plan, assignment, join_ranks(plan.job, counter), counter, events)


def read_log(folder: Path) -> list[dict]:
    events = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in events]


def count_updates(session: Session) -> set[int]:
    return {int(state["step"]) for state in session.optimizer.state.values()}


@pytest.fixture
def early(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(loop, "reads_early", lambda session: True)


def note_order(session: Session, monkeypatch) -> list[list[str]]:
    """What each step asks of the device, in order; a list for each wait."""
    steps: list[list[str]] = [[]]

    def note(owner, name, said):
        honest = getattr(owner, name)

        def call(*given, **named):
            steps[-1].append(said)
            return honest(*given, **named)

        monkeypatch.setattr(owner, name, call)

    wait = Sums.wait
    monkeypatch.setattr(Sums, "wait", lambda sums: steps.append([]) or wait(sums))
    note(session.precision, "step", "update")
    note(session.feed, "prepare", "batch")
    note(Ranks, "begin_sum", "numbers")
    return steps


EARLY, WHOLE = ["numbers", "update", "batch"], ["update", "batch", "numbers"]


def test_numbers_are_asked_for_before_the_update_where_a_step_comes_next(
    job_file, tmp_path, monkeypatch, early
):
    """Not in the audited second step, before evaluations and checkpoints, and at the end."""
    session = build_rank(job_file, tmp_path / "run", "train.eval_every=4", "checkpoint.every_steps=6")
    steps = note_order(session, monkeypatch)
    loop.train(session)
    evaluation, last = ["numbers"], ["update", "numbers"]
    assert steps == [EARLY, WHOLE, EARLY, WHOLE, evaluation, EARLY, WHOLE, EARLY, last, evaluation, []]


def test_a_checkpoint_that_is_due_by_time_is_waited_for(job_file, tmp_path, monkeypatch):
    session = build_rank(job_file, tmp_path / "run")
    assert loop.goes_on(session)
    monkeypatch.setattr(Session, "save_due", lambda session: True)
    assert not loop.goes_on(session)


@pytest.mark.parametrize("more", [(), ("train.clip=0",), ("train.noise_scale_every=2",)])
def test_events_and_checkpoints_are_the_same(job_file, tmp_path, monkeypatch, more):
    """To the bit, in the same order; of runs with evaluations and checkpoints in between."""
    more = (*more, "train.eval_every=3", "checkpoint.every_steps=4")
    usual = build_rank(job_file, tmp_path / "usual", *more)
    loop.train(usual)
    monkeypatch.setattr(loop, "reads_early", lambda session: True)
    ahead = build_rank(job_file, tmp_path / "ahead", *more)
    loop.train(ahead)
    assert read_log(tmp_path / "ahead") == read_log(tmp_path / "usual")
    for file in ("model.safetensors", "optimizer.safetensors"):
        saved = [sorted((tmp_path / name / "checkpoints").glob(f"*/{file}")) for name in ("usual", "ahead")]
        assert [p.read_bytes() for p in saved[0]] == [p.read_bytes() for p in saved[1]]
        assert saved[0]


def test_whoever_listens_ends_the_run_after_the_step_it_hears_of(job_file, tmp_path, early):
    """The step is updated, and of the next one nothing has begun."""
    begun = []

    def hear(event):
        if event["event"] == "step":
            begun.append(count_updates(session))
            if event["step"] == 5:
                raise EnoughError

    session = build_rank(job_file, tmp_path / "run", listener=hear)
    with pytest.raises(EnoughError):
        loop.train(session)
    assert begun == [{step} for step in range(1, 6)]
    assert session.step == 5


@pytest.mark.parametrize("reads_early", [False, True])
def test_a_wish_to_stop_ends_the_run_at_the_same_step(job_file, tmp_path, monkeypatch, reads_early):
    """It is seen by the next step, which is saved."""
    monkeypatch.setattr(loop, "reads_early", lambda session: reads_early)

    def hear(event):
        if event["event"] == "step" and event["step"] == 3:
            session.stop_wanted = True

    session = build_rank(job_file, tmp_path / "run", listener=hear)
    loop.train(session)
    assert (session.step, session.saved_step, count_updates(session)) == (4, 4, {4})
    assert read_log(tmp_path / "run")[-1]["status"] == "interrupted"


def test_only_one_gpu_alone_reads_early(job_file, tmp_path):
    """Not a CPU, not one rank of several, not where the optimizer's state lies on the host."""
    session = build_rank(job_file, tmp_path / "run")
    assert not loop.reads_early(session)
    gpu = dataclasses.replace(session.ranks, device=torch.device("cuda", 0))
    session.ranks = gpu
    assert loop.reads_early(session)
    session.streamed = object()
    assert not loop.reads_early(session)
    session.streamed, session.ranks = None, dataclasses.replace(gpu, control=object())
    assert not loop.reads_early(session)

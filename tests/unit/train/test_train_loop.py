"""The end of a step: the loss may be read back before the optimizer step, with unchanged results.

These tests have no GPU. They check the order in which the CPU issues work to the device.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.core.events import EVENTS_FILE, EventWriter
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import ControlAllReduce, Mesh, init_mesh
from meshwright.plan.build import build_plan
from meshwright.spec.load import load_job
from meshwright.train import loop
from meshwright.train.build import build_trainer
from meshwright.train.rank_context import RankContext
from meshwright.train.trainer import Trainer
from saved_checkpoints import require_equal_files

STEPS = 8
ALONE = (
    "layout.micro_batch=4",
    "layout.dp_replicate=1",
    f"train.steps={STEPS}",
    "checkpoint.every_minutes=0",
)
CLOCKS = {
    "blocked_s",
    "bytes",  # of the manifest, which has times
    "copies",
    "time",
    "step_s",
    "tokens_per_s",
    "mfu",
    "utilisation",
    "seconds",
    "path",
    "peak_flops_per_s",
    "setup_s",
    "spent_s",
}
"""Fields of events that differ between two runs."""


class StopRunError(Exception):
    """Raised by a listener to end a run."""


def build_rank(job_file: Path, folder: Path, *overrides: str, listener=None) -> Trainer:
    """The trainer of a one-process run."""
    plan, _ = build_plan(load_job(str(job_file), [*ALONE, *overrides]))
    folder.mkdir()
    counter = CollectiveCounter()
    assignment = Assignment(str(folder), plan.job.data.path, str(folder / "checkpoints"))
    events = EventWriter(folder / EVENTS_FILE, 0, listener=listener)
    return build_trainer(RankContext(plan, assignment, init_mesh(plan.job, counter), counter, events))


def read_log(folder: Path) -> list[dict]:
    """The events of a run without times and paths."""
    events = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in events]


def count_updates(trainer: Trainer) -> set[int]:
    """The step counts of the optimizer state."""
    return {int(state["step"]) for state in trainer.optimizer.state.values()}


@pytest.fixture
def early(monkeypatch):
    """Read the loss early, as on a GPU."""
    monkeypatch.setattr(Trainer, "can_read_loss_early", lambda trainer: True)


def record_order(trainer: Trainer, monkeypatch) -> list[list[str]]:
    """The device work that each step issues, in order. A new list starts at each synchronization.

    A handle of the control all-reduce copies once: in ``wait`` at the latest.
    """
    steps: list[list[str]] = [[]]

    def record(owner, name, label):
        original = getattr(owner, name)

        def call(*given, **named):
            steps[-1].append(label)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, call)

    wait, copied = ControlAllReduce.wait, set()

    def start_copy(sums):
        if id(sums) not in copied:
            copied.add(id(sums))
            kept.append(sums)
            steps[-1].append("copy to the CPU")

    def synchronize(sums):
        values = wait(sums)
        steps.append([])
        return values

    kept: list[ControlAllReduce] = []
    monkeypatch.setattr(ControlAllReduce, "start_copy", start_copy)
    monkeypatch.setattr(ControlAllReduce, "wait", synchronize)
    record(trainer.amp, "step", "update")
    record(trainer.data.prefetcher, "prefetch", "prefetch")
    record(Mesh, "start_control_all_reduce", "control all-reduce")
    return steps


EARLY = ["control all-reduce", "copy to the CPU", "update", "prefetch"]
WHOLE = ["control all-reduce", "update", "prefetch", "copy to the CPU"]


def test_loss_is_read_before_the_update_if_another_step_follows(job_file, tmp_path, monkeypatch, early):
    """Exceptions are the audited second step, steps before evaluations and checkpoints, and the last step."""
    trainer = build_rank(job_file, tmp_path / "run", "train.eval_every=4", "checkpoint.every_steps=6")
    steps = record_order(trainer, monkeypatch)
    loop.train(trainer)
    evaluation = ["control all-reduce", "copy to the CPU"]
    last = ["control all-reduce", "update", "copy to the CPU"]
    assert steps == [EARLY, WHOLE, EARLY, WHOLE, evaluation, EARLY, WHOLE, EARLY, last, evaluation, []]


def test_checkpoint_due_by_time_waits_for_the_update(job_file, tmp_path, monkeypatch):
    trainer = build_rank(job_file, tmp_path / "run")
    assert loop.is_followed_by_step(trainer)
    monkeypatch.setattr(CheckpointSaver, "is_due_by_time", lambda saver: True)
    assert not loop.is_followed_by_step(trainer)


@pytest.mark.parametrize("more", [(), ("train.clip=0",), ("train.noise_scale_every=2",)])
def test_early_readback_changes_neither_events_nor_checkpoints(job_file, tmp_path, monkeypatch, more):
    """Runs with evaluations and checkpoints are bit-identical, with events in the same order."""
    more = (*more, "train.eval_every=3", "checkpoint.every_steps=4", "checkpoint.asynchronous=false")
    usual = build_rank(job_file, tmp_path / "usual", *more)
    loop.train(usual)
    monkeypatch.setattr(Trainer, "can_read_loss_early", lambda trainer: True)
    ahead = build_rank(job_file, tmp_path / "ahead", *more)
    loop.train(ahead)
    assert read_log(tmp_path / "ahead") == read_log(tmp_path / "usual")
    saved = [list_checkpoints(tmp_path / name / "checkpoints") for name in ("usual", "ahead")]
    assert saved[0]
    for one, other in zip(*saved, strict=True):
        require_equal_files(one, other)


def test_listener_can_end_the_run_after_the_reported_step(job_file, tmp_path, early):
    """The reported step is complete and the next one has not started."""
    updates = []

    def on_event(event):
        if event["event"] == "step":
            updates.append(count_updates(trainer))
            if event["step"] == 5:
                raise StopRunError

    trainer = build_rank(job_file, tmp_path / "run", listener=on_event)
    with pytest.raises(StopRunError):
        loop.train(trainer)
    assert updates == [{step} for step in range(1, 6)]
    assert trainer.step == 5


@pytest.mark.parametrize("can_read_loss_early", [False, True])
def test_stop_request_ends_the_run_at_the_same_step(job_file, tmp_path, monkeypatch, can_read_loss_early):
    """The next step sees the request, and its checkpoint is saved."""
    monkeypatch.setattr(Trainer, "can_read_loss_early", lambda trainer: can_read_loss_early)

    def on_event(event):
        if event["event"] == "step" and event["step"] == 3:
            trainer.stop.is_ordered = lambda: True

    trainer = build_rank(job_file, tmp_path / "run", listener=on_event)
    loop.train(trainer)
    assert (trainer.step, trainer.saver.saved_step, count_updates(trainer)) == (4, 4, {4})
    assert read_log(tmp_path / "run")[-1]["status"] == "interrupted"


def test_only_a_single_gpu_reads_the_loss_early(job_file, tmp_path):
    """A CPU, one of several ranks, and offloaded optimizer state do not."""
    trainer = build_rank(job_file, tmp_path / "run")
    assert not trainer.can_read_loss_early()
    gpu = dataclasses.replace(trainer.mesh, device=torch.device("cuda", 0))
    trainer.mesh = gpu
    assert trainer.can_read_loss_early()
    trainer.offloaded_state = object()
    assert not trainer.can_read_loss_early()
    trainer.offloaded_state, trainer.mesh = None, dataclasses.replace(gpu, control=object())
    assert not trainer.can_read_loss_early()

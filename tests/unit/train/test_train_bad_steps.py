"""Bad steps: which steps are bad, and that they change no state of a one-process run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.divergence import DivergedError
from meshwright.core.events import EVENTS_FILE, EventWriter, read_events
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import init_mesh
from meshwright.plan.build import build_plan
from meshwright.spec.load import load_job
from meshwright.train import loop
from meshwright.train.bad_step_policy import MAX_IN_A_ROW, BadStepPolicy, RollbackError
from meshwright.train.bad_steps import MIN_STEPS, WINDOW, is_bad, keep_norm, median_norm, spike_limit
from meshwright.train.build import build_trainer
from meshwright.train.rank_context import RankContext
from meshwright.train.trainer import Trainer

ALONE = ("layout.micro_batch=4", "layout.dp_replicate=1", "checkpoint.every_minutes=0", "train.steps=14")
SPIKE = 2.0**20


def is_bad_step(loss, norm, limit=100.0, scaled=False):
    return bool(is_bad(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm), limit, scaled))


def test_values_that_are_not_finite_and_norms_above_the_limit_are_bad():
    assert not is_bad_step(1.0, 99.0)
    assert is_bad_step(1.0, 101.0)
    assert is_bad_step(math.nan, 1.0)
    assert is_bad_step(math.inf, 1.0)
    assert is_bad_step(1.0, math.nan)
    assert is_bad_step(1.0, math.inf, limit=math.inf)


def test_in_fp16_a_norm_that_is_not_finite_is_an_overflow_and_not_bad():
    assert not is_bad_step(1.0, math.inf, scaled=True)
    assert not is_bad_step(1.0, math.nan, scaled=True)
    assert is_bad_step(math.nan, math.nan, scaled=True)
    assert is_bad_step(1.0, 101.0, scaled=True)


def test_a_spike_needs_eight_good_steps_and_a_factor():
    norms = [2.0, 1.0, 3.0] * 4
    assert spike_limit(norms, 1000.0) == 2000.0
    assert spike_limit(norms[: MIN_STEPS - 1], 1000.0) == math.inf
    assert spike_limit([0.0] * 20, 1000.0) == math.inf
    assert spike_limit(norms, 0.0) == math.inf


def test_the_median_is_over_the_last_norms():
    norms = []
    for norm in [100.0] * WINDOW + [1.0] * WINDOW:
        norms = keep_norm(norms, norm)
    assert (len(norms), median_norm(norms)) == (WINDOW, 1.0)


@pytest.fixture
def build(job_file, tmp_path):
    """``build(*overrides)``: the trainer of a one-process run."""

    def run(*overrides: str) -> Trainer:
        plan, _ = build_plan(load_job(str(job_file), [*ALONE, *overrides]))
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        counter = CollectiveCounter()
        assignment = Assignment(str(folder), plan.job.data.path, str(folder / "checkpoints"))
        events = EventWriter(folder / EVENTS_FILE, 0)
        return build_trainer(RankContext(plan, assignment, init_mesh(plan.job, counter), counter, events))

    return run


@pytest.fixture
def disturb(monkeypatch):
    """``disturb(factor, steps)``: multiplies the gradients of these steps; records the state around them."""
    states = []

    def install(factor, steps):
        original = Trainer.update

        def update(trainer, *args):
            if trainer.step + 1 not in steps:
                return original(trainer, *args)
            for parameter in trainer.model.parameters():
                parameter.grad.mul_(factor)
            before = [tensor.clone() for tensor in list_state(trainer)]
            norm = original(trainer, *args)
            states.append((before, [tensor.clone() for tensor in list_state(trainer)]))
            return norm

        monkeypatch.setattr(Trainer, "update", update)
        return states

    return install


def list_state(trainer):
    """Parameters, optimizer state and loss scale."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    scale = torch.tensor(list((trainer.amp.state_dict() or {}).values()))
    return [*(p.detach() for p in trainer.model.parameters()), *moments, scale]


def read(trainer, name):
    folder = trainer.assignment.run_dir
    return [e for e in read_events(Path(folder) / EVENTS_FILE).events if e["event"] == name]


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("muon", "fp32"),
        ("adamw", "fp16 train.loss_scale=8"),
        pytest.param("adamw", "fp32", marks=pytest.mark.slow),
        pytest.param("muon", "fp16 train.loss_scale=8", marks=pytest.mark.slow),
    ],
)
def test_a_spike_changes_no_state_and_the_run_goes_on(build, disturb, precision, optimizer):
    """Parameters, moments, step counts and loss scale. The position in the data goes on."""
    trainer = build(*f"train.precision={precision} train.optimizer={optimizer}".split())
    states = disturb(SPIKE, {10})
    loop.train(trainer)
    ((before, after),) = states
    assert all(map(torch.equal, before, after))
    assert (trainer.step, trainer.state.position) == (14, 14 * trainer.job.train.global_batch)
    kinds = {e["step"]: (e["bad_step"], e["skipped"]) for e in read(trainer, "step")}
    assert kinds.pop(10) == ("spike", True)
    assert set(kinds.values()) == {(None, None if precision == "fp32" else False)}
    (event,) = read(trainer, "grad_spike")
    assert (event["step"], event["action"], event["ranks"]) == (10, "skip", []), "it does not come back"


def test_a_gradient_that_is_not_finite_is_skipped_and_named(build, disturb):
    trainer = build()
    states = disturb(math.nan, {3})
    loop.train(trainer)
    ((before, after),) = states
    assert all(map(torch.equal, before, after))
    (event,) = read(trainer, "not_finite")
    assert (event["step"], event["action"], event["module"]) == (3, "skip", None)
    assert trainer.step == 14


IMAGES = """
[model]
preset = "resnet-tiny"
image_size = 16
norm = "batch"
[data]
path = "builtin:synthetic-images"
[train]
steps = 14
global_batch = 4
[cluster]
device = "cpu"
devices_per_node = 2
matmul_flops_per_s = 1e11
"""


def test_a_bad_step_does_not_change_the_statistics_of_batch_norms(build, disturb, job_file):
    """Neither its forward pass does, nor the recomputed one that names the cause."""
    job_file.write_text(IMAGES)
    trainer, found = build(), []
    disturb(math.nan, {3})
    for _ in range(4):
        found.append([buffer.clone() for buffer in trainer.model.buffers()])
        result = loop.run_step(trainer, loop.start_meter(trainer), audited=False)
        BadStepPolicy().after_step(trainer, result.bad)
    found.append([buffer.clone() for buffer in trainer.model.buffers()])
    changed = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(found)]
    assert (changed, bool(found[0])) == ([True, True, False, True], True)


def test_bad_steps_in_a_row_end_the_run(build, disturb):
    trainer = build()
    disturb(math.nan, range(3, 14))
    with pytest.raises(
        DivergedError, match=f"at step {3 + MAX_IN_A_ROW}.*{MAX_IN_A_ROW + 1} bad steps in a row"
    ):
        loop.train(trainer)


@pytest.mark.parametrize(
    ("factor", "step", "code"), [(math.nan, 3, "train-not-finite"), (SPIKE, 10, "train-grad-spike")]
)
def test_stop_ends_the_run_at_the_first_bad_step(build, disturb, factor, step, code):
    trainer = build("train.on_bad_step=stop")
    disturb(factor, {step})
    with pytest.raises(DivergedError, match=f"at step {step}") as caught:
        loop.train(trainer)
    assert caught.value.problems[0].code == code
    assert not isinstance(caught.value, RollbackError)


def test_a_rollback_names_the_position_after_the_bad_step(build, disturb):
    trainer = build("train.on_bad_step=rollback")
    disturb(math.inf, {3})
    with pytest.raises(RollbackError) as caught:
        loop.train(trainer)
    assert caught.value.position == 3 * trainer.job.train.global_batch


def test_a_bad_step_does_not_change_the_norms_of_the_median(build, disturb):
    trainer = build()
    disturb(SPIKE, {10})
    loop.train(trainer)
    norms = [e["grad_norm"] for e in read(trainer, "step") if e["bad_step"] is None]
    assert trainer.state.grad_norms == norms


def test_without_a_factor_no_spike_is_bad(build, disturb):
    trainer = build("train.spike_factor=0")
    disturb(SPIKE, {10})
    loop.train(trainer)
    assert {e["bad_step"] for e in read(trainer, "step")} == {None}

"""Progress of a run without a terminal: plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshwright.cli.progress import ProgressView
from meshwright.spec.load import load_job

STEP = {"event": "step", "rank": 0, "step": 1, "tokens_per_s": 10.0, "mfu": 0.1, "utilisation": None}
READY = {"event": "ready", "rank": 0, "step": 0}


@pytest.fixture
def shown(good):
    """``shown(event, ..., overrides=[...])``: the printed lines."""

    def show(*events, overrides=()):
        page = io.StringIO()
        console = Console(file=page, markup=False, highlight=False, soft_wrap=True, width=140)
        view = ProgressView(console, load_job(good, overrides))
        for event in events:
            view.feed(event)
        return page.getvalue().splitlines()

    return show


@pytest.mark.parametrize(
    ("loss", "tokens", "says"),
    [
        (2.5, 64, "loss 2.500 "),
        (None, 64, "loss not finite "),
        (float("nan"), 64, "loss not finite "),
        (None, 0, "loss none (no target tokens) "),
    ],
)
def test_a_step_without_a_finite_loss_has_a_reason(shown, loss, tokens, says):
    (line,) = shown({**STEP, "loss": loss, "tokens": tokens})
    assert says in line


def test_a_nonfinite_evaluation_loss_is_marked(shown):
    (line,) = shown({"event": "eval", "rank": 0, "step": 2, "loss": None, "samples": 1})
    assert line == "step 2: held-out loss not finite on 1 sample"


def test_gemm_autotuning_is_reported_at_its_start_and_end(shown):
    started = {"event": "gemm_autotune_started", "rank": 0, "shapes": 15}
    finished = {
        "event": "gemm_autotune",
        "rank": 0,
        "tuned": 15,
        "cached": 3,
        "changed": 11,
        "gain": 0.021,
        "seconds": 24.0,
    }
    assert shown(started, {**started, "rank": 1}, finished, {**finished, "rank": 1}) == [
        "autotuning 15 GEMM shapes: about 2 s each, once per GPU model",
        "GEMM autotuning: 11 of 18 shapes use another algorithm, 2.1% less GEMM time (24.00 s)",
    ]


def test_compilation_is_announced_before_the_first_step(shown):
    assert shown(READY) == []
    compiled = ["train.block_backend=compile", "train.compile_backend=aot_eager"]
    assert shown(READY, {**READY, "rank": 1}, overrides=compiled) == [
        "compiling with aot_eager: the first step takes longer"
    ]


def test_a_step_is_one_line_with_loss_lr_grad_norm_speed_and_eta(shown):
    step = {**STEP, "step": 4, "loss": 5.4306, "tokens": 64, "lr": 3e-4, "grad_norm": 1.92}
    (line,) = shown({**step, "tokens_per_s": 38_700.0, "mfu": 0.072})
    assert line == "step 4/4  loss 5.431  lr 3.0e-4  grad norm 1.92  38.7k tok/s  MFU 7.2%  ETA 0s"


FREQUENT = ["train.steps=10", "train.eval_every=1", "checkpoint.every_steps=1"]
EVALUATED = {"event": "eval", "rank": 0, "step": 1, "samples": 8, "loss": 5.5}
SAVED = {"event": "checkpoint", "rank": 0, "step": 1, "path": "c", "bytes": 1, "seconds": 0.1}


def test_frequent_evaluations_and_checkpoints_are_added_to_step_lines(shown):
    """They have no lines of their own; those of the last step, which no step follows, share one."""
    step = {**STEP, "loss": 5.4, "tokens": 64}
    named = {**EVALUATED, "set": "old", "loss": 4.25}
    first, second = shown(step, EVALUATED, named, SAVED, {**step, "step": 2}, overrides=FREQUENT)
    assert first.startswith("step 1/10  loss 5.400")
    assert second.endswith("ETA 0s  (step 1: held-out loss 5.5000, old 4.2500, saved)")
    (last,) = shown({**EVALUATED, "step": 10}, {**SAVED, "step": 10}, overrides=FREQUENT)
    assert last == "step 10: held-out loss 5.5000, saved"
    seldom = ["train.steps=10", "train.eval_every=5", "checkpoint.every_steps=5"]
    assert len(shown(step, EVALUATED, named, SAVED, {**step, "step": 2}, overrides=seldom)) == 5


def test_frequent_evaluations_stay_above_the_bar_of_a_terminal(good):
    page = io.StringIO()
    console = Console(file=page, force_terminal=True, markup=False, highlight=False, width=140)
    view = ProgressView(console, load_job(good, FREQUENT))
    with view.shown():
        for event in (EVALUATED, SAVED, {**STEP, "step": 2, "loss": 5.4, "tokens": 64}):
            view.feed(event)
    assert "step 1: held-out loss 5.5000, saved" in page.getvalue()

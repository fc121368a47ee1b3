"""Trackers: curves equal the events; a tracker that fails, hangs or lags is disabled."""

from __future__ import annotations

import sys
import threading
import types
from importlib.util import find_spec

import pytest

from meshwright.report import trackers
from meshwright.report.scalars import scalars_of
from meshwright.report.trackers import GuardedTracker, MlflowTracker, RunOutcome, WandbTracker, flatten

STEPS = [
    {"event": "step", "rank": 0, "time": 10.0 + n, "step": n, "loss": 6.0 - n, "lr": 0.1, "grad_norm": None}
    for n in (1, 2, 3)
]
EVENTS = [
    *STEPS,
    {"event": "step", "rank": 1, "time": 11.0, "step": 1, "loss": -1.0},
    {"event": "eval", "rank": 0, "time": 14.0, "step": 3, "loss": 3.5, "samples": 8},
]
ENDING = RunOutcome("complete", {"status": "complete", "eval_loss": 3.5, "losses": [5.0, 4.0, 3.0]})
SERVERS = ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI")


class Recorder:
    """A tracker that records its calls and runs ``log`` in each one."""

    def __init__(self, log=lambda: None) -> None:
        self.calls: list[object] = []
        self._do = log

    def start(self) -> None:
        self.calls.append("start")

    def log(self, step, when, scalars) -> None:
        self.calls.append((step, when, scalars))
        self._do()

    def finish(self, ending) -> None:
        self.calls.append(ending)


def feed(tracker: GuardedTracker) -> None:
    """Send all events to the tracker."""
    for event in EVENTS:
        tracker.feed(event)


def test_scalars_are_those_of_rank_0():
    assert scalars_of(STEPS[0]) == {"loss/train": 5.0, "optimizer/lr": 0.1}
    assert scalars_of({**STEPS[0], "rank": 1}) == {}
    assert scalars_of({"event": "eval", "rank": 0, "step": 3, "loss": 3.5}) == {"loss/eval": 3.5}
    assert scalars_of({"event": "eval", "rank": 0, "step": 3, "loss": None}) == {}
    assert scalars_of({"event": "ready", "rank": 0, "step": 0}) == {}


def test_unknown_numeric_field_becomes_a_scalar():
    event = {**STEPS[0], "skipped": True, "new_figure": 8.5, "note": "text", "tokens": 9, "step_s": 1.0}
    assert scalars_of(event) == {
        "loss/train": 5.0,
        "optimizer/lr": 0.1,
        "step/skipped": 1.0,
        "step/new_figure": 8.5,
    }


def test_tracker_calls_are_ordered_and_from_one_thread():
    threads = set()
    recorder, warnings = Recorder(lambda: threads.add(threading.get_ident())), []
    tracker = GuardedTracker("T", recorder, warnings.append)
    feed(tracker)
    tracker.close(ENDING)
    assert [call if isinstance(call, str | RunOutcome) else call[0] for call in recorder.calls] == [
        "start",
        1,
        2,
        3,
        3,
        ENDING,
    ]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert warnings == []


@pytest.mark.parametrize("error", [RuntimeError("no such host\nmore"), SystemExit(3)])
def test_failing_tracker_is_disabled_with_one_warning(error):
    def fail() -> None:
        raise error

    recorder, warnings = Recorder(fail), []
    tracker = GuardedTracker("T", recorder, warnings.append)
    feed(tracker)
    tracker.close(ENDING)
    assert len([call for call in recorder.calls if isinstance(call, tuple)]) == 1, "not called again"
    assert warnings == [f"T failed: {str(error).splitlines()[0]}; disabled, training continues"]


def test_hanging_tracker_is_disabled():
    release, warnings = threading.Event(), []
    tracker = GuardedTracker("T", Recorder(release.wait), warnings.append)
    feed(tracker)
    tracker.close(ENDING, timeout_s=0.05)
    release.set()
    assert warnings == ["T did not finish within 0 s; disabled, training continues"]


def test_lagging_tracker_is_disabled(monkeypatch):
    monkeypatch.setattr(trackers, "QUEUE_LENGTH", 2)
    release, warnings = threading.Event(), []
    tracker = GuardedTracker("T", Recorder(release.wait), warnings.append)
    for _ in range(10):
        feed(tracker)
    tracker.close(ENDING)
    release.set()
    assert warnings == ["T is 2 steps behind; disabled, training continues"]


def test_flatten_gives_dotted_keys():
    assert flatten({"a": 1, "b": {"c": {"d": "x"}}}) == [("a", 1), ("b.c.d", "x")]


@pytest.fixture
def offline(monkeypatch):
    """No tracking server and no account in the environment."""
    for name in SERVERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def run_tracker(name, tracker, page) -> list[str]:
    """Feed all events to a tracker and close it; returns the warnings."""
    page.write_text("<html></html>")
    warnings: list[str] = []
    guarded = GuardedTracker(name, tracker, warnings.append)
    feed(guarded)
    guarded.close(RunOutcome(ENDING.status, ENDING.summary, page))
    return warnings


@pytest.mark.filterwarnings("ignore")
def test_mlflow_stores_the_run_in_its_folder(plan, tmp_path, offline):
    """The test reads it with MLflow's client."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    assert run_tracker("MLflow", MlflowTracker("exp", plan.job, tmp_path), tmp_path / "report.html") == []
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(m.step, m.value, m.timestamp) for m in history] == [
        (1, 5.0, 11000),
        (2, 4.0, 12000),
        (3, 3.0, 13000),
    ]
    assert run.data.params["train.global_batch"] == "8"
    assert (run.info.status, run.data.tags["summary.eval_loss"]) == ("FINISHED", "3.5")
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_an_offline_run(plan, tmp_path, offline):
    pytest.importorskip("wandb")
    assert (
        run_tracker("W&B", WandbTracker("proj", plan.job, tmp_path, pytest.fail), tmp_path / "report.html")
        == []
    )
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    content = log.read_bytes()
    assert b"loss/train" in content
    assert b"loss/eval" in content
    assert b"global_batch" in content
    assert (folder / "files" / "report.html").read_text() == "<html></html>"


class FakeRun:
    """Records what W&B would receive."""

    def __init__(self, folder) -> None:
        self.dir, self.summary, self.logged, self.ended = str(folder), {}, [], None

    def log(self, scalars, step) -> None:
        self.logged.append((step, scalars))

    def finish(self, exit_code) -> None:
        self.ended = exit_code


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the real one is tested above")
@pytest.mark.parametrize(
    ("environment", "reached", "modes"),
    [
        ({}, True, ["offline"]),
        ({"WANDB_API_KEY": "k"}, True, ["online"]),
        ({"WANDB_API_KEY": "k"}, False, ["online", "offline"]),
        ({"WANDB_MODE": "disabled"}, True, ["disabled"]),
    ],
)
def test_wandb_is_offline_without_a_key_or_server(
    plan, tmp_path, offline, monkeypatch, environment, reached, modes
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    requested_modes, run = [], FakeRun(tmp_path)
    fake = types.ModuleType("wandb")
    fake.errors = types.SimpleNamespace(CommError=type("CommError", (Exception,), {}))
    fake.Settings = lambda **settings: settings

    def init(**settings):
        requested_modes.append(settings["mode"])
        if settings["mode"] == "online" and not reached:
            raise fake.errors.CommError("no such host")
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    warnings: list[str] = []
    source = tmp_path / "elsewhere"
    source.mkdir()
    tracker = WandbTracker("proj", plan.job, tmp_path, warnings.append)
    assert run_tracker("W&B", tracker, source / "report.html") == []
    assert requested_modes == modes
    assert bool(warnings) is not reached
    assert run.logged[0] == (1, {"loss/train": 5.0, "optimizer/lr": 0.1})
    assert run.logged[-1] == (3, {"loss/eval": 3.5})
    assert (run.ended, run.summary["eval_loss"], "losses" in run.summary) == (0, 3.5, False)

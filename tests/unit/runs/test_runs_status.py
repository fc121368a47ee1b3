"""Health and metrics of a run, from its events: state, verdict, and the text format of Prometheus."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from meshwright.audit.record import RunRecord
from meshwright.core.errors import UserError
from meshwright.elastic.rank_view import State
from meshwright.report.prometheus import MetricText
from meshwright.runs.reporter import SILENT
from meshwright.runs.status import TOKEN_FILE, RunStatus, serving_status

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"([a-z_][a-z0-9_]*)(?:\{{{LABEL}(?:,{LABEL})*\}})? (-?[0-9.e+-]+|NaN|[+-]Inf)")


def parse(text):
    """The samples of a text in Prometheus' format, by name and labels; fails where the format is wrong."""
    found, types = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, f"{name} has two types"
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == list(types)[-1], "samples of a metric follow its type"
        assert (types[match[1]] == "counter") == match[1].endswith("_total")
        key = line.rpartition(" ")[0]
        assert key not in found, f"{key} is there twice"
        found[key] = float(match[2])
    return found


def event(name, rank=0, generation=0, **fields):
    return {"v": 1, "event": name, "time": 100.0, "rank": rank, "generation": generation, **fields}


def step(number, rank=0, generation=0, **fields):
    spent = {"compute": 0.5, "data": 0.0, "storage": 0.0, "preempted": 0.0, "waiting": 0.25}
    figures = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "step_s": 0.75, "tokens_per_s": 85.3}
    known = {"mfu": 0.25, "memory_bytes": None, "spent_s": spent}
    return event("step", rank, generation, step=number, **figures, **known, **fields)


STRAGGLER = event(
    "straggler", 1, host='a"b\\c\nd', phase="compute", lateness_s=0.5, share=0.3, slowdown=1.5,
    preempted=False, since_step=3, step=20, action="none",
)  # fmt: skip


@pytest.fixture
def status():
    layout = SimpleNamespace(named_degrees=lambda: "dp_replicate=2")
    train = SimpleNamespace(steps=100)
    plan = SimpleNamespace(job=SimpleNamespace(name="job", unit="tokens", layout=layout, train=train))
    supervisor = SimpleNamespace(state=State.RUNNING, generation=0, world_size=2, count_alive=lambda: 2)
    return RunStatus(plan, RunRecord(), supervisor)


def health(status):
    reply = status.health()
    return reply.status, json.loads(reply.body)


def test_a_run_is_healthy_from_its_start(status):
    assert health(status)[0] == 200
    assert health(status)[1]["last_step_age_s"] is None
    parse(status.metrics().body)
    status.feed(step(1))
    code, facts = health(status)
    assert (code, facts["step"], facts["steps"], facts["ranks_alive"]) == (200, 1, 100, 2)
    assert 0 <= facts["last_step_age_s"] < 60


def test_a_hang_is_unhealthy_until_the_next_step(status):
    status.feed(step(1))
    status.feed(event("hang", 1, verdict="rank 1 has been stopped", cause="stopped", step=2))
    code, facts = health(status)
    assert (code, facts["ok"], facts["verdict"]) == (503, False, "rank 1 has been stopped")
    assert parse(status.metrics().body)["meshwright_hung"] == 1
    status.feed(step(2))
    assert health(status)[0] == 200


def test_what_somebody_asked_for_is_no_hang(status):
    status.feed(event("hang", 0, verdict="no rank is stuck", cause="running", step=2))
    assert health(status)[0] == 200


@pytest.mark.parametrize("state", [State.HALTING, State.REGROUPING, State.FAILED])
def test_a_run_that_recovers_is_unhealthy(status, state):
    status._supervisor.state = state
    assert health(status)[0] == 503
    assert parse(status.metrics().body)["meshwright_healthy"] == 0


def test_waiting_is_healthy_before_the_first_failure_only(status):
    status._supervisor.state = State.WAITING
    assert health(status)[0] == 200
    status.feed(event("rank_lost", failed_rank=1, how="killed", reason="regroup"))
    assert health(status)[0] == 503


def test_metrics_follow_the_events(status):
    for number in (1, 2):
        for rank in (0, 1):
            status.feed(step(number, rank))
    status.feed(
        event("state", 1, step=2, state_bytes={}, activation_bytes=1, peak_bytes=4096, first_step=False)
    )
    status.feed(event("eval", step=2, set=None, loss=3.5, samples=8, seconds=0.1))
    status.feed(event("eval", step=2, set="wiki", loss=3.0, samples=8, seconds=0.1))
    status.feed(event("checkpoint", step=2, path="c", bytes=1, seconds=0.2, blocked_s=0.1))
    status.feed(STRAGGLER)
    status.feed(event("rank_lost", failed_rank=1, how="killed", reason="regroup"))
    recovered = {"restored_step": 2, "replayed_steps": 0, "seconds": 1.0, "halt_s": 0.25}
    status.feed(event("recovered", generation=1, failed_rank=1, how="killed", source="snapshot", **recovered))
    found = parse(status.metrics().body)
    assert found["meshwright_step"] == 2
    assert found["meshwright_loss"] == 2.5
    assert found["meshwright_tokens_per_second"] == 85.3
    assert found['meshwright_state{state="running"}'] == 1
    assert found['meshwright_eval_loss{set="held-out"}'] == 3.5
    assert found['meshwright_eval_loss{set="wiki"}'] == 3.0
    assert found['meshwright_memory_bytes{rank="1"}'] == 4096
    assert found['meshwright_spent_seconds_total{rank="1",kind="compute"}'] == 1.0
    assert found['meshwright_spent_seconds_total{rank="1",kind="waiting"}'] == 0.5
    assert found["meshwright_checkpoints_total"] == 1
    assert found["meshwright_checkpoint_step"] == 2
    assert found["meshwright_failures_total"] == found["meshwright_recoveries_total"] == 1
    assert found['meshwright_recovery_seconds_total{part="halt"}'] == 0.25
    assert found["meshwright_stragglers_total"] == 1
    assert found[r'meshwright_straggler_lateness_seconds{rank="1",host="a\"b\\c\nd",phase="compute"}'] == 0.5
    status.feed(event("straggler_recovered", 1, generation=1, since_step=3, step=40, replaced=False))
    assert not any("lateness" in key for key in parse(status.metrics().body))


def test_values_that_are_not_finite_are_written():
    text = MetricText("x")
    text.add("a", "gauge", "A\nline.", float("nan"))
    text.add("b", "gauge", "B.", float("-inf"))
    text.add("c", "gauge", "C.", None)
    assert (
        text.render()
        == "# HELP x_a A\\nline.\n# TYPE x_a gauge\nx_a NaN\n# HELP x_b B.\n# TYPE x_b gauge\nx_b -Inf\n"
    )


def test_an_address_that_cannot_be_used_is_an_error_or_a_warning(status, tmp_path):
    """The ranks of an adopted run go on without the pages."""
    elastic = SimpleNamespace(metrics="192.0.2.1:9400", metrics_token_file=None)
    job = SimpleNamespace(elastic=elastic)
    with pytest.raises(UserError, match="metrics-address"), serving_status(job, tmp_path, status, SILENT):
        pass
    with serving_status(job, tmp_path, status, SILENT, required=False):
        pass
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600

"""``meshwright simulate``: tables, JSON, pictures, a trace, and arguments that are refused."""

from __future__ import annotations

import json

import pytest

JOB = ("simulate", "failures", "llama3-8b", "--on", "64x8xh100-sxm", "--days", 30, "--runs", 200)


def test_prints_outcomes_choices_and_assumptions(cli):
    found = cli(*JOB)
    assert found.status == 0
    for words in ("goodput", "interruptions", "hours lost: checkpoints", "waiting for nodes", "spare node",
                  "Daly's interval", "cost:", "assumed: failures", "first-order formula"):  # fmt: skip
        assert words in found.out, words


def test_json_has_ranges_trials_and_reasons(cli, tmp_path):
    picture = tmp_path / "plot.svg"
    found = cli(*JOB, "--seed", 3, "--observed-goodput", 0.5, "--out", picture, "--json").json
    assert found["goodput"]["low"] <= found["goodput"]["mean"] <= found["goodput"]["high"]
    lost = sum(hours["mean"] for hours in found["lost_hours"].values())
    assert found["goodput"]["mean"] == pytest.approx(1 - lost / 720)
    assert found["best_interval_s"] in [point["interval_s"] for point in found["intervals"]]
    assert found["model"]["spares"] == found["best_spares"]
    mtbf_s = found["model"]["mean_time_between_failures_s"]
    assert found["inferred_lost_per_failure_s"] == pytest.approx(mtbf_s / 2)
    drawn = picture.read_text()
    assert "Goodput over the checkpoint interval" in drawn
    assert "used:" in drawn
    assert "Lost time" in drawn


def test_a_run_without_failures_can_be_drawn(cli, tmp_path):
    rates = [text for kind in ("device", "node", "switch", "software") for text in ("--rate", f"{kind}=0")]
    found = cli(*JOB, *rates, "--out", tmp_path / "plot.svg")
    assert found.status == 0
    assert "nothing fails" in found.out
    assert (tmp_path / "plot.svg").exists()


def test_an_inferred_figure_is_called_inferred(cli):
    assert "inferred, not simulated" in cli(*JOB, "--observed-goodput", 0.59).out


def test_rates_are_given_by_kind(cli):
    found = cli(*JOB, "--rate", "device=2", "--rate", "software=0", "--json").json
    assert found["model"]["rates_per_s"]["device"] == pytest.approx(64 * 2 / 1000 / 86_400)
    assert found["model"]["rates_per_s"]["software"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--days", 0), "--days=0.0 must be more than 0"),
        (("--days", -1), "simulate-days"),
        (("--rate", "device=-1"), "simulate-rate"),
        (("--rate", "device"), "is not a failure rate"),
        (("--rate", "device=fast"), "simulate-rate"),
        (("--repair-hours", -1), "--repair-hours"),
        (("--repair", "soon"), "is not one of fixed, exponential"),
        (("--min-nodes", 1), "--min-nodes=1 has no effect without --replan"),
        (("--price-factor", 0.5), "needs a rate of preemptions"),
        (("--observed-goodput", 2), "--observed-goodput=2.0 must be between 0 and 1"),
        (("-o", "/nonexistent/x.svg"), "picture-not-written"),
        (("--price-factor", 0.4), "--rate preemption=20"),
        (("--out", "plot.txt"), "picture-kind"),
    ],
)
def test_bad_arguments_end_with_status_2(cli, arguments, words):
    found = cli("simulate", "failures", "tiny", "--runs", 5, *arguments)
    assert found.status == 2
    assert words in found.err


def test_a_long_interval_is_a_warning(cli):
    found = cli(*JOB, "--every-minutes", 100_000)
    assert found.status == 0
    assert "warning: the checkpoint interval" in found.err


def test_every_option_reaches_the_model(cli):
    found = cli(
        *JOB, "--replan", "--min-nodes", 4, "--nodes-per-replica", 2, "--nodes-per-switch", 3, "--repair",
        "exponential", "--snapshot-minutes", 2, "--snapshot-cost-s", 1.5, "--rate", "preemption=10",
        "--price-factor", 0.5, "--notice-s", 7, "--replace-hours", 2, "--json",
    ).json  # fmt: skip
    expected = {
        "replans": True, "min_nodes": 4, "nodes_per_replica": 2, "nodes_per_switch": 3,
        "repair": "exponential", "snapshot_s": 120, "snapshot_cost_s": 1.5, "notice_s": 7, "replace_s": 7200,
    }  # fmt: skip
    assert {key: found["model"][key] for key in expected} == expected
    assert found["price_factor"] == 0.5
    assert found["on_demand"]["price_factor"] == 1
    lost = sum(hours["mean"] for hours in found["lost_hours"].values())
    assert found["goodput"]["mean"] == pytest.approx(1 - lost / 720)


def test_options_add_their_rows_and_the_comparison(cli):
    found = cli(*JOB, "--replan", "--min-nodes", 4, "--snapshot-minutes", 2, "--rate", "preemption=10").out
    for words in ("hours lost: fewer nodes", "hours lost: snapshots", "without preemption: goodput"):
        assert words in found, words
    plain = cli(*JOB).out
    assert "fewer nodes" not in plain
    assert "snapshots" not in plain


STEP = (
    "simulate", "step", "llama3-8b", "layout.pp=4", "layout.tp=2", "layout.dp_shard=2",
    "layout.micro_batch=1", "train.global_batch=16", "--on", "2x8xh100-sxm",
)  # fmt: skip


def test_step_prints_lanes_and_writes_picture_and_trace(cli, tmp_path):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    found = cli(*STEP, "-o", picture, "--trace", trace, "--pp-ranks", "0,3")
    assert found.status == 0
    for words in ("pp rank 3", "tensor parallel", "bubble", "as planned", "overlapped with compute"):
        assert words in found.out, words
    drawn = picture.read_text()
    assert "pp rank 3" in drawn
    assert "pp rank 1" not in drawn
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 3}


def test_step_json_is_the_plan(cli):
    found = cli(*STEP, "--json").json
    planned = cli("plan", *STEP[2:], "--json").json["layouts"][0]
    assert found["step_s"] == pytest.approx(planned["step_s"], rel=1e-9)
    assert found["breakdown_s"] == pytest.approx(planned["breakdown_s"], rel=1e-9)
    assert len(found["lanes"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pp-ranks", "4"), "the layout has pp ranks 0 to 3"),
        (("--pp-ranks", "a"), "simulate-pp-ranks"),
        (("-o", "step.txt"), "picture-kind"),
        (("--trace", "no/such/folder/step.json"), "trace-not-written"),
        (("layout.tp=3",), "layout-tp-heads"),
    ],
)
def test_bad_arguments_of_step_end_with_status_2(cli, arguments, words):
    found = cli(*STEP, *arguments)
    assert found.status == 2
    assert words in found.err

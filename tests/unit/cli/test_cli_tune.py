"""``meshwright tune``: arguments that are refused, rows of the result, and the cluster file."""

from __future__ import annotations

import json
import tomllib

import pytest

from meshwright.audit.record import RunRecord
from meshwright.plan.build import build_plan
from meshwright.report.scaling import WARM_UP
from meshwright.report.tuning import TuneRow, sort_rows, summarize_times
from meshwright.runs.cluster_file import cluster_text
from meshwright.runs.tune import shorten
from meshwright.spec.load import build_job, load_job


def code_of_refusal(cli, *arguments):
    done = cli("tune", *arguments, "--json")
    assert done.status == 2, done.err
    (error,) = json.loads(done.out)["errors"]
    return error["code"]


@pytest.mark.parametrize("top", [0, -1])
def test_top_must_be_at_least_one(cli, job_file, top):
    assert code_of_refusal(cli, job_file, "--top", top) == "tune-top"


def test_too_few_steps_are_refused(cli, job_file):
    assert code_of_refusal(cli, job_file, "--steps", 5) == "tune-steps"


def test_a_given_layout_is_refused(cli, job_file, tmp_path):
    """As an override and in a plan file."""
    assert code_of_refusal(cli, job_file, "layout.dp_replicate=2") == "tune-layout-given"
    assert cli("plan", job_file, "-o", tmp_path / "plan.toml").status == 0
    assert code_of_refusal(cli, tmp_path / "plan.toml") == "tune-layout-given"


def test_an_output_path_that_cannot_be_written_is_refused_before_any_run(cli, job_file, tmp_path):
    assert (
        code_of_refusal(cli, job_file, "-o", tmp_path / "nowhere" / "cluster.toml")
        == "cluster-file-not-writable"
    )
    assert code_of_refusal(cli, job_file, "-o", tmp_path) == "cluster-file-not-writable"


@pytest.mark.parametrize(
    "text", ['device = "cpu"\n', "# Written by meshwright probe. Use it with cluster.file=...\n"]
)
def test_files_of_the_user_or_of_another_command_are_not_overwritten(cli, job_file, tmp_path, text):
    own = tmp_path / "own.toml"
    own.write_text(text)
    assert code_of_refusal(cli, job_file, "-o", own) == "cluster-file-not-writable"
    assert own.read_text() == text


def test_a_preset_instead_of_a_job_is_refused(cli):
    assert code_of_refusal(cli, "tiny") == "train-needs-job"


def test_a_cluster_of_other_machines_is_refused(cli, job_file):
    assert code_of_refusal(cli, job_file, "cluster.nodes=2") == "cluster-not-here"


def test_a_long_lr_schedule_is_shortened_with_the_steps(job_file):
    job = load_job(
        str(job_file),
        ["train.steps=900", "train.schedule=wsd", "train.warmup=300", "train.decay_fraction=0.5"],
    )
    short = shorten(job, 6)
    assert build_plan(short)[0].job.train.steps == 6


def test_rows_have_medians_of_the_slowest_rank_and_failed_ones_are_last(job_file):
    plan = build_plan(load_job(str(job_file)))[0]
    times = [{"step_s": [9.0] * WARM_UP + [1.0, 2.0, 4.0]}, {"step_s": [9.0] * WARM_UP + [3.0, 1.0, 1.0]}]
    fast = TuneRow(plan, summarize_times([times[1]], RunRecord(tokens_per_step=30), True))
    slow = TuneRow(plan, summarize_times(times, RunRecord(tokens_per_step=30), False))
    failed = TuneRow(plan, None, "rank 0 died")
    assert (slow.measured.step_s, slow.measured.tokens_per_s) == (3.0, 10.0)
    assert sort_rows([failed, slow, fast]) == [fast, slow, failed]
    failed_row = failed.as_dict(0.5)
    assert (failed_row["step_s"], failed_row["audit_ok"], failed_row["reason"]) == (None, None, "rank 0 died")
    assert failed_row.keys() == slow.as_dict(0.5).keys()


def test_the_written_cluster_file_restores_the_cluster(job_file, tmp_path):
    """Its figures are the same, so that a plan with it is for the same devices."""
    job = load_job(str(job_file), ["cluster.link_bytes_per_s=3e9", "cluster.basis=a test"])
    text = cluster_text(job.cluster, "tune")
    (tmp_path / "cluster.toml").write_text(text)
    assert tomllib.loads(text)["basis"] == "a test"
    tables = {
        "model": {"preset": "tiny"},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 1, "global_batch": 2},
        "cluster": {"file": str(tmp_path / "cluster.toml")},
    }
    read = build_job(tables).cluster
    assert (read.link_bytes_per_s, read.preset, read.world_size) == (3e9, "local", 2)
    assert (read.memory_bytes, read.device) == (job.cluster.memory_bytes, "cpu")

"""``runs``, ``report`` and what ``bench scaling`` refuses, through the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.cli.output import Output
from meshwright.cli.runs import show_runs

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1"


@pytest.fixture
def runs(tmp_path):
    """A folder with one good run, one damaged, and something else."""
    shutil.copytree(GOLDEN, tmp_path / "runs" / "good-1")
    shutil.copytree(GOLDEN, tmp_path / "runs" / "torn-1")
    (tmp_path / "runs" / "torn-1" / "plan.toml").write_text("x")
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_for_programs_and_people(cli, runs):
    listed = {run["name"]: run for run in cli("runs", "--json").json["runs"]}
    assert set(listed) == {"good-1", "torn-1"}
    assert (listed["good-1"]["status"], listed["good-1"]["audit_ok"]) == ("complete", True)
    assert listed["torn-1"]["status"] == "damaged"
    assert listed["torn-1"]["reason"]
    shown = cli("runs", runs)
    assert shown.status == 0
    assert "good-1" in shown.out
    assert "4/4" in shown.out
    assert "damaged" in shown.out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_runs_fit_the_terminal_and_the_reason_has_a_line_of_its_own(runs, capsys, width):
    """Names and statuses are never broken; a narrow terminal does without the least columns."""
    output = Output(as_json=False)
    output._people.width = width
    show_runs(output, runs)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("good-1 ", "torn-1 "))]
    assert [row.split()[:2] for row in sorted(rows)] == [["good-1", "complete"], ["torn-1", "damaged"]]
    assert max(map(len, rows)) <= width
    assert len([line for line in lines if line.startswith("torn-1: ")]) == 1
    assert ("(terminal too narrow for size" in lines[-2]) == (width < 120)


def test_a_group_without_a_command_says_which_there_are(cli):
    for group, command in (("bench", "scaling"), ("checkpoint", "list, verify, prune, export")):
        ran = cli(group)
        assert (ran.status, ran.codes) == (2, ["cli-usage"])
        assert f"error: missing command; one of: {command}" in ran.err


def test_only_plan_offers_to_take_a_preset(cli):
    helps = {command: cli(*command.split(), "-h").out for command in ("plan", "train", "bench scaling")}
    assert [command for command, text in helps.items() if "preset" in text.partition("Options")[0]] == [
        "plan"
    ]


def test_a_folder_that_is_not_there_is_an_error_and_an_empty_one_is_not(cli, tmp_path):
    ran = cli("runs", "nowhere")
    assert (ran.status, ran.codes) == (2, ["runs-missing"])
    (tmp_path / "empty").mkdir()
    assert cli("runs", "empty", "--json").json["runs"] == []


def test_report_prints_and_leaves_a_page(cli, runs):
    shown = cli("report", runs / "good-1")
    assert shown.status == 0
    assert "Audit: Ok. State" in shown.out
    assert any("\u2800" < character <= "\u28ff" for character in shown.out), "no dots of a curve"
    assert (runs / "good-1" / "report.html").read_text().startswith("<!DOCTYPE html>")
    elsewhere = cli("report", runs / "good-1", "-o", "mine.html", "--json").json
    assert (elsewhere["page"], elsewhere["status"], elsewhere["audit"]["audit_ok"]) == (
        "mine.html",
        "complete",
        True,
    )
    assert Path("mine.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nowhere",), "run-missing"),
        (("runs/other",), "run-missing"),
        (("runs/torn-1",), "plan-unreadable"),
        (("runs/good-1", "-o", "no/where.html"), "report-not-writable"),
    ],
)
def test_report_refuses(cli, runs, arguments, code):
    ran = cli("report", *arguments)
    assert (ran.status, ran.codes) == (2, [code])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--ranks", "0"), "bench-ranks"),
        (("--ranks", "1,two"), "bench-ranks"),
        (("--ranks", ""), "bench-ranks"),
        (("--ranks", "1,-2"), "bench-ranks"),
        (("--steps", "5"), "bench-steps"),
        (("layout.tp=2",), "bench-layout"),
        (("layout.dp_shard=2",), "bench-layout"),
        (("-o", "no/where.svg"), "bench-not-writable"),
        (("train.lr=-1",), "job-out-of-range"),
        (("layout.micro_batch=8", "--ranks", "1,2"), "layout-micro-batch"),
    ],
)
def test_bench_scaling_refuses_before_anything_runs(cli, good, arguments, code):
    ran = cli("bench", "scaling", good, "cluster.preset=local", "cluster.device=cpu", *arguments)
    assert (ran.status, ran.codes) == (2, [code]), ran.err
    assert not Path("scaling.svg").exists()


@pytest.mark.parametrize("command", [("train",), ("bench", "scaling")])
def test_what_needs_a_compiler_is_refused_where_there_is_none(cli, good, monkeypatch, tmp_path, command):
    monkeypatch.setenv("CXX", "no-such-compiler")
    ran = cli(*command, good, "cluster.preset=local", "cluster.device=cpu", "train.block_backend=compile")
    assert (ran.status, ran.codes) == (2, ["train-compile-no-compiler"]), ran.err
    assert "no-such-compiler" in ran.err
    assert not (tmp_path / "runs").exists()


def test_bench_scaling_needs_a_job_not_a_preset(cli):
    ran = cli("bench", "scaling", "tiny")
    assert (ran.status, ran.codes) == (2, ["train-needs-job"])


@pytest.mark.parametrize(
    ("devices", "asked", "chosen"),
    [
        (1, None, [1]),
        (2, None, [1, 2]),
        (6, None, [1, 2, 4, 6]),
        (8, None, [1, 2, 4, 8]),
        (2, "4, 1,4", [1, 4]),
    ],
)
def test_ranks_are_powers_of_two_and_all_devices(devices, asked, chosen):
    from meshwright.cli.bench import parse_ranks
    from meshwright.runs.scaling import default_ranks

    assert (parse_ranks(asked) if asked else default_ranks(devices)) == chosen


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_a_missing_tracker_is_refused_before_anything_is_written(cli, good, key, monkeypatch, tmp_path):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == key else real(name))
    ran = cli("train", good, f"train.{key}=name", "cluster.preset=local", "cluster.device=cpu")
    assert (ran.status, ran.codes) == (2, ["install-missing-extra"])
    assert f"meshwright[{key}]" in ran.err
    assert not (tmp_path / "runs").exists()

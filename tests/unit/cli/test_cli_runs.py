"""``runs``, ``report`` and ``bench scaling``: output, and arguments that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.cli.output import Output
from meshwright.cli.runs import show_runs

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1"


@pytest.fixture
def runs(tmp_path):
    """A folder with one complete run, one damaged run, and a folder that is not a run."""
    shutil.copytree(GOLDEN, tmp_path / "runs" / "good-1")
    shutil.copytree(GOLDEN, tmp_path / "runs" / "damaged-1")
    (tmp_path / "runs" / "damaged-1" / "plan.toml").write_text("x")
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_as_json_and_as_a_table(cli, runs):
    listed = {run["name"]: run for run in cli("runs", "--json").json["runs"]}
    assert set(listed) == {"good-1", "damaged-1"}
    assert (listed["good-1"]["status"], listed["good-1"]["audit_ok"]) == ("complete", True)
    assert listed["damaged-1"]["status"] == "damaged"
    assert listed["damaged-1"]["reason"]
    shown = cli("runs", runs)
    assert shown.status == 0
    assert "good-1" in shown.out
    assert "4/4" in shown.out
    assert "damaged" in shown.out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_of_runs_fits_the_terminal(runs, capsys, width):
    """Names and statuses are never wrapped.

    A narrow terminal omits the least important columns. Reasons are below.
    """
    output = Output(as_json=False)
    output._people.width = width
    show_runs(output, runs)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("good-1 ", "damaged-1 "))]
    assert [row.split()[:2] for row in sorted(rows)] == [["damaged-1", "damaged"], ["good-1", "complete"]]
    assert max(map(len, rows)) <= width
    assert len([line for line in lines if line.startswith("damaged-1: ")]) == 1
    assert ("(terminal too narrow for size" in lines[-2]) == (width < 120)


def test_a_command_group_without_a_command_lists_its_commands(cli):
    for group, command in (
        ("bench", "scaling, collectives"),
        ("checkpoint", "list, verify, prune, copy, export"),
    ):
        ran = cli(group)
        assert (ran.status, ran.codes) == (2, ["cli-usage"])
        assert f"Commands: {command}." in ran.err


def test_only_the_help_of_plan_mentions_presets(cli):
    helps = {command: cli(*command.split(), "-h").out for command in ("plan", "train", "bench scaling")}
    assert [command for command, text in helps.items() if "preset" in text.partition("Options")[0]] == [
        "plan"
    ]


def test_a_missing_folder_is_refused_and_an_empty_one_lists_no_runs(cli, tmp_path):
    ran = cli("runs", "nowhere")
    assert (ran.status, ran.codes) == (2, ["runs-missing"])
    (tmp_path / "empty").mkdir()
    assert cli("runs", "empty", "--json").json["runs"] == []


def test_report_prints_a_summary_and_writes_a_page(cli, runs):
    shown = cli("report", runs / "good-1")
    assert shown.status == 0
    assert "Audit: ok. State" in shown.out
    assert any("\u2800" < character <= "\u28ff" for character in shown.out), "no loss curve in the text"
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
        (("runs/good-1/plan.toml",), "run-missing"),
        (("runs/damaged-1",), "plan-unreadable"),
        (("runs/good-1", "-o", "no/where.html"), "report-not-writable"),
    ],
)
def test_report_refuses_bad_arguments_with_codes(cli, runs, arguments, code):
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
def test_bench_scaling_refuses_bad_arguments_before_any_run(cli, good, arguments, code):
    ran = cli("bench", "scaling", good, "cluster.preset=local", "cluster.device=cpu", *arguments)
    assert (ran.status, ran.codes) == (2, [code]), ran.err
    assert not Path("scaling.svg").exists()


@pytest.mark.parametrize("command", [("train",), ("bench", "scaling")])
def test_torch_compile_without_a_cpp_compiler_is_refused(cli, good, monkeypatch, tmp_path, command):
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
def test_default_rank_counts_are_powers_of_two_and_all_devices(devices, asked, chosen):
    from meshwright.cli.bench import parse_ranks
    from meshwright.runs.scaling import default_ranks

    assert (parse_ranks(asked) if asked else default_ranks(devices)) == chosen


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_a_missing_tracker_package_is_refused_before_any_file_is_written(
    cli, good, key, monkeypatch, tmp_path
):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == key else real(name))
    ran = cli("train", good, f"train.{key}=name", "cluster.preset=local", "cluster.device=cpu")
    assert (ran.status, ran.codes) == (2, ["install-missing-extra"])
    assert f"meshwright[{key}]" in ran.err
    assert not (tmp_path / "runs").exists()

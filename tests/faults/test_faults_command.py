"""``meshwright faults``: real kills of real ranks, a pass, a failure that can be replayed, and bad input."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from meshwright.api import run_faults
from meshwright.core.errors import UserError
from meshwright.runs.faults import job


@pytest.mark.slow
def test_a_killed_rank_passes_with_its_figures(command, tmp_path):
    """The figures of test 1, with losses and parameters compared with a fault-free run."""
    running = command("faults", "kill-rank/ddp", "--seed", "5", "--json", "--budget", "600")
    status, out, err = running.finish(200)
    assert status == 0, err
    result = json.loads(out)
    assert result["passed"] == ["kill-rank/ddp"]
    assert (result["failed"], result["skipped"], result["violations"]) == ([], [], {})
    figures = result["figures"]["kill-rank/ddp"]
    assert 0 <= figures["noticed after"]["value"] <= 1
    assert 0 < figures["next step after"]["value"] <= 10
    ((fault,),) = result["schedules"]["kill-rank/ddp"]
    assert fault.startswith("fail(rank=")
    assert fault in err, "the schedule is printed before it is run"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_quick_tests_pass_in_one_layout():
    """Supervisor, preemption, clock and hostile clients; also the wrong calls. No test is skipped."""
    names = (
        "kill-rank-0",
        "kill-supervisor",
        "stop-supervisor",
        "preempt",
        "wrong-call",
        "clock",
        "hostile-clients",
    )
    report = run_faults(*(f"{name}/ddp" for name in names), seed=1, budget_s=900)
    found = report.as_dict()
    assert (found["failed"], found["skipped"], found["violations"]) == ([], [], {})
    assert len(found["passed"]) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_100_random_kills_in_one_run_change_nothing():
    """Also during recoveries. Losses, parameters and optimizer state are those of the fault-free run."""
    report = run_faults("chaos/ddp", seed=1, budget_s=1500)
    found = report.as_dict()
    assert (found["failed"], found["skipped"], found["violations"]) == ([], [], {})
    assert found["figures"]["chaos/ddp"]["kills"]["value"] == 100


def test_files_of_checkpoints_are_tested_by_the_command(command):
    """Tests 12 to 14 need no ranks."""
    status, out, err = command("faults", "12", "13", "14", "--seed", "5", "--json").finish()
    assert status == 0, err
    result = json.loads(out)
    assert result["passed"] == ["truncate", "flip-bits", "mix-files"]
    assert result["figures"]["flip-bits"]["flipped bits"]["value"] == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bad_gradient_is_skipped_in_all_layouts():
    found = run_faults("bad-gradient", seed=3, budget_s=900).as_dict()
    assert (found["failed"], found["skipped"], found["violations"]) == ([], [], {})
    assert len(found["passed"]) == 3


@pytest.mark.slow
def test_a_schedule_of_the_user_is_run(command, tmp_path):
    """Two kills, from a file."""
    lines = ["# two kills", "fail(rank=1, step=8)", 'fail(rank=0, step=20, during="update")']
    (tmp_path / "faults.txt").write_text("\n".join(lines))
    running = command("faults", "schedule/zero3", "--schedule", "faults.txt", "--json", "--budget", "600")
    status, out, err = running.finish(300)
    assert status == 0, err
    assert json.loads(out)["schedules"] == {"schedule/zero3": [lines[1:]]}


@pytest.mark.slow
def test_sigterm_leaves_no_process_and_no_folder(command, tmp_path, monkeypatch):
    """The command, its agent and its ranks end, with status 4; the temporary folder is removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = command("faults", "stop-supervisor/ddp", "--budget", "600")
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("meshwright-faults-*/*/events.jsonl"))) or not (
        started := [e for e in running.events(found[0].parent) if e["event"] == "started"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.process.terminate()
    status, _, err = running.finish()
    assert (status, "[faults-interrupted]" in err) == (4, True), err
    assert not list(tmp_path.glob("meshwright-faults-*"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{event['pid']}").exists() for event in started):
        assert time.monotonic() < deadline, "ranks end with their agent"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_system_that_does_not_recover_fails(monkeypatch):
    """With ``elastic.restarts = 0`` a kill ends the run. The report has the command that runs it again."""
    monkeypatch.setattr(job, "JOB", job.JOB + "restarts = 0\n")
    report = run_faults("kill-rank/ddp", seed=5, budget_s=600)
    assert not report.ok
    found = report.as_dict()
    assert found["failed"] == ["kill-rank/ddp"]
    assert found["replay"] == {"kill-rank/ddp": "meshwright faults kill-rank/ddp --seed 5 --budget 3600"}
    assert any("[run-rank-died]" in text for text in found["violations"]["kill-rank/ddp"])


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (["no-such-test"], {}, "faults-unknown"),
        (["kill-rank/no-such-layout"], {}, "faults-unknown"),
        (["flip-bits/ddp"], {}, "faults-unknown"),
        ([], {"budget_s": -1.0}, "api-argument"),
        ([], {"seed": -1}, "api-argument"),
        (["1"], {"budget_s": 2.0}, "faults-budget"),
        ([], {"schedule": "missing.txt"}, "faults-schedule"),
    ],
)
def test_bad_input_is_refused(names, options, code):
    with pytest.raises(UserError) as caught:
        run_faults(*names, **options)
    assert caught.value.problems[0].code == code


def test_the_command_refuses_an_unknown_test(command):
    status, out, _ = command("faults", "no-such-test", "--json").finish()
    assert (status, json.loads(out)["errors"][0]["code"]) == (2, "faults-unknown")

"""Rank failures, Ctrl-C and other signals, a killed supervisor, torchrun. Processes are really killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.stores import find_newest

LONG = ("train.steps=100000", "layout.dp_replicate=2")


@pytest.fixture(autouse=True)
def _injected_faults_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "multiproc"))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_sigkill_of_a_rank_ends_the_run_and_names_the_rank(command, job_file, tmp_path):
    """The run ends within 30 s with status 4 and leaves no process. The error names rank and signal."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", "elastic.restarts=0")
    victim = running.wait_for(run_dir, lambda e: e["event"] == "started" and e["rank"] == 1)["pid"]
    other = running.wait_for(run_dir, lambda e: e["event"] == "started" and e["rank"] == 0)["pid"]
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3 and e["rank"] == 1)
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    status, _, err = running.finish()
    assert time.monotonic() - killed_at < 30
    assert status == 4
    assert "rank 1 of 2" in err
    assert "SIGKILL" in err
    assert "'step' of step" in err, "the error names the last event of the rank"
    assert "[run-rank-died]" in err
    assert "Traceback" not in err
    assert not _is_running(other)


@pytest.mark.slow
def test_sigkill_of_a_pipeline_stage_ends_the_run_and_it_resumes_from_the_checkpoint(
    command, train, job_file, tmp_path
):
    """The other stage ends too, although it waits in a receive. The error names the killed rank."""
    run_dir = tmp_path / "run"
    pipeline = ("layout.pp=2", "checkpoint.every_steps=2", f"run_dir={run_dir}", "elastic.restarts=0")
    running = command("train", job_file, "train.steps=100000", *pipeline)
    victim, other = (
        running.wait_for(run_dir, lambda e, rank=rank: e["event"] == "started" and e["rank"] == rank)["pid"]
        for rank in (1, 0)
    )
    running.wait_for(run_dir, lambda e: e["event"] == "checkpoint")
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    status, _, err = running.finish()
    assert time.monotonic() - killed_at < 30
    assert status == 4
    assert "rank 1 of 2" in err
    assert "SIGKILL" in err
    assert "[run-rank-died]" in err
    assert "Traceback" not in err
    assert not _is_running(other)
    found = find_newest(run_dir / "checkpoints")
    assert found is not None
    steps = read_manifest(found[0]).step + 10  # a draft with all votes may be committed too
    resumed = train(*pipeline, f"train.steps={steps}", resume=True)
    assert len(resumed.losses) == steps, "of both attempts"
    assert all(loss < 6 for loss in resumed.losses)


def test_an_exception_on_one_rank_is_reported_without_the_lost_peers(train, monkeypatch):
    """Only rank 1's exception is reported. Ranks 0 and 2 fail because they lost their peer."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:exception_in_step_3")
    failed = train("layout.dp_replicate=3", expect=4)
    (error,) = failed.result["errors"]
    assert error["code"] == "run-rank-died"
    assert "rank 1 of 3" in error["message"]
    assert "raised by the test" in error["message"]


def test_the_first_failed_rank_is_reported_when_the_next_error_is_not_a_lost_peer(train, monkeypatch):
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:secondary_error_on_rank_0")
    (error,) = train("layout.dp_replicate=2", expect=4).result["errors"]
    assert error["code"] == "run-rank-died"
    assert "rank 1 of 2" in error["message"]
    assert "primary error" in error["message"]


@pytest.mark.slow
def test_sighup_stops_a_run_unless_started_by_nohup(command, job_file, tmp_path):
    """SIGHUP stops the run with a checkpoint: status 0. Under nohup all processes of the group ignore it."""
    run_dir = tmp_path / "run"
    before = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # children inherit it; the tests may run under nohup
    try:
        running = command("train", job_file, *LONG, f"run_dir={run_dir}")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    os.killpg(running.process.pid, signal.SIGHUP)
    os.killpg(running.process.pid, signal.SIGHUP)
    assert running.finish()[0] == 0
    assert list(run_dir.glob("checkpoints/step-*/manifest.json"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    try:
        kept = command(
            "train", job_file, "layout.dp_replicate=2", "train.steps=40", f"run_dir={tmp_path / 'kept'}"
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    kept.wait_for(tmp_path / "kept", lambda e: e["event"] == "step" and e["step"] == 3)
    os.killpg(kept.process.pid, signal.SIGHUP)
    assert kept.finish()[0] == 0


def test_a_nan_loss_stops_the_run(train, monkeypatch):
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:nan_in_step_3")
    """The error names the step. Without a checkpoint, its fix does not propose a resume."""
    (error,) = train("layout.dp_replicate=2", "train.on_bad_step=stop", expect=4).result["errors"]
    assert error["code"] == "train-not-finite"
    assert "at step 3" in error["message"]
    assert "resume" not in error["fix"]


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_non_finite_gradient_stops_the_run_before_the_checkpoint(train, monkeypatch, clip):
    """The loss is finite and a gradient is not. The run stops and keeps the previous checkpoint."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:infinite_gradient")
    options = ["checkpoint.every_steps=1", "checkpoint.keep_last=1", f"train.clip={clip}", "run_dir=run"]
    options += ["train.on_bad_step=stop"]
    (error,) = train("layout.dp_replicate=2", *options, expect=4).result["errors"]
    assert error["code"] == "train-not-finite"
    assert "resume" in error["fix"]
    assert [p.name for p in Path("run/checkpoints").iterdir() if p.is_dir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 4, marks=pytest.mark.slow)]
)
def test_a_second_signal_kills_the_ranks(command, job_file, tmp_path, number, expected):
    """A stopped rank never finishes its step. The run ends without a checkpoint and leaves no process."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    pids = [e["pid"] for e in running.events(run_dir) if e["event"] == "started"]
    os.kill(pids[1], signal.SIGSTOP)
    running.process.send_signal(number)
    assert any("Ctrl-C again to stop at once" in line for line in running.process.stderr)
    running.process.send_signal(number)
    status, _, err = running.finish()
    assert status == expected
    assert "[run-ended-at-once]" in err
    assert not any(_is_running(pid) for pid in pids)


def test_ctrl_c_during_startup_prints_no_traceback(command, job_file, tmp_path):
    """The process group gets SIGINT while ranks import torch. The exit status is 130."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}")
    deadline = time.monotonic() + 60
    while not (run_dir / "logs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, err = running.finish()
    assert status == 130, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("send", "number", "expected"),
    [
        (os.killpg, signal.SIGINT, 130),
        pytest.param(os.kill, signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(os.kill, signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_after_the_step_and_saves_a_checkpoint(
    command, job_file, tmp_path, send, number, expected
):
    """A checkpoint of the last step and a passing audit; status 130 for Ctrl-C, 0 for SIGTERM.

    A terminal sends SIGINT to the process group: supervisor and ranks. The next test resumes such a run.
    """
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", "--json")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 5)
    send(running.process.pid, number)
    status, out, err = running.finish()
    assert status == expected, err
    assert "Traceback" not in err
    result = json.loads(out)
    assert result["status"] == "interrupted"
    assert result["audit_ok"], result["differences"]
    done = len(result["losses"])
    assert Path(tmp_path, result["checkpoint"]).name == f"step-{done:08d}"


@pytest.mark.parametrize(
    "layout",
    [
        "layout.dp_replicate=2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("layout.dp_shard=2", "layout.pp=2")),
    ],
)
def test_a_preempted_run_loses_no_step(command, train, job_file, tmp_path, layout):
    """Reliability test 7: it ends within 10 s of SIGTERM. Its losses are those of an undisturbed run."""
    run_dir, options = tmp_path / "run", (layout, "train.steps=60", "train.schedule=constant")
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 5)
    running.process.terminate()
    status, out, err = running.finish(10)
    assert (status, json.loads(out)["status"]) == (0, "interrupted"), err
    done = max(e["step"] for e in running.events(run_dir) if e["event"] == "step")
    assert (run_dir / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    steps = f"train.steps={done + 3}"
    resumed = train(*options, steps, f"run_dir={run_dir}", resume=True)
    first = next(e for e in running.events(run_dir) if e["event"] == "resumed")
    assert first["step"] == done
    assert resumed.losses == train(*options, steps).losses


@pytest.mark.slow
def test_a_signal_whose_checkpoint_cannot_be_written_ends_with_status_4(command, job_file, tmp_path):
    """The folder of the checkpoints becomes a file while the run trains."""
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", f"checkpoint.dir={saved}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    shutil.rmtree(saved)
    saved.touch()
    running.process.terminate()
    status, _, err = running.finish()
    assert (status, "[checkpoint-not-written]" in err) == (4, True), err


@pytest.mark.slow
def test_a_grace_that_is_shorter_than_a_step_is_reported(command, job_file, tmp_path):
    run_dir = tmp_path / "run"
    running = command(
        "train", job_file, "layout.dp_replicate=1", f"run_dir={run_dir}", "elastic.stop_grace_s=1e-4"
    )
    status, _, err = running.finish()
    assert (status, err.count("longer than elastic.stop_grace_s=0.0001")) == (0, 1), err
    (event,) = [e for e in running.events(run_dir) if e["event"] == "grace_too_short"]
    assert (event["rank"], event["step"]) == (0, 3)


def _wait_until_ended(pids):
    deadline = time.monotonic() + 30
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlived their supervisor"
        time.sleep(0.05)


@pytest.mark.parametrize("orphan_s", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_ranks_end_when_the_supervisor_is_killed(command, job_file, tmp_path, orphan_s):
    """After SIGKILL of the command all ranks end within 30 s; with ``orphan_s`` they save first."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", f"elastic.orphan_s={orphan_s}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    pids = [e["pid"] for e in running.events(run_dir) if e["event"] == "started"]
    assert len(pids) == 2
    running.process.kill()
    running.process.communicate()
    _wait_until_ended(pids)
    assert bool(list(run_dir.glob("checkpoints/step-*/manifest.json"))) == (orphan_s > 0)


def test_a_new_command_adopts_the_ranks_of_a_killed_one(command, job_file, tmp_path):
    """No rank ends and no step is lost or done twice. The new command stops the run, and the audit passes."""
    run_dir = tmp_path / "run"
    first = command("train", job_file, *LONG, f"run_dir={run_dir}")
    first.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 20)
    first.process.kill()
    first.process.wait()
    second = command("train", job_file, *LONG, f"run_dir={run_dir}", "--resume", "--json")
    second.wait_for(run_dir, lambda e: e["event"] == "adopted")
    second.process.send_signal(signal.SIGINT)
    status, out, err = second.finish()
    assert status == 130, err
    result, events = json.loads(out), second.events(run_dir)
    assert result["audit_ok"], result["differences"]
    steps = [e["step"] for e in events if e["event"] == "step" and e["rank"] == 0]
    assert steps == list(range(1, len(steps) + 1))
    assert len(result["losses"]) == len(steps)
    assert len([e for e in events if e["event"] == "started"]) == 2, "the same processes"
    assert {e["generation"] for e in events} == {0}


@pytest.mark.slow
def test_a_rank_that_died_without_a_supervisor_is_replaced_after_adoption(command, job_file, tmp_path):
    run_dir = tmp_path / "run"
    first = command("train", job_file, *LONG, f"run_dir={run_dir}")
    first.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 15)
    first.process.kill()
    first.process.wait()
    victim = next(e["pid"] for e in first.events(run_dir) if e["event"] == "started" and e["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    second = command("train", job_file, *LONG, f"run_dir={run_dir}", "--resume", "--json")
    recovered = second.wait_for(run_dir, lambda e: e["event"] == "recovered")
    assert (recovered["failed_rank"], recovered["source"]) == (1, "snapshot")
    started = [e["rank"] for e in second.events(run_dir) if e["event"] == "started"]
    assert sorted(started) == [0, 1, 1], "the survivor keeps its process"
    second.process.send_signal(signal.SIGINT)
    status, out, err = second.finish()
    assert status == 130, err
    result = json.loads(out)
    assert result["audit_ok"], result["differences"]


def test_a_command_that_is_stopped_delays_nothing(command, job_file, tmp_path):
    """The ranks go on while the command is stopped, and it ends normally after it is continued."""
    run_dir = tmp_path / "run"
    running = command(
        "train", job_file, "layout.dp_replicate=2", "train.steps=60", f"run_dir={run_dir}", "--json"
    )
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 10)
    running.process.send_signal(signal.SIGSTOP)
    running.wait_for(run_dir, lambda e: e["event"] == "finished")
    running.process.send_signal(signal.SIGCONT)
    status, out, err = running.finish()
    assert status == 0, err
    assert len(json.loads(out)["losses"]) == 60


def test_a_stranger_can_neither_adopt_a_run_nor_reach_it_from_another_machine(command, job_file, tmp_path):
    """The agent's file is private. A wrong token, random bytes and a second supervisor are turned away.

    The store and gloo listen on loopback only.
    """
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    assert (run_dir / "agent.json").stat().st_mode & 0o777 == 0o600
    agent = json.loads((run_dir / "agent.json").read_text())
    assert Path(agent["path"]).parent.stat().st_mode & 0o777 == 0o700
    wrong, right = (json.dumps({"token": token}).encode() for token in ("0" * 32, agent["token"]))
    for content in (
        b"\xff" * 1000,
        len(wrong).to_bytes(4, "big") + wrong,
        len(right).to_bytes(4, "big") + right,
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(agent["path"])
            client.sendall(content)
            client.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b"", "the agent closes the connection"
    _require_loopback(running, run_dir)
    running.process.send_signal(signal.SIGINT)
    assert running.finish()[0] == 130


def _require_loopback(running, run_dir: Path) -> None:
    """All sockets of the command and its ranks listen on loopback."""
    pids = [running.process.pid, *(e["pid"] for e in running.events(run_dir) if e["event"] == "started")]
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(fd.readlink())
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
                assert fields[1].split(":")[0] == loopback, f"{table} {fields[1]} listens beyond loopback"
    assert listening, "the store listens on some socket"


def _torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "meshwright", "train", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_torchrun_gives_the_losses_of_the_local_launcher(job_file, tmp_path, train):
    """``torchrun -m meshwright train`` gives equal losses and passes the audit."""
    ours = train("layout.dp_replicate=2")
    done = _torchrun(tmp_path, str(job_file), "--json", f"run_dir={tmp_path / 'launched'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["losses"] == ours.losses
    assert result["audit_ok"], result["differences"]
    assert result["world_size"] == 2


@pytest.mark.slow
def test_a_failure_under_torchrun_reports_the_run_folder(job_file, tmp_path):
    run_dir = tmp_path / "launched"
    diverging = ("train.lr=1e30", "train.clip=0.0", f"run_dir={run_dir}")
    done = _torchrun(tmp_path, str(job_file), "--json", *diverging)
    assert done.returncode != 0
    result = json.loads(done.stdout)
    assert (result["status"], result["run_dir"]) == ("error", str(run_dir))
    assert result["errors"][0]["code"] == "train-not-finite"


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes_from_the_checkpoint(job_file, tmp_path):
    """Rank 1 is killed, and torchrun restarts all ranks. The second attempt resumes and completes."""
    run_dir = tmp_path / "launched"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *launcher,
        "--max-restarts",
        "1",
        "-m",
        "meshwright",
        "train",
        str(job_file),
        f"run_dir={run_dir}",
    ]
    command += ["train.steps=300", "checkpoint.every_steps=5"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        events = run_dir / "events.jsonl"
        deadline = time.monotonic() + 90
        pid = None
        while pid is None or not list((run_dir / "checkpoints").glob("step-*/manifest.json")):
            assert time.monotonic() < deadline, "no checkpoint"
            assert running.poll() is None, running.communicate()
            started = [json.loads(x) for x in events.read_text().splitlines()] if events.exists() else []
            pid = next((e["pid"] for e in started if e["event"] == "started" and e["rank"] == 1), None)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        _, err = running.communicate(timeout=150)
    assert running.returncode == 0, err
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    (resumed,) = [e for e in lines if e["event"] == "resumed" and e["rank"] == 0]
    assert resumed["generation"] == 1
    assert resumed["step"] >= 5
    assert lines[-1]["event"] == "finished"


@pytest.mark.slow
def test_torchrun_with_a_wrong_world_size_is_refused(job_file, tmp_path):
    done = _torchrun(tmp_path, str(job_file), "layout.dp_replicate=3")
    assert done.returncode != 0
    assert "[launch-world-size]" in done.stderr

"""``/health`` and ``/metrics`` of a real run, over HTTP: while it trains, hangs and recovers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time

import pytest

OPTIONS = ("layout.dp_replicate=2", "elastic.snapshot_every=5", "train.steps=100000")


def find_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def get(port, path, token):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    reply = connection.getresponse()
    found = reply.status, reply.read().decode()
    connection.close()
    return found


def wait_for_health(port, token, wanted):
    """Poll /health until it is as wanted; returns status and facts."""
    deadline = time.monotonic() + 30
    while True:
        status, body = get(port, "/health", token)
        if wanted(status, json.loads(body)):
            return status, json.loads(body)
        assert time.monotonic() < deadline, body
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_reports_its_health_and_metrics(command, job_file, tmp_path):
    """A stopped rank makes the run unhealthy until another process has its rank. The token is needed."""
    run_dir, port = tmp_path / "run", find_port()
    more = (f"elastic.metrics=127.0.0.1:{port}", "elastic.heartbeat_timeout_s=2")
    running = command("train", job_file, *OPTIONS, *more, f"run_dir={run_dir}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 8)
    assert (run_dir / "metrics-token").stat().st_mode & 0o777 == 0o600
    token = (run_dir / "metrics-token").read_text().strip()
    assert get(port, "/health", "x" * 64)[0] == get(port, "/metrics", "")[0] == 401
    status, facts = wait_for_health(port, token, lambda _, facts: facts["step"] >= 8)
    assert (status, facts["state"], facts["ranks_alive"], facts["verdict"]) == (200, "running", 2, None)
    status, text = get(port, "/metrics", token)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    assert int(samples["meshwright_step"]) >= 8
    assert float(samples["meshwright_loss"]) > 0
    for rank in (0, 1):
        assert float(samples[f'meshwright_spent_seconds_total{{rank="{rank}",kind="compute"}}']) > 0
        assert int(samples[f'meshwright_memory_bytes{{rank="{rank}"}}']) > 0
    pid = next(e["pid"] for e in running.events(run_dir) if e["event"] == "started" and e["rank"] == 1)
    os.kill(pid, signal.SIGSTOP)
    status, facts = wait_for_health(port, token, lambda status, _: status == 503)
    assert facts["verdict"] is None or "rank 1" in facts["verdict"]
    status, facts = wait_for_health(
        port, token, lambda status, facts: facts["generation"] == 1 and facts["ok"]
    )
    samples = dict(line.rsplit(" ", 1) for line in get(port, "/metrics", token)[1].splitlines())
    assert samples["meshwright_failures_total"] == "1"
    os.kill(pid, signal.SIGCONT)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish()[0] == 0


def test_a_port_in_use_is_refused(command, job_file, tmp_path):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        where = f"elastic.metrics=127.0.0.1:{used.getsockname()[1]}"
        running = command("train", job_file, *OPTIONS, where, f"run_dir={tmp_path / 'run'}")
        status, _, err = running.finish()
    assert status == 2
    assert "metrics-address" in err

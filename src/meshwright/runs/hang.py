"""Reads the flight recorders of a running run, from another process of the same user on the same machine."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

from meshwright.audit.event_scan import Scan, scan_events
from meshwright.audit.record import RunRecord, feed_checked, reading_events
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE, Event
from meshwright.core.flight_ring import HEARTBEAT_S, FlightMemory
from meshwright.elastic.hang import Verdict
from meshwright.elastic.rank_watch import RankWatch
from meshwright.launch.lock import is_held

POLLS = 5


def inspect_run(run_dir: Path) -> Verdict:
    """Watch a run for two seconds; returns what it waits for."""
    started = _find_ranks(run_dir)
    with closing(RankWatch(timeout_s=0.0)) as watch:
        for rank, event in sorted(started.items()):
            watch.add(rank, _open_recorder(run_dir, event))
        for _ in range(POLLS):
            time.sleep(HEARTBEAT_S)
            watch.poll()
        return watch.judge()


def _find_ranks(run_dir: Path) -> dict[int, Event]:
    """The newest ``started`` event of every rank of a run that runs here."""
    started: dict[int, Event] = {}
    record = RunRecord()
    with reading_events(run_dir):
        for event in scan_events(run_dir / EVENTS_FILE, Scan()):
            before = record.newest.attempt
            feed_checked(record, event)
            if record.newest.attempt > before:  # an earlier attempt may have had other ranks
                started = {}
            if event["event"] == "started":
                started[event["rank"]] = event
    hosts = {event["host"] for event in started.values()} - {socket.gethostname()}
    if hosts:
        rule = f"has ranks on {', '.join(sorted(hosts))}"
        fix = "Run the command there; for several nodes, send SIGQUIT to meshwright train: it prints the same"
        raise UserError(Problem("hang-other-host", rule, path=str(run_dir), fix=fix))
    if not started or not is_held(run_dir):
        rule = "is not running" if started else "has not started its ranks"
        fix = "See meshwright runs for its status, and meshwright report for its record"
        raise UserError(Problem("hang-not-running", rule, path=str(run_dir), fix=fix))
    return started


def _open_recorder(run_dir: Path, started: Event) -> FlightMemory:
    path = started.get("flight_recorder")
    if path is None:
        rule = "has no flight recorder: its ranks were started by torchrun"
        fix = "Start it with meshwright train"
        raise UserError(Problem("hang-no-recorder", rule, path=str(run_dir), fix=fix))
    try:
        return FlightMemory.open(path)
    except PermissionError:
        rule = f"belongs to another user: {path} cannot be read"
        fix = "Run the command as the user who started the run"
        raise UserError(Problem("hang-no-permission", rule, path=str(run_dir), fix=fix)) from None
    except (OSError, ValueError):
        rule = f"is not running: the flight recorder of rank {started['rank']} is gone"
        fix = "See meshwright report for its record"
        raise UserError(Problem("hang-not-running", rule, path=str(run_dir), fix=fix)) from None

"""The event log: one line per event, never interleaved, never stops training, counts lost lines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from meshwright.core.events import EVENTS_VERSION, EventLog, EventWriter, read_events

FULL = "/dev/full"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_each_event_is_one_line_with_its_rank_and_generation(path):
    writer = EventWriter(path, rank=3, generation=2)
    returned = writer.write("step", step=1, note="two\nlines")
    writer.write("finished")
    writer.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    first = json.loads(lines[0])
    assert first == returned
    assert first["v"] == EVENTS_VERSION == 1
    assert (first["event"], first["rank"], first["generation"]) == ("step", 3, 2)
    assert (first["step"], first["note"]) == (1, "two\nlines")
    assert isinstance(first["time"], float)


def test_a_writer_appends_to_an_existing_file_and_reopens_after_close(path):
    path.write_text('{"v":1,"event":"old"}\n')
    writer = EventWriter(path, rank=0)
    writer.write("one")
    writer.close()
    writer.write("two")
    writer.close()
    assert [e["event"] for e in read_events(path).events] == ["old", "one", "two"]


def test_a_value_without_json_type_is_written_as_text(path):
    EventWriter(path, rank=0).write("started", where=path)
    assert read_events(path).events[0]["where"] == str(path)


def test_lines_of_several_writers_are_not_interleaved(path):
    """Each rank has its own file descriptor. Lines differ in length, so that a split line would show."""

    def write_all(rank: int) -> None:
        writer = EventWriter(path, rank=rank)
        for number in range(200):
            writer.write("step", number=number, filler="x" * (17 * rank + number))
        writer.close()

    threads = [threading.Thread(target=write_all, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = read_events(path)
    assert log.unreadable == 0
    for rank in range(4):
        assert [e["number"] for e in log.events if e["rank"] == rank] == list(range(200))


def test_lines_of_several_processes_are_not_interleaved(path):
    code = (
        "import sys; from pathlib import Path; from meshwright.core.events import EventWriter\n"
        "w = EventWriter(Path(sys.argv[1]), rank=int(sys.argv[2]))\n"
        "sys.stdin.read(1)\n"
        "for n in range(500): w.write('step', number=n, filler='x' * (n % 97))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(rank)], stdin=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in started:
        process.stdin.write(b"g")
        process.stdin.close()
    assert [process.wait() for process in started] == [0, 0]
    log = read_events(path)
    assert log.unreadable == 0
    assert [sum(e["rank"] == rank for e in log.events) for rank in range(2)] == [500, 500]


def test_a_full_disk_loses_lines_with_one_warning_and_no_exception(path, capsys):
    path.symlink_to(FULL)
    writer = EventWriter(path, rank=1)
    for number in range(5):
        writer.write("step", step=number)
    assert writer.lost == 5
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert str(path) in said.err
    assert "No space left" in said.err
    assert "training continues" in said.err


def test_a_listener_receives_every_event_although_the_disk_is_full(path):
    """Progress view and audit do not depend on the disk. They are also notified of lost lines."""
    path.symlink_to(FULL)
    received = []
    writer = EventWriter(path, rank=1, generation=4, listener=received.append)
    writer.write("step", step=1)
    writer.write("step", step=2)
    assert [e["step"] for e in received if e["event"] == "step"] == [1, 2]
    (lost,) = [e for e in received if e["event"] == "events_lost"]
    assert (lost["rank"], lost["generation"], lost["count"]) == (1, 4, 1)
    assert "No space left" in lost["reason"]


def test_lost_lines_are_recorded_before_the_next_event_that_fits(path, capsys):
    path.symlink_to(FULL)
    writer = EventWriter(path, rank=1)
    for number in range(3):
        writer.write("step", step=number)
    writer.close()
    path.unlink()
    writer.write("step", step=3)
    writer.write("step", step=4)
    assert writer.lost == 0
    events = read_events(path).events
    assert [(e["event"], e.get("count"), e.get("step")) for e in events if e["event"] == "step"] == [
        ("step", None, 3),
        ("step", None, 4),
    ]
    assert events[0]["event"] == "events_lost"
    assert events[0]["count"] == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_each_gap_has_its_own_warning(path, capsys):
    for _ in range(2):
        path.symlink_to(FULL)
        writer = EventWriter(path, rank=0)
        writer.write("step")
        writer.close()
        path.unlink()
        writer.write("step")
        writer.close()
        path.unlink()
    assert capsys.readouterr().err.count("log lines are lost") == 2


def test_a_missing_folder_loses_lines_without_an_exception(tmp_path, capsys):
    writer = EventWriter(tmp_path / "gone" / "events.jsonl", rank=0)
    writer.write("step")
    assert writer.lost == 1
    assert "No such file" in capsys.readouterr().err


def test_a_partially_written_line_ends_before_the_next_event(path):
    """A disk that fills up takes a part of a line. The next event starts on a new line."""
    code = (
        "import resource, sys; from pathlib import Path; from meshwright.core.events import EventWriter\n"
        "w = EventWriter(Path(sys.argv[1]), rank=0)\n"
        "w.write('whole')\n"
        "room = Path(sys.argv[1]).stat().st_size + 20\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))\n"
        "w.write('torn'); w.write('refused')\n"
        "assert w.lost == 2, f'lost {w.lost}'\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "w.write('after')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    log = read_events(path)
    assert [e["event"] for e in log.events] == ["whole", "events_lost", "after"]
    assert log.of("events_lost")[0]["count"] == 2
    assert log.unreadable == 1


def test_truncated_and_unknown_lines_are_skipped_and_counted(path):
    path.write_bytes(
        b'{"v":1,"event":"one"}\n{"v":1,"event":"tw\n\n[1, 2]\n{"v":1,"no":"event"}\n\xff\xfe\n'
        b'{"v":99,"event":"later"}\n{"v":1,"event":"three"}\n{"v":1,"event":"four"'
    )
    log = read_events(path)
    assert [e["event"] for e in log.events] == ["one", "three"]
    assert log.unreadable == 6, "a line of another version is unreadable, too"


def test_a_log_selects_by_name_and_generation_in_file_order():
    log = EventLog(
        [
            {"event": "step", "generation": 0, "n": 1},
            {"event": "eval", "generation": 0},
            {"event": "step", "generation": 1, "n": 2},
        ]
    )
    assert [e["n"] for e in log.of("step")] == [1, 2]
    assert [e["n"] for e in log.of("step", generation=1)] == [2]
    assert [e["n"] for e in log.of("step", generation=0)] == [1]
    assert log.last_generation == 1
    assert EventLog().last_generation == 0


def test_a_closed_standard_error_does_not_stop_training(path, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    path.symlink_to(FULL)
    monkeypatch.setattr(sys, "stderr", Closed())
    writer = EventWriter(path, rank=0)
    writer.write("step")
    assert writer.lost == 1

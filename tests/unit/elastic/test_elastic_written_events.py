"""Events that a killed supervisor had written are not written again by the next one."""

from __future__ import annotations

import json

from meshwright.elastic import written_events
from meshwright.elastic.written_events import WrittenEvents


def step(number, rank=1):
    return {"event": "step", "rank": rank, "generation": 0, "step": number, "time": 100.0 + number}


def test_events_of_the_end_of_the_file_are_known(tmp_path, monkeypatch):
    """The first line that is read may be cut, the last one may be unfinished."""
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(step(number)) for number in range(6)]
    path.write_text("\n".join(lines) + '\n{"event": ')
    monkeypatch.setattr(written_events, "TAIL_BYTES", len(lines[0]) * 3)
    written = WrittenEvents(path)
    assert step(5) in written
    assert step(6) not in written
    assert step(5, rank=2) not in written
    assert step(0) not in written, "before the part that is read"

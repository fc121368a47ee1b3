"""A rank runs out of memory: the run ends with the ledger and with changes that fit; the first one runs."""

from __future__ import annotations

import json
import re

from injected_faults import MEMORY_LIMIT_BYTES

LARGE = ("model.num_layers=6", "data.seq_len=128", "train.global_batch=128", "train.steps=1")
LAYOUT = ("layout.dp_replicate=2", "layout.micro_batch=64")


def test_out_of_memory_reports_the_ledger_and_a_change_that_fits(train, monkeypatch):
    """Rank 1 has less memory than predicted. Only its error is reported, not the lost peer of rank 0."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:limited_memory")
    failed = train(*LARGE, *LAYOUT, expect=4)
    (error,) = failed.result["errors"]
    assert error["code"] == "run-out-of-memory"
    assert re.search(r"rank 1 of 2 .* ran out of memory", error["rule"])
    memory = failed.result["out_of_memory"]
    assert sum(line["bytes"] for line in memory["lines"]) <= memory["predicted_peak_bytes"]
    assert memory["free_bytes"] < MEMORY_LIMIT_BYTES < memory["predicted_peak_bytes"]
    assert memory["requested_bytes"] > 0
    assert len(memory["changes"]) == 3
    for change in memory["changes"]:
        assert change["needed_bytes"] <= memory["free_bytes"]
        assert change["overrides"] in error["fix"]
        assert change["overrides"] in failed.messages
    times = [change["step_s"] for change in memory["changes"]]
    assert times == sorted(times)
    events = [json.loads(line) for line in (failed.run_dir / "events.jsonl").read_text().splitlines()]
    (report,) = [event for event in events if event["event"] == "error" and event["rank"] == 1]
    assert {**report["memory"], "changes": memory["changes"]} == memory
    assert report["peer_lost"] is False
    assert "activations at peak" in failed.messages
    changed = train(*LARGE, *LAYOUT, *memory["changes"][0]["overrides"].split())
    assert changed.result["status"] == "complete"
    assert changed.result["audit_ok"]

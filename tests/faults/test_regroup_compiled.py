"""Ranks with compiled blocks regroup: the survivor keeps its process and its compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.events import read_events

OPTIONS = (
    "train.steps=30",
    "train.eval_every=10",
    "train.block_backend=compile",
    "train.compile_backend=aot_eager",
    "elastic.snapshot_every=5",
)


@pytest.fixture(autouse=True)
def _injected_faults_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "multiproc"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", ["layout.dp_replicate=2", "layout.dp_shard=2", "layout.tp=2", "layout.pp=2"]
)
def test_ranks_with_compiled_blocks_regroup(train, tmp_path, monkeypatch, layout):
    """The survivor compiles nothing after the regroup, and the losses are those of a calm run."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:count_graphs")
    calm = train(layout, *OPTIONS, "run_dir=calm")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:count_graphs_and_kill_rank_1")
    run = train(layout, *OPTIONS, "run_dir=run")
    assert run.losses == calm.losses
    log = read_events(tmp_path / "run" / "events.jsonl")
    assert len(log.of("recovered")) == 1
    assert sorted(e["rank"] for e in log.of("started")) == [0, 1, 1], "the survivor keeps its process"
    built = {e["rank"]: (e["before"], e["graphs"]) for e in log.of("graphs")}
    assert built[1][0] == 0 < built[1][1], "the replacement compiles"
    assert built[0][0] == built[0][1] > 0, "the survivor does not"

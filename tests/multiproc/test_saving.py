"""Sharded state is gathered and written tensor by tensor; a killed save keeps the previous checkpoint."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from meshwright.checkpoint.manifest import find_newest, list_checkpoints, list_leftovers
from meshwright.runs.train import ENTRY


@pytest.mark.parametrize(("zero", "sharded"), [(3, 3), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_saving_needs_memory_for_a_few_tensors_only(train, monkeypatch, zero, sharded):
    """On every rank, also on rank 0, which writes: at most four times the largest tensor beside the state.

    ``sharded`` is the number of sharded tensors per parameter: with ZeRO-3 the weight and two moments, with
    ZeRO-1 the moments.
    """
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_saving_memory")
    trained = train("layout.dp_shard=2", f"layout.zero={zero}", "train.steps=1", "model.num_layers=6")
    assert trained.result["audit_ok"], trained.result["differences"]
    newest, refused = find_newest(trained.run_dir / "checkpoints")
    assert not refused
    with safe_open(newest / "model.safetensors", framework="pt") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 (not a dict)
    for rank in range(2):
        memory = json.loads((trained.run_dir / f"saving-{rank}.json").read_text())
        # The full tensor, this rank's rows of it, and the check for finite values: a copy and three masks.
        assert 0 < memory["peak"] - memory["before"] <= 4 * max(sizes)
    assert sharded * sum(sizes) > 3 * 4 * max(sizes), "the bound does not exclude the full state"


def test_sigkill_during_a_save_keeps_the_previous_checkpoint(train, monkeypatch):
    """Half of the tensors are written. The run resumes from the previous checkpoint and removes the draft."""
    common = ("layout.dp_shard=2", "checkpoint.every_steps=2", "run_dir=run", "train.steps=6")
    straight = train(*common, "run_dir=straight")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:sigkill_during_save")
    failed = train(*common, "elastic.restarts=0", expect=4)
    (error,) = failed.result["errors"]
    assert error["code"] == "run-rank-died"
    assert "rank 0 of 2" in error["message"]
    root = failed.run_dir / "checkpoints"
    assert [path.name for path in list_checkpoints(root)] == ["step-00000002"]
    (draft,) = list_leftovers(root)
    assert (draft / "model.safetensors").stat().st_size > 0, "nothing was written before the kill"
    monkeypatch.setattr("meshwright.runs.train.ENTRY", ENTRY)
    again = train(*common, resume=True)
    assert again.losses == straight.losses
    assert not list_leftovers(root)

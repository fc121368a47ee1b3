"""Checkpoints of state that no rank can hold: gathered and written tensor by tensor on real ranks."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from meshwright.checkpoint.manifest import find_newest, list_checkpoints, list_leftovers
from meshwright.runs.train import ENTRY


@pytest.mark.parametrize(("zero", "cut"), [(3, 3), (1, 2)])
def test_a_rank_holds_its_state_and_a_few_tensors_while_it_saves(train, monkeypatch, zero, cut):
    """Rank 0 too, which writes: what it holds besides is of the size of one tensor, not of the model.

    ``cut`` is how many whole tensors each parameter has that must be gathered: the weight, and two moments.
    """
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_saving_memory")
    trained = train("layout.dp_shard=4", f"layout.zero={zero}", "train.steps=2", "model.num_layers=6")
    assert trained.result["audit_ok"], trained.result["differences"]
    newest, refused = find_newest(trained.run_dir / "checkpoints")
    assert not refused
    with safe_open(newest / "model.safetensors", framework="pt") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 (not a dict)
    for rank in range(4):
        note = json.loads((trained.run_dir / f"saving-{rank}.json").read_text())
        # The whole tensor, this rank's rows of it, and what asks whether it is finite: a copy, three masks.
        assert 0 < note["peak"] - note["before"] <= 4 * max(sizes)
    assert cut * sum(sizes) > 3 * 4 * max(sizes), "or holding everything would pass, too"


def test_sigkill_during_a_save_keeps_the_previous_checkpoint(train, monkeypatch):
    """Half of the tensors are written: that is no checkpoint. The run goes on from the one before it."""
    common = ("layout.dp_shard=2", "checkpoint.every_steps=2", "run_dir=run", "train.steps=6")
    straight = train(*common, "run_dir=straight")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:sigkill_during_save")
    failed = train(*common, expect=4)
    assert "rank 0 of 2" in failed.result["errors"][0]["message"]
    root = failed.run_dir / "checkpoints"
    assert [path.name for path in list_checkpoints(root)] == ["step-00000002"]
    (draft,) = list_leftovers(root)
    assert (draft / "model.safetensors").stat().st_size > 0, "it was killed while it wrote"
    monkeypatch.setattr("meshwright.runs.train.ENTRY", ENTRY)
    again = train(*common, resume=True)
    assert again.losses == straight.losses[2:]
    assert not list_leftovers(root)

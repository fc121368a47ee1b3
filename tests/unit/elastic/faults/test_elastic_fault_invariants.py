"""The invariant checker finds each violation that is planted into the record of a run, and no other."""

from __future__ import annotations

import json

import pytest

from meshwright.core.tensor_header import TensorInfo, build_tensor_header
from meshwright.elastic.faults.invariants import check_checkpoints, compare_runs, read_history


def step(number, generation=0, rank=0, loss=None):
    loss = 1 / number if loss is None else loss
    return {"event": "step", "rank": rank, "generation": generation, "step": number, "loss": loss}


def ready(number, generation=0, rank=0):
    return {"event": "ready", "rank": rank, "generation": generation, "step": number}


def recovered(number, generation):
    return {"event": "recovered", "rank": 0, "generation": generation, "restored_step": number}


def both(*events):
    """The same events of two ranks."""
    return [{**event, "rank": rank} for event in events for rank in (0, 1)]


CLEAN = [
    *both(ready(0), step(1), step(2), step(3)),
    *both(ready(2, 1)),
    recovered(2, 1),
    *both(step(3, 1), step(4, 1)),
]


def test_a_rollback_that_is_recorded_is_no_violation():
    history = read_history(CLEAN)
    assert history.violations == ()
    assert history.losses == {1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4}


@pytest.mark.parametrize(
    ("events", "part"),
    [
        ([*CLEAN, step(4, 1)], "committed step 4 after step 4"),
        ([*CLEAN, step(6, 1)], "committed step 6 after step 4"),
        ([e for e in CLEAN if e["event"] != "recovered"], "which no event records"),
        (
            [*both(ready(0), step(1)), *both(ready(2, 1)), recovered(2, 1), step(3, 1)],
            "only 1 steps were done",
        ),
        ([*both(ready(0), step(1)), step(2), step(2, rank=1, loss=9.0)], "another rank has"),
        ([*CLEAN, *both(ready(3, 2)), recovered(3, 2), step(4, 2, loss=9.0)], "replayed with loss 9.0"),
        ([ready(0), ready(1, rank=1), step(1)], "different steps"),
        ([*both(ready(3), step(4))], "only 0 steps were done"),
    ],
)
def test_each_violation_is_found(events, part):
    found = read_history(events).violations
    assert any(part in text for text in found), found


def tensor_file(weights):
    """A file of one tensor with these bytes."""
    return build_tensor_header({"weights": TensorInfo("U8", (len(weights),), len(weights))}) + weights


def save(root, step, position, weights=b"weights"):
    """A checkpoint with a manifest that verifies."""
    import hashlib

    content = tensor_file(weights)
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {
        "step": step,
        "position": position,
        "world_size": 2,
        "model": {},
        "train": {},
        "seq_len": 32,
        "data_sha256": "",
        "buckets": [],
        "files": files,
        "version": 1,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_checkpoints_are_verified(tmp_path):
    save(tmp_path, 20, 160)
    newest = save(tmp_path, 40, 320)
    assert check_checkpoints(tmp_path, global_batch=8) == []
    (newest / "model.safetensors").write_bytes(tensor_file(b"weightz"))
    assert "checksum of model.safetensors" in check_checkpoints(tmp_path, global_batch=8)[0]


def test_a_position_that_does_not_match_the_step_is_found(tmp_path):
    """A sample that was used twice or left out moves the position."""
    save(tmp_path, 20, 168)
    assert "168 samples used, 160 expected" in check_checkpoints(tmp_path, global_batch=8)[0]


@pytest.mark.parametrize(
    ("losses", "content", "part"),
    [
        ({1: 0.5, 2: 0.25}, b"weights", None),
        ({1: 0.5, 2: 0.25000001}, b"weights", "step 2: loss 0.25000001"),
        ({1: 0.5, 2: 0.25, 3: 0.1}, b"weights", "not in the fault-free run: 1 step from 3 on"),
        ({1: 0.5, 2: 0.25}, b"weightz", "model.safetensors differs"),
        ({1: 0.5, 2: 0.25}, None, "no checkpoint of the same step"),
    ],
)
def test_differences_from_the_fault_free_run_are_found(tmp_path, losses, content, part):
    save(tmp_path / "calm", 20, 160)
    if content is not None:
        save(tmp_path / "run", 20, 160, content)
    found = compare_runs(losses, {1: 0.5, 2: 0.25}, tmp_path / "run", tmp_path / "calm")
    assert (found == []) if part is None else any(part in text for text in found), found

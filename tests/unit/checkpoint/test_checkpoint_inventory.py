"""Listing, verifying and pruning checkpoints; pruning never removes the last valid one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshwright.checkpoint.drafts import list_leftovers
from meshwright.checkpoint.inventory import list_stored, prune
from meshwright.checkpoint.manifest import MANIFEST, mark_best, remove_checkpoint
from meshwright.checkpoint.retention import Retention
from meshwright.core.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four copies of a real checkpoint, as steps 2, 4, 6 and 8."""
    for step in (2, 4, 6, 8):
        shutil.copytree(GOLDEN, tmp_path / f"step-{step:08d}")
    return tmp_path


def damage(checkpoint: Path) -> None:
    """Flip one bit of the weights: the size stays."""
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def steps(found) -> list[int]:
    return [stored.step for stored in found]


def test_checkpoints_of_a_folder_a_run_and_a_single_checkpoint_are_listed(root, tmp_path):
    size = sum(path.stat().st_size for path in GOLDEN.iterdir())
    assert [(s.step, s.bytes, s.complete) for s in list_stored(root, verify=False)] == [
        (step, size, True) for step in (2, 4, 6, 8)
    ]
    run = tmp_path / "run"
    shutil.copytree(root / "step-00000004", run / "checkpoints" / "step-00000004")
    assert steps(list_stored(run, verify=True)) == [4]
    assert steps(list_stored(GOLDEN, verify=True)) == [2], (
        "the step comes from the manifest if the folder name has none"
    )


def test_incomplete_checkpoints_have_a_reason_and_checksums_find_a_flipped_bit(root):
    (root / "step-00000002" / MANIFEST).unlink()
    (root / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    damage(root / "step-00000006")
    (root / "step-x").mkdir()
    (root / "step-00000009").write_text("a file")
    seen = {s.step: s.reason for s in list_stored(root, verify=False)}
    assert "has no manifest.json" in seen[2]
    assert "optimizer.safetensors is missing or has another size" in seen[4]
    assert (seen[6], seen[8]) == ("", "")
    assert "is damaged" in {s.step: s.reason for s in list_stored(root, verify=True)}[6]


def test_checkpoints_are_sorted_by_step_number(root):
    (root / "step-00000008").rename(root / "step-100000000")
    assert steps(list_stored(root, verify=False)) == [2, 4, 6, 100_000_000]


@pytest.mark.parametrize(("keep", "kept"), [(1, [8]), (3, [4, 6, 8]), (9, [2, 4, 6, 8])])
def test_pruning_keeps_the_newest(root, keep, kept):
    done = prune(root, Retention(keep), sweep=True)
    assert steps(done.kept) == kept == steps(list_stored(root, verify=True))
    assert done.freed_bytes == sum(stored.bytes for stored in done.removed)
    assert not list_leftovers(root)


def test_pruning_neither_counts_nor_removes_damaged_checkpoints(root):
    """The newest is damaged, which only its checksum shows. The one before it must stay."""
    damage(root / "step-00000008")
    mark_best(root, root / "step-00000002")
    done = prune(root, Retention(1), sweep=True)
    assert (steps(done.kept), steps(done.removed), steps(done.broken)) == ([2, 6], [4], [8])
    assert sorted(path.name for path in root.glob("step-*")) == [
        "step-00000002",
        "step-00000006",
        "step-00000008",
    ]


def test_nothing_is_removed_if_no_checkpoint_is_valid(root):
    for path in root.glob("step-*"):
        damage(path)
    with pytest.raises(UserError) as caught:
        prune(root, Retention(1), sweep=True)
    assert caught.value.problems[0].code == "checkpoint-none-good"
    assert len(list(root.glob("step-*"))) == 4


@pytest.mark.parametrize("sweep", [True, False])
def test_partial_checkpoints_are_removed_only_if_no_run_is_writing(root, sweep):
    partial = root / ".step-00000009.77.part"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"12345")
    done = prune(root, Retention(4), sweep)
    assert (done.freed_bytes, done.leftovers) == ((5, (partial,)) if sweep else (0, ()))
    assert partial.exists() != sweep


def test_a_failed_removal_leaves_no_partial_checkpoint(root, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError) as caught:
        prune(root, Retention(1), sweep=True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("checkpoint-not-removed", str(root / "step-00000002"))
    assert steps(list_stored(root, verify=True)) == [4, 6, 8]
    monkeypatch.undo()
    shutil.copytree(GOLDEN, root / "step-00000002")
    remove_checkpoint(root / "step-00000002")
    assert not list_leftovers(root), "leftovers of the first attempt are removed, too"


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError) as caught:
            list_stored(path, verify=False)
        assert caught.value.problems[0].code == "checkpoint-missing"


def test_the_evaluation_loss_is_listed(root):
    path = root / "step-00000008" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "eval_loss": 1.5}))
    assert list_stored(root, verify=True)[-1].eval_loss == 1.5

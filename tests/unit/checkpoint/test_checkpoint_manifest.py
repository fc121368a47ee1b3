"""Checkpoints are found, verified and rotated without torch; old versions stay readable."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import save
from meshwright.checkpoint.manifest import (
    MANIFEST,
    check_same_job,
    check_same_optimizer,
    list_checkpoints,
    mark_best,
    parse_manifest,
    read_manifest,
    rotate,
)
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.stores import find_newest
from meshwright.core.errors import UserError
from meshwright.spec.job import Data, Train
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.spec.train_defaults import fill_defaults

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four copies of a real checkpoint, as steps 2, 4, 6 and 8."""
    for step in (2, 4, 6, 8):
        shutil.copytree(GOLDEN, tmp_path / f"step-{step:08d}")
    return tmp_path


def damage(checkpoint: Path, name: str = "model.safetensors") -> None:
    """Flip one bit."""
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)


def test_a_checkpoint_of_version_1_is_readable():
    manifest = read_manifest(GOLDEN)
    assert (manifest.step, manifest.position, manifest.world_size) == (2, 4, 1)
    assert manifest.model["hidden_size"] == 8


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
def test_one_flipped_bit_in_any_file_is_found(root, name):
    damage(root / "step-00000008", name)
    with pytest.raises(UserError) as caught:
        read_manifest(root / "step-00000008")
    assert caught.value.problems[0].code == "checkpoint-broken"


def test_the_newest_valid_checkpoint_is_used_and_damaged_ones_are_named(root):
    damage(root / "step-00000008")
    (root / "step-00000006" / "optimizer.safetensors").write_bytes(b"")
    found = find_newest(root)
    assert found is not None
    checkpoint, refused = found
    assert checkpoint.name == "step-00000004"
    assert [sentence.split(" ")[0].rpartition("/")[2] for sentence in refused] == [
        "step-00000008",
        "step-00000006",
    ]


def test_rotation_never_removes_the_checkpoint_just_written(root):
    """A later, damaged checkpoint of an earlier attempt does not count."""
    damage(root / "step-00000008")
    rotate(root, Retention(1), root / "step-00000006")
    assert [c.name for c in list_checkpoints(root)] == ["step-00000006", "step-00000008"]


def test_rotation_keeps_the_best_and_finishes_interrupted_removals(root):
    mark_best(root, root / "step-00000002")
    (root / ".step-00000003.old").mkdir()
    rotate(root, Retention(1), root / "step-00000008")
    assert [c.name for c in list_checkpoints(root)] == ["step-00000002", "step-00000008"]
    assert not list(root.glob(".step-*"))


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    """All of them, also in numbers, names and white space. In format 1 a third were accepted."""
    data = (save(tmp_path, ranks=2, small_files={"tokenizer.json": b"{}"}) / MANIFEST).read_bytes()
    assert parse_manifest(data).step == 1
    accepted = []
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with contextlib.suppress(ValueError, RecursionError):
            accepted.append(parse_manifest(bytes(flipped)))
    assert accepted == []


@settings(max_examples=300, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["version", "sha256", "files", "step"]), inner, max_size=4)
            ),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_file_is_a_manifest_or_is_refused(data):
    with contextlib.suppress(ValueError, RecursionError):
        parse_manifest(data)


def test_rotation_removes_the_older_revision_of_a_step(tmp_path):
    save(tmp_path, step=1)
    save(tmp_path, step=2)
    newest = save(tmp_path, step=2)
    mark_best(tmp_path, tmp_path / "step-00000002")
    rotate(tmp_path, Retention(2), newest)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002.1"]


def list_no_files(content):
    content["files"] = {}


def list_outside_file(content):
    content["files"]["../secret"] = {"bytes": 0, "sha256": ""}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (list_no_files, "model.safetensors is missing"),
        (list_outside_file, "../secret is missing"),
        (lambda c: c.update(step="x"), "step"),
        (lambda c: c.update(version=3, new_field=1), "format version 3"),
        (lambda c: c.update(version=2), "checksum"),
        (lambda c: c["files"].update({"model.safetensors": 5}), "files.model.safetensors"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(root, change, says):
    path = root / "step-00000008" / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        read_manifest(root / "step-00000008")
    assert caught.value.problems[0].code == "checkpoint-broken"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "in_job", "says"),
    [
        ("seq_len", 16, r"data\.seq_len is 8 in the checkpoint and 16 in the job"),
        ("mask", "document", r"data\.mask is causal in the checkpoint and document in the job"),
        ("prompt_masking", True, r"data\.prompt_masking is False in the checkpoint and True in the job"),
    ],
)
def test_other_sample_settings_cannot_be_resumed(key, in_job, says):
    """The golden checkpoint has neither mask nor prompt_masking: their defaults apply."""
    manifest = read_manifest(GOLDEN)
    model = DecoderModel(**manifest.model)
    data = Data(path="text", seq_len=8)
    check_same_job(manifest, model, data, GOLDEN)
    with pytest.raises(UserError, match=says) as caught:
        check_same_job(manifest, model, replace(data, **{key: in_job}), GOLDEN)
    assert caught.value.problems[0].code == "resume-mismatch"


def test_omitted_norm_groups_equal_the_default():
    """The default is 32: it may be given in the checkpoint or in the job only. 8 groups are a mismatch."""
    shape = {"architecture": "resnet", "blocks": [1], "num_classes": 10, "image_size": 8}
    data = Data(path="builtin:synthetic-images", seq_len=8)
    for saved, in_job, same in ((32, None, True), (None, 32, True), (None, None, True), (None, 8, False)):
        manifest = replace(read_manifest(GOLDEN), model={**shape, "norm_groups": saved})
        model = ResNetModel(**shape, norm_groups=in_job)
        mismatch = pytest.raises(UserError, match=r"norm_groups.* 32 .* 8 .*\[resume-mismatch\]")
        with contextlib.nullcontext() if same else mismatch:
            check_same_job(manifest, model, data, GOLDEN)


def test_state_of_another_optimizer_cannot_be_resumed():
    """Another optimizer is refused, and so is momentum where the checkpoint has no momentum state.

    Other rates of the same optimizer are fine.
    """
    manifest = read_manifest(GOLDEN)
    common = {"steps": 4, "global_batch": 2}
    check_same_optimizer(manifest, Train(**common, lr=1.0, beta2=0.5), GOLDEN)
    with pytest.raises(UserError, match="is adamw in the checkpoint and lion in the job") as caught:
        check_same_optimizer(manifest, Train(**common, optimizer="lion"), GOLDEN)
    assert [problem.code for problem in caught.value.problems] == ["resume-mismatch"]
    assert "train.optimizer" in str(caught.value)
    sgd = dataclasses.replace(manifest, train=fill_defaults(Train(**common, optimizer="sgd", momentum=0.0)))
    check_same_optimizer(sgd, Train(**common, optimizer="sgd", momentum=0.0), GOLDEN)
    with pytest.raises(UserError, match=r"is 0\.0 in the checkpoint and 0\.9 in the job") as caught:
        check_same_optimizer(sgd, Train(**common, optimizer="sgd"), GOLDEN)
    assert [problem.code for problem in caught.value.problems] == ["resume-mismatch"]
    assert "train.momentum" in str(caught.value)

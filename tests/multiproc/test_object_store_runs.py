"""Runs whose checkpoints are in an object store (a real S3 server process), and in several stores."""

from __future__ import annotations

import json

import pytest

from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.core.errors import UserError
from meshwright.core.object_path import parse_location
from meshwright.saved import export_checkpoint

JOB = ("train.steps=6", "train.schedule=constant", "checkpoint.every_steps=2", "elastic.snapshot_every=0")


def read_events(trained, name):
    lines = (trained.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_ranks_save_to_s3_and_resume_from_it_in_another_layout(train, s3, tmp_path):
    """In the same layout, the resumed losses and the export are those of a run with a folder."""
    whole = train("layout.dp_shard=2", *JOB, "run_dir=whole")
    train("layout.dp_shard=2", *JOB, f"checkpoint.dir={s3}", "train.steps=4", "run_dir=first")
    again = train("layout.dp_shard=2", *JOB, f"checkpoint.dir={s3}", "run_dir=first", resume=True)
    assert again.losses == whole.losses
    root = parse_location(s3)
    assert [read_manifest(path).step for path in list_checkpoints(root)] == [4, 6]
    assert not (root / "lock.json").exists()
    export_checkpoint(s3, tmp_path / "from-s3")
    export_checkpoint(whole.run_dir, tmp_path / "from-folder")
    for path in (tmp_path / "from-folder").iterdir():
        assert path.read_bytes() == (tmp_path / "from-s3" / path.name).read_bytes(), path.name
    other = train("layout.tp=2", *JOB, "train.steps=8", f"checkpoint.dir={s3}", "run_dir=other", resume=True)
    (resumed, _) = read_events(other, "resumed")
    assert resumed["step"] == 6
    assert resumed["checkpoint"].startswith(s3)


def test_copies_go_to_all_stores_and_one_that_is_gone_is_named(train, s3):
    """Two of three stores are a quorum. The run resumes from the second store when the first one is lost."""
    stores = f'checkpoint.stores=["{s3}", "s3://no-such-bucket/x"]'
    trained = train(
        "layout.dp_replicate=2", *JOB, stores, "train.steps=4", "checkpoint.dir=one", "run_dir=run"
    )
    saved = read_events(trained, "checkpoint")
    assert [len(event["copies"]) for event in saved] == [2, 2]
    assert "s3://no-such-bucket/x gets no copies until the run is resumed" in trained.messages
    assert "the bucket does not exist" in trained.messages
    for checkpoint in list_checkpoints(trained.run_dir.parent / "one"):
        (checkpoint / "manifest.json").unlink()
    whole = train("layout.dp_replicate=2", *JOB, "run_dir=whole")
    again = train("layout.dp_replicate=2", *JOB, stores, "checkpoint.dir=one", "run_dir=run", resume=True)
    assert again.losses == whole.losses
    assert read_events(again, "resumed")[0]["checkpoint"].startswith(s3)


@pytest.mark.parametrize(
    ("url", "environment", "reason"),
    [
        ("s3://no-such-bucket/x", {}, "the bucket does not exist"),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "the server cannot be reached"),
    ],
)
def test_a_store_that_cannot_be_used_ends_the_run_before_it_starts(
    train, s3, monkeypatch, tmp_path, url, environment, reason
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=reason) as refused:
        train(*JOB, f"checkpoint.dir={url}", "run_dir=run")
    assert refused.value.problems[0].code == "store-unreachable"
    assert not (tmp_path / "run").exists()


def test_a_prefix_with_checkpoints_is_not_written_by_another_run(train, s3):
    train(*JOB, "layout.dp_replicate=2", f"checkpoint.dir={s3}", "run_dir=first")
    before = parse_location(s3).list_sizes()
    with pytest.raises(UserError) as refused:
        train(*JOB, "layout.dp_replicate=2", f"checkpoint.dir={s3}", "run_dir=second")
    assert refused.value.problems[0].code == "checkpoint-dir-used"
    assert parse_location(s3).list_sizes() == before

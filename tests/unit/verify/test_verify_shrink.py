"""Large jobs are shrunk to a legal job with the same axes, and every change is listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshwright.spec.layout import DEGREES
from meshwright.spec.legality.table import find_problems
from meshwright.spec.load import load_job
from meshwright.verify.proof_task import proof_job
from meshwright.verify.shrink import MAX_RANKS, find_reasons, is_legal, shrink, shrink_to_fit, state_bytes

GIB = 2**30
TEXT = str(Path(__file__).parents[3] / "examples" / "quickstart.toml")


def job_of(source: str, *overrides: str):
    """A job as it is proved: on the CPUs of this machine."""
    return proof_job(load_job(source, overrides, to_run=False), 16 * GIB)


def test_small_job_is_not_shrunk():
    job = job_of(TEXT, "layout.dp_replicate=2")
    shrunk = shrink_to_fit(job, 10, 16 * GIB, 8e10)
    assert shrunk.job is job
    assert shrunk.as_dict() is None


def test_each_reason_to_shrink_is_found_alone():
    """Ranks, state and time are each just above and just below their limit."""
    job = job_of(TEXT, "layout.dp_replicate=2")
    assert find_reasons(job, 10, 16 * GIB, 1e15) == []
    both = 2 * state_bytes(job)
    (state,) = find_reasons(job, 10, int(2 * both) - 1, 1e15)
    assert "state" in state
    assert find_reasons(job, 10, int(2 * both), 1e15) == []
    (seconds,) = find_reasons(job, 10, 16 * GIB, 1e6)
    assert "steps take one process" in seconds
    many = job_of(TEXT, f"layout.dp_replicate={MAX_RANKS + 1}")
    (ranks,) = find_reasons(many, 10, 16 * GIB, 1e15)
    assert f"{MAX_RANKS + 1} ranks" in ranks
    most = job_of(TEXT, f"layout.dp_replicate={MAX_RANKS}")
    assert find_reasons(most, 10, 16 * GIB, 1e15) == []


def test_state_bytes_equal_the_ledger():
    """The state is weights, gradients and two moments in float32, and AdamW's step counts."""
    job = job_of("tiny", "layout.dp_replicate=1")
    assert state_bytes(job) == pytest.approx(4 * 4 * 94_528, rel=1e-2)


@pytest.mark.parametrize(
    ("source", "degrees"),
    [
        ("llama3-8b", {"dp_replicate": 64}),
        ("llama3-70b", {"tp": 8, "dp_shard": 64}),
        ("llama3-405b", {"tp": 8, "pp": 16, "dp_shard": 8, "cp": 16}),
        ("gpt3-175b", {"tp": 8, "pp": 8, "dp_replicate": 16}),
        ("mixtral-8x7b", {"ep": 8, "dp_shard": 8, "tp": 2}),
        ("deepseek-v3", {"pp": 16, "ep": 64, "dp_shard": 64}),
        ("llama2-7b", {"cp": 8, "dp_shard": 4}),
    ],
)
def test_every_axis_above_one_stays_above_one(source, degrees):
    """Degrees above one become small degrees above one, and the others stay one.

    The result is legal and small.
    """
    overrides = [f"layout.{axis}={degree}" for axis, degree in degrees.items()]
    job = job_of(source, *overrides)
    small = shrink(job)
    for axis in DEGREES:
        before, after = getattr(job.layout, axis), getattr(small.layout, axis)
        assert (after > 1) == (before > 1), axis
        assert after <= min(before, 4), axis
    assert is_legal(small), find_problems(small)
    assert small.model.num_layers < job.model.num_layers
    assert small.model.hidden_size < job.model.hidden_size / 8
    assert small.model.vocab_size == job.model.vocab_size
    assert (small.model.num_heads > small.model.num_kv_heads) == (
        job.model.num_heads > job.model.num_kv_heads
    )
    assert find_reasons(dataclasses.replace(small), 10, 16 * GIB, 8e10)[:1] in ([], too_many_ranks(small))


def test_repeated_key_heads_stay_repeated():
    """If tp exceeds the key heads, it still does: gradients of repeated heads are summed over copies."""
    small = shrink(job_of("llama3-70b", "layout.tp=16", "layout.dp_shard=8", "layout.sequence_parallel=true"))
    assert small.model.num_kv_heads < small.layout.tp
    assert small.layout.sequence_parallel
    assert is_legal(small), find_problems(small)


def too_many_ranks(job) -> list[str]:
    """The reason for sixteen ranks, the fewest that keep four axes."""
    return [f"{job.layout.world_size} ranks, more than the {MAX_RANKS} that one machine runs"]


def test_exactly_the_changed_keys_are_listed():
    job = job_of(TEXT, "layout.dp_replicate=12", "layout.micro_batch=4")
    shrunk = shrink_to_fit(job, 10, 16 * GIB, 1e15)
    changes = {change.key: (change.before, change.after) for change in shrunk.changes}
    assert changes["layout.dp_replicate"] == (12, 2)
    assert changes["layout.micro_batch"] == (4, 2)
    assert changes["model.num_layers"] == (8, 2)
    assert changes["data.seq_len"] == (128, 64)
    assert "model.vocab_size" not in changes
    summary = shrunk.as_dict()
    assert summary is not None
    assert summary["reasons"] == ["12 ranks, more than the 8 that one machine runs"]
    assert {"key": "layout.dp_replicate", "before": 12, "after": 2} in summary["changes"]


def test_resnet_keeps_image_size_and_stages():
    job = job_of("resnet50", "layout.dp_replicate=16")
    small = shrink(job)
    assert small.layout.dp_replicate == 2
    assert small.model.image_size == job.model.image_size
    assert small.model.blocks == (1, 1, 1, 1)
    assert small.model.width < job.model.width
    assert is_legal(small)

"""Every choice of the planner has a reason with numbers."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.plan.predict import predict
from meshwright.plan.search.find import SearchResult
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice, explain_positions
from meshwright.plan.time.step import StepTime
from meshwright.spec.layout import Layout


def explain(job, neighbours=False, top=8):
    """The reasons of the plan of a job."""
    return explain_choice(job, search_job(job, top=top), neighbours)


def test_reason_for_one_device_if_communication_is_slower(make_job):
    reasons = explain(make_job(cluster={"link_bytes_per_s": 1e3, "link_latency_s": 1.0}))
    assert reasons[0].startswith("one device micro_batch=")
    assert "one device is enough: communication would cost more than it saves" in reasons[0]


def test_reasons_count_idle_devices(make_job):
    """The job has one sample of one token on eight devices."""
    job = make_job(model={"preset": "demo-2m"}, train={"global_batch": 1}, data={"seq_len": 1})
    found = search_job(job, top=8)
    used = found.best[0].layout.world_size
    first = explain_choice(job, found)[0]
    assert used < 8
    assert "one device is enough" in first if used == 1 else f"the other {8 - used} devices" in first


@pytest.mark.parametrize(
    ("degrees", "wait_s", "line"),
    [
        ({"dp_replicate": 8}, 0.3, "in 30% of the step: a larger micro-batch needs fewer per token"),
        ({"tp": 2}, 0.5, "in 50% of the step: a larger micro-batch or less tp needs fewer per token"),
        ({"dp_replicate": 8}, 0.04, ""),
    ],
)
def test_reasons_name_waits_for_kernel_launches(make_job, degrees, wait_s, line):
    """From 5% of the step."""
    job = make_job(model={"preset": "demo-2m"})
    best = predict(job, Layout("given", micro_batch=1, **degrees))
    best = dataclasses.replace(best, time=StepTime({"compute": 1.0}, launch_wait_s=wait_s))
    lines = [one for one in explain_choice(job, SearchResult(job, best=[best])) if "kernel launches" in one]
    assert lines == ([f"devices wait for kernel launches {line}"] if line else [])


def test_reason_names_the_faster_layout_if_the_simpler_one_is_chosen(make_job):
    """Without a faster layout there is no such sentence."""
    job = make_job(model={"preset": "demo-2m"})
    simple = predict(job, Layout("given", dp_replicate=8, micro_batch=1))
    other = predict(job, Layout("given", dp_shard=8, zero=1, micro_batch=1))
    near = dataclasses.replace(other, time=StepTime({"compute": simple.step_s / 1.005}))
    first = explain_choice(job, SearchResult(job, best=[simple, near]))[0]
    words = "simplest within 1% of the shortest predicted step among 2 checked layouts that fit (+0.50% over"
    assert words in first
    assert first.endswith("over dp_shard=8 zero=1 micro_batch=1)")
    far = dataclasses.replace(other, time=StepTime({"compute": simple.step_s * 1.005}))
    assert "shortest predicted step among 2" in explain_choice(job, SearchResult(job, best=[simple, far]))[0]


@pytest.mark.parametrize(
    ("by", "words"), [("cost", "least device time per step"), ("memory", "least memory per rank")]
)
def test_reason_names_the_objective(make_job, by, words):
    job = make_job(model={"preset": "demo-2m"})
    found = search_job(job, top=8, objective=by)
    assert words in explain_choice(job, found)[0]


def test_next_best_layouts_are_rejected_with_reasons(make_job):
    reasons = [
        reason for reason in explain(make_job(model={"preset": "demo-2m"})) if reason.startswith("rejected ")
    ]
    assert len(reasons) == 3
    assert all(re.search(r"slower|faster|memory", reason) for reason in reasons)


def test_neighbours_are_explained_on_request(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"global_batch": 64})
    reasons = [reason for reason in explain(job, neighbours=True) if reason.startswith("rejected ")]
    assert len(reasons) > 5
    assert any(reason.startswith("rejected tp=") for reason in reasons)


def test_reasons_name_zero_weight_padding(make_job):
    job = make_job(train={"global_batch": 5}, layout={"dp_replicate": 2, "micro_batch": 2})
    assert "3 of 8 samples per step are zero-weight padding: all ranks run equal batches" in explain(job)


def test_given_layout_and_micro_batch_need_no_reason(make_job):
    job = make_job(layout={"dp_replicate": 2, "micro_batch": 2}, train={"block_backend": "eager"})
    reasons = [reason for reason in explain(job) if "kernel launches" not in reason]
    assert reasons == ["dp_replicate=2 micro_batch=2: given in the job"]


def test_reason_names_the_rule_for_the_micro_batch(make_job):
    """Interleaved schedules add their own condition."""
    assert "micro_batch=2: largest size that fits with at least 2 micro-batches" in explain(
        make_job(layout={"dp_replicate": 2})
    )
    piped = make_job(
        model={"num_layers": 4}, layout={"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
    )
    assert any(
        reason.endswith("at least 2 micro-batches per stage, a multiple of layout.pp of them")
        for reason in explain(piped)
    )
    small = make_job(train={"global_batch": 2}, layout={"dp_replicate": 2})
    assert "micro_batch=1: smallest size: the batch is too small for 2 micro-batches" in explain(small)
    deep = explain(make_job(cluster={"nodes": 2}, model={"num_layers": 27}, layout={"pp": 13}))
    assert any("layers per stage 2 (" in reason and " stages)" in reason for reason in deep)


def test_sequences_longer_than_max_positions_get_a_warning(make_job):
    """RoPE still runs. Without max_positions, or with enough, there is no warning."""
    for max_positions, warned in ((16, True), (32, False), (None, False)):
        job = make_job(model={"max_positions": max_positions})
        found = [reason for reason in explain(job) if reason.startswith("warning:")]
        assert bool(found) == warned, max_positions
        assert found == explain_positions(job)
        assert all("data.seq_len=32 is more than model.max_positions=16" in reason for reason in found)

"""The choice: the fastest that fits, the micro-batch by its rule, and reasons for both."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import Problem, UserError
from meshwright.plan import choose
from meshwright.plan.choose import USABLE_MEMORY, evaluate, explain_choice, search_layouts
from meshwright.plan.contract import build_plan, read_plan, write_plan
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.ledger import predict_ledger
from meshwright.plan.lighten import require_fit
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.flops import peak_rate
from meshwright.plan.time.interval import step_interval
from meshwright.plan.time.step import predict_step
from meshwright.spec.legality import find_problems


def changed(job, **tables):
    """The job with keys replaced, without reading it anew: hundreds of times a test."""
    sections = {name: dataclasses.replace(getattr(job, name), **keys) for name, keys in tables.items()}
    return dataclasses.replace(job, **sections)


def with_memory(job, memory_bytes):
    return changed(job, cluster={"memory_bytes": memory_bytes})


@settings(max_examples=80, deadline=None)
@given(batch=st.integers(1, 40), memory_bytes=st.integers(1_500_000, 12_000_000), ranks=st.integers(1, 4))
@example(batch=1, memory_bytes=12_000_000, ranks=1)
@example(batch=7, memory_bytes=12_000_000, ranks=2)
def test_the_micro_batch_is_the_largest_that_fits_and_leaves_two_evened_out(
    make_job, batch, memory_bytes, ranks
):
    job = changed(make_job(), layout={"dp_replicate": ranks}, train={"global_batch": batch})
    job = with_memory(job, memory_bytes)
    chosen = evaluate(job, job.layout)
    share, usable = -(-batch // ranks), int(memory_bytes * USABLE_MEMORY)

    def fits(micro: int) -> bool:
        return predict_ledger(job, micro, -(-share // micro)).first_peak_bytes <= usable

    at_least = min(2, share)
    allowed = [m for m in range(1, share + 1) if -(-share // m) >= at_least]
    largest = max((m for m in allowed if fits(m)), default=1)
    count = -(-share // largest)
    assert chosen.micro_batches == count
    assert chosen.layout.micro_batch == -(-share // count), "no smaller one does it in as many micro-batches"
    assert chosen.fits == fits(chosen.layout.micro_batch)


def test_a_given_micro_batch_is_kept(make_job):
    chosen = evaluate(job := make_job(layout={"micro_batch": 3}), job.layout)
    assert (chosen.layout.micro_batch, chosen.micro_batches) == (3, 3)


def test_fitting_ends_exactly_at_the_usable_share_of_the_memory(make_job):
    job = make_job(layout={"dp_replicate": 2, "micro_batch": 2})
    need = evaluate(job, job.layout).ledger.first_peak_bytes
    enough = next(m for m in range(int(need / USABLE_MEMORY), need * 2) if int(m * USABLE_MEMORY) >= need)
    assert evaluate(with_memory(job, enough), job.layout).fits
    assert not evaluate(with_memory(job, enough - 1), job.layout).fits


@pytest.mark.parametrize(
    ("preset", "cluster", "batch"),
    [
        ("tiny", "h100-sxm", 8),
        ("llama3.2-1b", "h100-sxm", 512),
        ("llama3.2-1b", "a100-80g-sxm", 6),
        ("demo-2m", "b200", 3),
    ],
)
def test_auto_is_never_worse_than_any_number_of_replicas_that_could_have_been_given(
    make_job, preset, cluster, batch
):
    tables = {"model": {"preset": preset}, "cluster": {"preset": cluster}, "train": {"global_batch": batch}}
    best = require_fit(job := make_job(**tables), search_layouts(job))
    given_steps = []
    for ranks in range(1, min(8, batch) + 1):
        given = make_job(**tables, layout={"dp_replicate": ranks})
        search = search_layouts(given)
        assert len(search.candidates) == 1, "a given layout is not searched around"
        given_steps += [c.time.total_s for c in search.fitting]
    assert best.time.total_s == pytest.approx(min(given_steps))


def test_the_search_is_sorted_with_what_does_not_fit_last(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"global_batch": 512}, layout={"micro_batch": 64})
    job = with_memory(job, 60_000_000_000)
    found = search_layouts(job).candidates
    keys = [(not c.fits, c.time.total_s) for c in found]
    assert keys == sorted(keys)
    assert {c.layout.dp_replicate for c in found} == set(range(1, 9))


def test_no_more_replicas_than_samples_are_tried(make_job):
    assert search_layouts(make_job(train={"global_batch": 3})).evaluated == 3


def test_one_device_is_enough_where_communication_costs_more_than_it_gives(make_job):
    job = make_job(cluster={"link_bytes_per_s": 1e3, "link_latency_s": 1.0})
    search = search_layouts(job)
    assert search.candidates[0].layout.dp_replicate == 1
    reasons = explain_choice(job, search)
    assert "one device is enough" in reasons[0]
    assert any(reason.startswith("not 2 replicas") for reason in reasons)


def test_reasons_name_the_padding(make_job):
    job = make_job(train={"global_batch": 5}, layout={"dp_replicate": 2, "micro_batch": 2})
    reasons = explain_choice(job, search_layouts(job))
    assert "3 of 8 samples a step are zero-weight padding, so that all ranks run alike" in reasons


def test_a_given_layout_and_micro_batch_get_no_reason_of_ours(make_job):
    job = make_job(layout={"dp_replicate": 2, "micro_batch": 2})
    assert explain_choice(job, search_layouts(job)) == ["2 replicas: given in the job"]


def test_nothing_fits_names_the_need_the_room_and_the_largest_line(make_job):
    with pytest.raises(UserError) as caught:
        build_plan(make_job(model={"preset": "llama3-70b"}, train={"global_batch": 512}))
    (problem,) = caught.value.problems
    assert problem.code == "plan-nothing-fits"
    assert "73.6 GB of 80 GB are usable" in str(problem)
    assert "the largest line is optimizer with 564 GB" in str(problem)
    assert problem.fix


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 24), micro=st.none() | st.integers(1, 24), devices=st.integers(1, 8))
@example(batch=9, micro=4, devices=3)
def test_what_the_planner_chooses_is_legal_and_can_be_read_back(
    make_job, tmp_path_factory, batch, micro, devices
):
    """A plan that the run then refuses is no plan."""
    layout = {} if micro is None or micro > batch else {"micro_batch": micro}
    fast = {"devices_per_node": devices, "link_bytes_per_s": 1e15, "link_latency_s": 1e-12}
    job = changed(make_job(), cluster=fast, train={"global_batch": batch}, layout=layout)
    assert find_problems(job) == []
    plan, _ = build_plan(job)
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    write_plan(plan, path)
    assert read_plan(path) == plan


# Time


def test_the_parts_of_a_step_add_up_and_one_process_communicates_nothing(make_job):
    job = make_job(layout={"dp_replicate": 1})
    step = evaluate(job, job.layout).time
    assert sum(step.parts.values()) == step.total_s
    assert set(step.parts) == {"compute", "optimizer", "step overhead"}
    assert step.hidden == {}


def test_twice_the_samples_take_twice_the_compute(make_job):
    job = make_job(cluster={"device": "cpu"})
    one, two = (predict_step(job, micro_batches) for micro_batches in (4, 8))
    assert two.parts["compute"] == pytest.approx(2 * one.parts["compute"])
    assert two.parts["optimizer"] == one.parts["optimizer"]


def test_compute_on_a_cpu_is_gemms_and_memory_and_python(make_job):
    """8 x 32 tokens x FLOPs at 80% of 67 TFLOP/s, 8 passes over the ledger's activations, 1 ms per block."""
    job = make_job(layout={"micro_batch": 8}, cluster={"device": "cpu"})
    touched = predict_ledger(job, 8, 1).touched_bytes
    gemms_s = 8 * 32 * (591_744 - 6 * 64 * 5) / (0.8 * 6.7e13)  # without the norms' five vectors
    table_s = (16 * 320 * 64 + 4 * 8 * 32 * 64) / 3.35e12
    python_s = (job.model.num_layers + 1) * 1e-3
    found = predict_step(job, 1).parts["compute"]
    assert found == pytest.approx(gemms_s + 8 * touched / 3.35e12 + table_s + python_s, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero": 3},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "context": "ulysses", "recompute": "full"},
    ],
    ids=str,
)
def test_a_step_is_exactly_the_estimate_of_its_layout(make_job, device, layout):
    """Without a pipeline nothing is walked: search and plan have one time."""
    job = make_job(cluster={"device": device}, layout={"micro_batch": 2, **layout})
    found = evaluate(job, job.layout)
    estimated = estimate_step(Workload.of(job), Grid.of([found.layout]))
    assert found.time.total_s == float(estimated.step_s[0])
    for name, seconds in found.time.parts.items():
        assert seconds == float(estimated.parts[name][0]), name


def test_intervals_of_decoders_on_gpus_rest_on_published_runs(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"precision": "bf16"})
    assert "held-out rows" in step_interval(job).basis
    assert "guess" in step_interval(make_job(cluster={"device": "cpu"})).basis


@pytest.mark.parametrize(
    ("ranks", "bytes_per_s", "latency_s"),
    [(8, 4.5e11, 2e-5 * (1 + 7 * 0.2)), (9, 5e10 * 8, 2e-5 * (1 + 7 * 0.2) + 4e-5)],
    ids=["in a node", "across"],
)
def test_a_reduction_is_a_ring_on_the_link_that_it_crosses(make_job, ranks, bytes_per_s, latency_s):
    """2 (n - 1) / n of the gradients' bytes, over NVLink or the network; half of it is hidden."""
    tables = {
        "cluster": {"nodes": 2, "device": "cpu"},
        "train": {"global_batch": 9},
        "layout": {"dp_replicate": ranks, "micro_batch": 1},
    }
    step = predict_step(make_job(**tables), 1)
    ring_s = 2 * (ranks - 1) / ranks * 4 * 94_528 / bytes_per_s + latency_s
    assert step.hidden["data parallel"] == pytest.approx(ring_s / 2, rel=1e-2)
    assert step.parts["gradient reduction"] == pytest.approx(ring_s / 2, rel=1e-2)


def test_more_ranks_show_more_communication_and_hide_more(make_job):
    jobs = [make_job(model={"preset": "llama3.2-1b"}, layout={"dp_replicate": n}) for n in (2, 8)]
    two, eight = (predict_step(job, 4) for job in jobs)
    assert 0 < two.parts["gradient reduction"] < eight.parts["gradient reduction"]
    assert 0 < two.hidden["data parallel"] < eight.hidden["data parallel"]


def test_mfu_counts_against_what_it_says(make_job):
    fp32, bf16 = (make_job(train={"precision": p}).cluster for p in ("fp32", "bf16"))
    assert peak_rate(fp32, "fp32") == (6.7e13, "the cluster's large-product rate")
    assert peak_rate(bf16, "bf16") == (9.89e14, "the data sheet's dense 16-bit peak")
    measured = make_job(cluster={"matmul_flops_per_s": 1e12}).cluster
    assert peak_rate(measured, "bf16") == (1e12, "cluster.matmul_flops_per_s")
    assert peak_rate(bf16, "fp8") == (1.979e15, "the data sheet's dense fp8 peak")


def test_predicted_mfu_is_a_fraction_and_follows_its_definition(make_job):
    plan, _ = build_plan(
        make_job(model={"preset": "llama3.2-1b"}, train={"precision": "bf16", "global_batch": 64})
    )
    rate = plan.tokens_per_step * plan.flops_per_token / plan.step_s / plan.world_size
    assert plan.mfu == pytest.approx(rate / 9.89e14)
    assert 0 < plan.mfu < 1


def test_sequences_longer_than_the_model_knows_are_warned_of(make_job):
    """Rotary positions go on, so that it runs; where the positions are enough, nothing is said."""
    for known, warned in ((16, True), (32, False), (None, False)):
        job = make_job(model={"max_positions": known})
        found = [r for r in explain_choice(job, search_layouts(job)) if r.startswith("warning:")]
        assert bool(found) == warned, known
        assert all("data.seq_len=32 is more than model.max_positions=16" in reason for reason in found)


def test_layouts_that_a_rule_forbids_once_settled_are_dropped_and_counted(make_job, monkeypatch):
    """The best is chosen among the rest; with none left, the rule is the error."""
    job = make_job()
    before = search_layouts(job)
    problem = Problem("layout-micro-batch", "is forbidden here", path="layout.micro_batch")
    worst = before.candidates[-1].layout
    monkeypatch.setattr(choose, "find_problems", lambda placed: [problem] if placed.layout == worst else [])
    after = search_layouts(job)
    assert (after.evaluated, after.illegal) == (before.evaluated - 1, before.illegal + 1)
    assert [c.layout for c in after.candidates] == [c.layout for c in before.candidates[:-1]]
    monkeypatch.setattr(choose, "find_problems", lambda placed: [problem])
    with pytest.raises(UserError) as caught:
        search_layouts(job)
    assert caught.value.problems == (problem,)

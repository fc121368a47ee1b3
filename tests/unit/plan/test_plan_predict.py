"""The prediction of a layout: micro-batch, memory of every rank, collectives and time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.core.units import format_bytes
from meshwright.layout.flops import flops_per_token, peak_rate
from meshwright.layout.parameters import count_parameters
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.fit import USABLE_MEMORY, MemoryNeed, usable_bytes
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.predict import complete_layout, predict
from meshwright.plan.search.planner import search_job
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.interval import step_interval
from meshwright.plan.time.step import predict_step
from meshwright.spec.layout import Layout
from meshwright.spec.load import apply_override, build_job, job_tree
from model_shapes import LLAMA_ON_16_GPUS

ON_CPU = {"device": "cpu"}
PIPELINE = Layout("given", pp=4, tp=2, dp_shard=2, zero=1, micro_batch=1)


def changed(job, **tables):
    """The job with replaced keys. It is not loaded again, because tests do this often."""
    sections = {name: dataclasses.replace(getattr(job, name), **keys) for name, keys in tables.items()}
    return dataclasses.replace(job, **sections)


def with_memory(job, memory_bytes):
    """The job on devices with this much memory."""
    return changed(job, cluster={"memory_bytes": memory_bytes})


# Completing a given layout: micro-batch and stages


@settings(max_examples=80, deadline=None)
@given(batch=st.integers(1, 40), memory_bytes=st.integers(1_500_000, 12_000_000), ranks=st.integers(1, 4))
@example(batch=1, memory_bytes=12_000_000, ranks=1)
@example(batch=7, memory_bytes=12_000_000, ranks=2)
def test_micro_batch_is_the_largest_that_fits_with_two_micro_batches(make_job, batch, memory_bytes, ranks):
    """The size is then reduced as far as the number of micro-batches allows.

    On CPUs the need is the larger of the two peaks.
    """
    job = changed(make_job(cluster=ON_CPU), layout={"dp_replicate": ranks}, train={"global_batch": batch})
    job = with_memory(job, memory_bytes)
    chosen = predict(job, job.layout)
    share = -(-batch // ranks)

    def fits(micro: int) -> bool:
        ledger = predict_ledger(job, micro, -(-share // micro))
        return max(ledger.peak_bytes, ledger.first_peak_bytes) <= usable_bytes(job.cluster)

    at_least = min(2, share)
    allowed = [m for m in range(1, share + 1) if -(-share // m) >= at_least]
    largest = max((m for m in allowed if fits(m)), default=1)
    count = -(-share // largest)
    assert chosen.micro_batches == count
    assert chosen.layout.micro_batch == -(-share // count), (
        "the smallest size with this number of micro-batches"
    )
    assert chosen.fits == fits(chosen.layout.micro_batch)


def test_given_micro_batch_is_kept(make_job):
    chosen = predict(job := make_job(layout={"micro_batch": 3}), job.layout)
    assert (chosen.layout.micro_batch, chosen.micro_batches) == (3, 3)


def test_pipeline_micro_batch_leaves_two_micro_batches_per_stage(make_job):
    job = make_job(**LLAMA_ON_16_GPUS)
    settled = complete_layout(job, dataclasses.replace(PIPELINE, micro_batch=None))
    share = 16
    sizes = [dataclasses.replace(PIPELINE, micro_batch=m) for m in range(1, share // (2 * 4) + 1)]
    fitting = [layout.micro_batch for layout in sizes if predict(job, layout).fits]
    assert settled.micro_batch == max(fitting)
    assert sum(settled.stage_layers) == job.model.num_layers
    assert complete_layout(job, settled) == settled, "a complete layout is unchanged"


def test_micro_batch_is_1_if_nothing_fits(make_job):
    job = make_job(model={"preset": "llama3-8b"}, cluster={"memory_bytes": 10**8})
    assert complete_layout(job, Layout("given", dp_replicate=2)).micro_batch == 1


# Fit


def test_layout_fits_up_to_the_usable_memory(make_job):
    """One byte of device memory less does not fit, on CPUs and on GPUs."""
    for cluster in (ON_CPU, {}):
        job = make_job(layout={"dp_replicate": 2, "micro_batch": 2}, cluster=cluster)
        need = predict(job, job.layout).needed_bytes
        enough = next(m for m in range(int(need / USABLE_MEMORY), need * 2) if int(m * USABLE_MEMORY) >= need)
        assert predict(with_memory(job, enough), job.layout).fits
        assert not predict(with_memory(job, enough - 1), job.layout).fits


def first_step_does_not_fit(make_job, cluster):
    """A DDP job with accumulation whose steady step fits and whose first step does not."""
    layout = {"dp_replicate": 4, "micro_batch": 1}
    job = make_job(model={"preset": "demo-2m"}, cluster=cluster, train={"global_batch": 16}, layout=layout)
    need = predict(job, job.layout).need
    assert need.first_step > need.steady_step
    around = need.needed_bytes - max(need.peaks.values())
    middle = (need.first_step + need.steady_step) // 2 + around
    return with_memory(job, int(middle / USABLE_MEMORY))


@pytest.mark.parametrize("cluster", [ON_CPU, {}], ids=["cpu", "cuda"])
def test_first_step_that_does_not_fit_is_refused_with_a_fix(make_job, cluster):
    """DDP with accumulation holds gradients twice until its buckets were reduced once.

    The suggested change fits.
    """
    job = first_step_does_not_fit(make_job, cluster)
    found = predict(job, job.layout)
    assert not found.fits
    assert found.need.limited_by == "first step"
    assert found.shortage.startswith("does not fit: first step needs ")
    with pytest.raises(UserError) as caught:
        search_job(job)
    (problem,) = caught.value.problems
    assert problem.code == "plan-nothing-fits"
    assert "does not fit: first step needs" in str(problem)
    steady = MemoryNeed.of(job, found.need.steady_step, found.need.steady_step)
    assert f"a steady step needs {format_bytes(steady.needed_bytes)}" in str(problem)
    named = problem.fix.partition(" (")[0].removeprefix("Use ").split()
    assert named
    assert all(word.startswith(("layout.", "data.")) for word in named)
    tree = job_tree(job)
    for text in named:
        assert apply_override(tree, text) is None
    again = build_job(tree)
    assert predict(again, again.layout).fits


def test_layout_fits_with_memory_for_the_first_step(make_job):
    """Only the first step was too large."""
    job = first_step_does_not_fit(make_job, ON_CPU)
    need = predict(job, job.layout).need
    more = with_memory(job, int(need.needed_bytes / USABLE_MEMORY) + 2)
    assert predict(more, job.layout).fits


def test_need_is_that_of_the_largest_pp_rank(make_job):
    found = predict(make_job(**LLAMA_ON_16_GPUS), PIPELINE)
    assert len(found.memory.ledgers) == len(found.memory.needs) == 4
    assert found.needed_bytes == max(need.needed_bytes for need in found.memory.needs)
    assert found.ledger.peak_bytes == found.need.steady_step
    assert sum(line.bytes for line in found.ledger.lines) == found.ledger.peak_bytes
    assert list(found.classes.values()) == [0, 1, 2, 3]


def test_offloaded_state_must_fit_host_memory(make_job):
    """The GPUs have enough memory. The host does not."""
    layout = {"dp_replicate": 2, "micro_batch": 1, "offload": "optimizer"}
    tables = {**LLAMA_ON_16_GPUS, "cluster": {"devices_per_node": 2, "memory_bytes": 2 * 10**11}}
    enough = make_job(**tables, layout=layout)
    found = predict(enough, enough.layout)
    assert found.memory.cpu_bytes >= 8 * 8 * 10**9, "AdamW's two moments of 8 billion parameters"
    short = changed(enough, cluster={"host_memory_bytes": found.memory.cpu_bytes - 10**9})
    assert not predict(short, enough.layout).fits
    assert "1 GB more than cluster.host_memory_bytes" in predict(short, enough.layout).shortage


def test_plan_only_layout_is_estimated_by_rank_class(make_job):
    """The runtime is another framework. Memory is estimated and there are no collectives."""
    job = changed(make_job(**LLAMA_ON_16_GPUS), train={"runtime": "megatron-core"})
    found = predict(job, dataclasses.replace(PIPELINE, sequence_parallel=True))
    assert not found.exact
    assert list(found.classes) == ["first stage", "middle stages", "last stage"]
    assert found.traffic == ()
    assert found.needed_bytes > found.need.steady_step


# Collectives


def test_traffic_names_the_pp_rank_and_is_empty_for_one_device(make_job):
    job = make_job(**LLAMA_ON_16_GPUS)
    rows = predict(job, PIPELINE).traffic
    assert {row.axis for row in rows} >= {"tp", "pp", "dp_shard"}
    assert {row.pp_rank for row in rows} <= {None, 0, 1, 2, 3}
    alone = make_job(layout={"dp_replicate": 1})
    assert predict(alone, alone.layout).traffic == ()


def test_tensor_parallel_traffic_by_hand(make_job):
    """Each layer has two all-reduces per direction, of micro-batch x sequence x width x 2 bytes.

    Each micro-batch adds the float32 embedding, the gradient of the head's input, and for the loss a maximum
    and two sums per token.
    """
    job = make_job(train={"precision": "bf16"}, layout={"tp": 2, "micro_batch": 2}, model={"num_layers": 6})
    rows = predict(job, job.layout).traffic
    (row,) = [row for row in rows if (row.axis, row.op, row.phase) == ("tp", "all_reduce", "step")]
    tokens, micro_batches = 2 * 32, 4
    each = tokens * 64 * 2
    assert row.calls == micro_batches * (4 * 6 + 4)
    assert row.bytes == micro_batches * (4 * 6 * each + 2 * each + each + tokens * 4 * (1 + 2))


def test_zero_3_traffic_by_hand(make_job):
    """Each micro-batch gathers blocks twice in 16 bits and the root group once in 32 bits.

    It scatters all gradients.
    """
    layout = {"dp_shard": 4, "zero": 3, "micro_batch": 1}
    job = make_job(train={"precision": "bf16"}, layout=layout, model={"num_layers": 6})
    rows = {row.op: row for row in predict(job, job.layout).traffic if row.phase == "step"}
    count, micro_batches = count_parameters(job.model), 2
    assert rows["all_gather"].bytes == micro_batches * 4 * count
    assert rows["all_gather"].calls == micro_batches * (2 * 6 + 1)
    assert rows["reduce_scatter"].bytes == micro_batches * 4 * count


# Time


def test_step_of_one_process_has_no_communication(make_job):
    job = make_job(layout={"dp_replicate": 1})
    step = predict(job, job.layout).time
    assert sum(step.parts.values()) == step.total_s
    assert set(step.parts) == {"compute", "optimizer", "step overhead"}
    assert step.hidden == {}


def test_compute_time_is_proportional_to_micro_batches(make_job):
    job = make_job(cluster={"device": "cpu"})
    one, two = (predict_step(job, micro_batches) for micro_batches in (4, 8))
    assert two.parts["compute"] == pytest.approx(2 * one.parts["compute"])
    assert two.parts["optimizer"] == one.parts["optimizer"]


def test_cpu_compute_time_by_hand(make_job):
    """GEMMs run at 80% of 67 TFLOP/s.

    The activations of the ledger are read 8 times. Python takes 1 ms per block.
    """
    job = make_job(layout={"micro_batch": 8}, cluster={"device": "cpu"})
    touched = predict_ledger(job, 8, 1).touched_bytes
    gemms_s = 8 * 32 * (591_744 - 6 * 64 * 5) / (0.8 * 6.7e13)  # without the five norm vectors
    table_s = (16 * 320 * 64 + 4 * 8 * 32 * 64) / 3.35e12
    cpu_launch_s = (job.model.num_layers + 1) * 1e-3
    found = predict_step(job, 1).parts["compute"]
    assert found == pytest.approx(gemms_s + 8 * touched / 3.35e12 + table_s + cpu_launch_s, rel=1e-6)


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
def test_step_time_without_a_pipeline_equals_the_estimate(make_job, device, layout):
    """Search and plan have the same time."""
    job = make_job(cluster={"device": device}, layout={"micro_batch": 2, **layout})
    found = predict(job, job.layout)
    estimated = estimate_step(Workload.of(job), Grid.of([found.layout]))
    assert found.time.total_s == float(estimated.step_s[0])
    for name, seconds in found.time.parts.items():
        assert seconds == float(estimated.parts[name][0]), name


def test_interval_basis_names_published_runs_on_gpus(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"precision": "bf16"})
    assert "sources that were left out of the fit" in step_interval(job).basis
    assert "no published runs on CPUs" in step_interval(make_job(cluster={"device": "cpu"})).basis


@pytest.mark.parametrize(
    ("ranks", "bytes_per_s", "latency_s"),
    [(8, 4.5e11, 2e-5 * (1 + 7 * 0.2)), (9, 5e10 * 8, 2e-5 * (1 + 7 * 0.2) + 4e-5)],
    ids=["in a node", "across"],
)
def test_gradient_reduction_is_a_ring_on_the_slowest_link(make_job, ranks, bytes_per_s, latency_s):
    """It moves 2 (n - 1) / n of the gradient bytes over NVLink or the network. Half of it is hidden."""
    tables = {
        "cluster": {"nodes": 2, "device": "cpu"},
        "train": {"global_batch": 9},
        "layout": {"dp_replicate": ranks, "micro_batch": 1},
    }
    step = predict_step(make_job(**tables), 1)
    ring_s = 2 * (ranks - 1) / ranks * 4 * 94_528 / bytes_per_s + latency_s
    assert step.hidden["data parallel"] == pytest.approx(ring_s / 2, rel=1e-2)
    assert step.parts["gradient reduction"] == pytest.approx(ring_s / 2, rel=1e-2)


def test_more_ranks_have_more_exposed_and_hidden_communication(make_job):
    jobs = [make_job(model={"preset": "llama3.2-1b"}, layout={"dp_replicate": n}) for n in (2, 8)]
    two, eight = (predict_step(job, 4) for job in jobs)
    assert 0 < two.parts["gradient reduction"] < eight.parts["gradient reduction"]
    assert 0 < two.hidden["data parallel"] < eight.hidden["data parallel"]


def test_peak_rate_for_mfu_names_its_basis(make_job):
    fp32, bf16 = (make_job(train={"precision": p}).cluster for p in ("fp32", "bf16"))
    assert peak_rate(fp32, "fp32") == (6.7e13, "the cluster's large-GEMM rate")
    assert peak_rate(bf16, "bf16") == (9.89e14, "the data sheet's dense 16-bit peak")
    measured = make_job(cluster={"matmul_flops_per_s": 1e12}).cluster
    assert peak_rate(measured, "bf16") == (1e12, "cluster.matmul_flops_per_s")
    assert peak_rate(bf16, "fp8") == (1.979e15, "the data sheet's dense fp8 peak")


def test_predicted_mfu_follows_its_definition(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"precision": "bf16", "global_batch": 64})
    found = predict(job, Layout("given", dp_replicate=8))
    rate = found.tokens_per_s * flops_per_token(job.model, job.data.seq_len) / 8
    assert found.mfu == pytest.approx(rate / 9.89e14)
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "gpipe"])
def test_pipeline_step_is_simulated_and_close_to_the_closed_form(make_job, schedule):
    """The parts sum to the step time. The search ranks by the closed form."""
    job = make_job(**LLAMA_ON_16_GPUS)
    stages = {"interleaved": 4, "zbv": 2}.get(schedule, 1)
    found = predict(job, dataclasses.replace(PIPELINE, schedule=schedule, virtual_stages=stages))
    assert found.time.pipeline is not None
    assert sum(found.time.parts.values()) == pytest.approx(found.step_s)
    low, high = found.step_s * found.interval.low, found.step_s * found.interval.high
    assert low <= found.step_s <= high
    closed = float(estimate_step(Workload.of(job), Grid.of([found.layout])).step_s[0])
    # The forward pass includes the head's gradients, so GPipe's two phases have different slowest stages.
    assert found.step_s == pytest.approx(closed, rel=0.1 if schedule == "gpipe" else 0.05)


def test_simulated_bubbles_equal_the_published_formulas(make_job):
    """The 1F1B bubble is (pp - 1) / m of the work. Interleaving divides it by the virtual stages."""
    job = make_job(**{**LLAMA_ON_16_GPUS, "model": {"preset": "llama3-8b", "vocab_size": 8}})
    plain, interleaved = (
        predict(job, layout).time.parts
        for layout in (PIPELINE, dataclasses.replace(PIPELINE, schedule="interleaved", virtual_stages=4))
    )
    assert plain["bubble"] / interleaved["bubble"] == pytest.approx(4, rel=0.1)
    work = sum(plain.get(name, 0.0) for name in ("compute", "tensor parallel"))
    assert plain["bubble"] == pytest.approx(work * 3 / 16, rel=0.05)


@pytest.mark.parametrize("model", ["tiny", "resnet-tiny"])
def test_ranks_that_share_cores_take_as_many_times_as_long(make_job, model):
    """8 ranks on 2 cores: 4 times the step of 8 ranks on 8 cores. Fewer ranks than cores change nothing."""
    images = {"data": {"seq_len": 1, "path": "images"}} if model != "tiny" else {}
    layout = Layout("given", dp_replicate=8, micro_batch=2)

    def step_s(cores: int) -> float:
        cluster = {"preset": "local", "device": "cpu", "devices_per_node": cores}
        job = make_job(model={"preset": model}, cluster=cluster, train={"global_batch": 16}, **images)
        return predict(job, layout).step_s

    assert step_s(2) == pytest.approx(4 * step_s(8))
    assert step_s(16) == step_s(8)

"""Step times from probed operations: interpolation between shapes, and the fit of measured steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshwright.layout.flops import flops_per_token
from meshwright.layout.gemms import list_linears
from meshwright.layout.parameters import count_parameters
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.predict import predict
from meshwright.plan.probe_runs import PROBE_SUITES, list_attention, list_gemms, list_runs
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.interval import step_interval
from meshwright.plan.time.probed import MeasuredStep, count_work, fit_steps, is_probed, with_probed
from meshwright.plan.time.triton_block_bytes import block_bytes
from meshwright.spec.probed import AttentionTime, GemmTime, OperationTimes, Probed

PROBED_FILE = Path(__file__).parents[3] / "golden" / "h200-probed.toml"
"""What a probe wrote on one NVIDIA H200, torch 2.11, 16 Nov 2026."""
SMALL = {"num_layers": 16, "hidden_size": 2048, "num_heads": 32}
LARGE = {"num_layers": 28, "hidden_size": 3072, "num_heads": 24}
NARROW = {"precision": "fp8", "fp8_weight_grads": True, "gemm_autotune": True}
MEASURED = (
    # Model, micro-batch and sequence length, train, layout, step in seconds, peak in bytes.
    (SMALL, (8, 4096), {"gemm_autotune": True}, {}, 0.4817, 50993844224),
    (LARGE, (4, 4096), {"gemm_autotune": True}, {}, 0.6149, 81999692800),
    (SMALL, (8, 4096), NARROW, {}, 0.3996, 50997448704),
    (LARGE, (4, 4096), NARROW, {}, 0.4863, 82006459392),
    (SMALL, (1, 32768), {"gemm_autotune": True}, {}, 0.9803, 51008524288),
    (SMALL, (1, 131072), {}, {"recompute": "full"}, 13.646, 45548941824),
)
"""Steps on the same card in the same hour, by ``benchmarks/one_device.py``; probed models are narrower."""
RATE, ATTENTION_RATE, COPY, UPDATE = 7e14, 4e14, 4.2e12, 3e12


def gemm_time(rows, columns, depth, rate=RATE, precision="bf16"):
    seconds = 2.0 * rows * columns * depth / rate
    return GemmTime(precision, rows, columns, depth, seconds, seconds, seconds)


def attention_time(batch, heads, kv_heads, head_size, seq_len, rate=ATTENTION_RATE, precision="bf16"):
    seconds = 2.0 * batch * heads * seq_len**2 * head_size / rate
    return AttentionTime(precision, batch, heads, kv_heads, head_size, seq_len, seconds, 2.5 * seconds)


def constant_rates(**changes) -> Probed:
    """A device with one rate each for GEMMs, attention, copies and updates, for every shape."""
    suite = PROBE_SUITES["cuda"]
    probed = Probed(
        device="cuda",
        gemms=tuple(gemm_time(*sizes) for sizes in suite.gemms[:-2]),
        attention=tuple(attention_time(*heads) for heads in suite.attention),
        copy_bytes_per_s=COPY,
        optimizer_bytes_per_s=UPDATE,
        launch_s=1e-9,
        compiled=True,
    )
    return dataclasses.replace(probed, **changes)


@pytest.fixture
def job(make_h200_job):
    """A compiled Llama-like model on one H200, with shapes that no probe has."""
    return make_h200_job(layers=12, batch=4)


def test_unprobed_shapes_have_the_rate_of_probed_ones(job):
    work = count_work(with_probed(job, constant_rates()), 1, 0)
    tokens, model = 4 * 4096, job.model
    seen = 6.0 * model.num_layers * 4096 / 2 * 2 * model.query_size
    gemms = flops_per_token(model, 4096) - seen - 6.0 * (2 * model.num_layers + 1) * model.hidden_size
    assert work.gemm_s == pytest.approx(tokens * gemms / RATE, rel=1e-3)
    # The backward pass of attention has five GEMMs, the forward pass two.
    assert work.attention_s == pytest.approx(tokens * seen / 3 * 3.5 / ATTENTION_RATE, rel=1e-3)
    assert work.update_s == pytest.approx(1.2e9 * 30 / UPDATE, rel=0.05)


def test_probed_shape_has_its_measured_time(job):
    """This holds even if it differs much from neighbouring shapes."""
    linear = next(iter(list_linears(job, job.model, 1)))
    slow = gemm_time(linear.rows, linear.columns, linear.depth, RATE / 3)
    before, after = constant_rates(), constant_rates(gemms=(*constant_rates().gemms, slow))
    took = 3 * 2.0 * linear.rows * linear.columns * linear.depth / RATE * linear.times
    more = count_work(with_probed(job, after), 1, 0).gemm_s
    more -= count_work(with_probed(job, before), 1, 0).gemm_s
    assert 1.98 * took < more < 4 * took, "its own time and a little interpolation"


def test_merged_linears_are_counted_as_one_gemm(job):
    joined = {linear.columns for linear in list_linears(job, job.model, 1)}
    assert {2048 + 2 * 512, 2 * 8192, 2048, 128256} == joined
    eager = dataclasses.replace(job, train=dataclasses.replace(job.train, block_backend="eager"))
    assert {2048, 512, 8192, 128256} == {linear.columns for linear in list_linears(eager, job.model, 1)}


def test_the_head_is_counted_in_the_chunks_of_the_loss(job):
    odd = dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=3000))
    rows = [linear for linear in list_linears(odd, job.model, 2) if linear.columns == 128256]
    assert sum(linear.rows * linear.times for linear in rows) == 2 * 4 * 3000
    assert {linear.rows for linear in rows} == {8192, 4 * 3000 % 8192}


def test_checkpointing_costs_a_forward_pass_or_its_cheap_part(job):
    def work(recompute):
        layout = dataclasses.replace(job.layout, recompute=recompute)
        return count_work(with_probed(dataclasses.replace(job, layout=layout), constant_rates()), 1, 0)

    none, selective, full = map(work, ("none", "selective", "full"))
    assert none.gemm_s == selective.gemm_s < full.gemm_s
    assert none.moved_s < selective.moved_s < full.moved_s
    assert full.attention_s == pytest.approx(none.attention_s * 4.5 / 3.5)


def test_bf16_residual_stream_moves_fewer_bytes(job):
    wide = dataclasses.replace(job, train=dataclasses.replace(job.train, residual_dtype="fp32"))
    narrow_s, wide_s = (count_work(with_probed(j, constant_rates()), 1, 0).moved_s for j in (job, wide))
    assert 1.1 < wide_s / narrow_s < 1.6


def test_bytes_of_triton_blocks_match_a_count_by_hand(job):
    """The count has the bytes that each kernel of a block reads and writes per token."""
    width, inner, rotated, all_heads = 2048, 8192, 2048 + 512, 2048 + 2 * 512
    norms = 2 * (2 * 2 + 2 * 2) * width
    forward = norms + 2 * 2 * rotated + 3 * 2 * inner
    backward = 2 * (4 * 2 + 2) * width + 6 * 2 * inner + 2 * 2 * all_heads
    assert block_bytes(job, job.model) == forward + backward
    none = dataclasses.replace(job, layout=dataclasses.replace(job.layout, recompute="none"))
    assert block_bytes(job, job.model) - block_bytes(none, job.model) == 2 * (2 * width + inner)
    wide = dataclasses.replace(job, train=dataclasses.replace(job.train, residual_dtype="fp32"))
    assert block_bytes(wide, job.model) - block_bytes(job, job.model) == 2 * (5 * 2 + 2) * width
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    cast = 3 * 2048 - 2 * width - inner
    assert block_bytes(fp8, job.model) - block_bytes(job, job.model) == cast
    full = dataclasses.replace(job, layout=dataclasses.replace(job.layout, recompute="full"))
    first = forward - 2 * 2 * width  # its norm only reads the residual stream
    assert block_bytes(full, job.model) == 2 * first + 3 * 2 * width + backward


def test_the_block_backend_decides_the_time_of_elementwise_bytes(job):
    probed = constant_rates(elementwise=1.6, triton_elementwise=1.1)
    compiled = dataclasses.replace(job, train=dataclasses.replace(job.train, block_backend="compile"))
    for which, longer in ((job, 1.1), (compiled, 1.6)):
        work = count_work(with_probed(which, probed), 1, 0)
        left_s = work.compute_s(probed) - work.gemm_s - work.attention_s
        assert left_s == pytest.approx(longer * work.moved_s)


def test_fp8_gemms_have_their_own_times(job):
    """Only GEMMs of blocks run in fp8; head and attention use 16 bits.

    Without fp8 times there is no prediction.
    """
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    assert not is_probed(with_probed(fp8, constant_rates()))
    twice = tuple(
        gemm_time(*sizes, rate=2 * RATE, precision="fp8") for sizes in PROBE_SUITES["cuda"].fp8_gemms[:-1]
    )
    probed = constant_rates(gemms=(*constant_rates().gemms, *twice))
    assert is_probed(with_probed(fp8, probed))
    compiled = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, block_backend="compile"))
    assert not is_probed(with_probed(compiled, probed))
    whole = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, fp8_weight_grads=True))
    in_16, two, three = (count_work(with_probed(which, probed), 1, 0) for which in (job, fp8, whole))
    head_s = 6.0 * 4 * 4096 * 128256 * 2048 / RATE
    assert three.gemm_s - head_s == pytest.approx((in_16.gemm_s - head_s) / 2, rel=1e-2)
    assert two.gemm_s - head_s == pytest.approx((in_16.gemm_s - head_s) * 2 / 3, rel=1e-2)
    assert three.attention_s == in_16.attention_s


def test_autotuned_gemms_are_faster(job):
    """This covers all 16-bit GEMMs including those of the head."""
    autotuned = dataclasses.replace(job, train=dataclasses.replace(job.train, gemm_autotune=True))
    before, after = (count_work(with_probed(which, constant_rates()), 1, 0) for which in (job, autotuned))
    assert after.gemm_s == pytest.approx(0.98 * before.gemm_s)
    assert after.attention_s == before.attention_s


@pytest.mark.parametrize(("model", "batch", "train", "layout", "measured_s", "measured_bytes"), MEASURED)
def test_predicted_steps_on_an_h200_match_measured_ones(
    make_job, model, batch, train, layout, measured_s, measured_bytes
):
    """The shapes, lengths, precisions and checkpointing modes were not probed."""
    sequences, length = batch
    job = make_job(
        model={"preset": None, **model, "num_kv_heads": 8, "ffn_size": 8192, "vocab_size": 128256},
        cluster={"preset": None, "file": str(PROBED_FILE)},
        data={"seq_len": length},
        train={
            "global_batch": sequences,
            "precision": "bf16",
            "block_backend": "triton",
            "residual_dtype": "bf16",
            **train,
        },
        layout={"dp_replicate": 1, "micro_batch": sequences, "recompute": "selective", **layout},
    )
    found = predict(job, job.layout)
    assert found.time.total_s == pytest.approx(measured_s, rel=0.05)
    assert found.ledger.peak_bytes == pytest.approx(measured_bytes, rel=0.001)


def test_cpu_time_is_overlapped_on_a_gpu_and_added_on_a_cpu(job):
    probed = constant_rates(block_s=1e-3, step_s=0.5)
    on_gpu = count_work(with_probed(job, probed), 1, 0)
    alone = on_gpu.total_s(constant_rates())
    assert on_gpu.total_s(probed) == pytest.approx(alone + 0.5)
    busy = constant_rates(block_s=1.0)
    assert on_gpu.total_s(busy) == pytest.approx(job.model.num_layers + on_gpu.update_s)
    on_core = dataclasses.replace(on_gpu, hides_cpu_launch=False)
    assert on_core.total_s(busy) == pytest.approx(alone + job.model.num_layers)


def test_plan_for_a_probed_device_uses_its_times_and_interval(job):
    """Without the probe it uses the calibrated estimate."""
    probed = with_probed(job, constant_rates())
    step = predict(probed, probed.layout).time
    assert step.total_s == pytest.approx(count_work(probed, 1, 0).total_s(constant_rates()))
    assert "probe" in step_interval(probed).basis
    assert "probe" not in step_interval(job).basis
    assert predict(job, job.layout).time.total_s != step.total_s


def test_probed_times_replace_compute_and_optimizer_of_the_engine(job):
    """Other layouts of the grid keep the estimate."""
    placed = with_probed(job, constant_rates(step_s=0.5))
    layouts = [placed.layout, dataclasses.replace(placed.layout, tp=2)]
    estimated = estimate_step(Workload.of(placed), Grid.of(layouts))
    step, work = predict(placed, placed.layout).time, count_work(placed, 1, 0)
    assert step.total_s == float(estimated.step_s[0])
    assert step.parts["optimizer"] == pytest.approx(work.update_s)
    assert step.parts["step overhead"] == 0.5
    plain = estimate_step(Workload.of(job), Grid.of(layouts))
    assert estimated.step_s[1] == plain.step_s[1]
    assert estimated.step_s[0] != plain.step_s[0]


def test_probed_cpus_keep_the_communication_time_of_the_engine(make_job):
    """Two replicas have probed compute, and an all-reduce estimated from the links of the cluster."""
    made = constant_rates()
    gemms = tuple(dataclasses.replace(entry, precision="fp32") for entry in made.gemms)
    attended = tuple(dataclasses.replace(entry, precision="fp32") for entry in made.attention)
    probed = dataclasses.replace(
        made, device="cpu", gemms=gemms, attention=attended, compiled=False, block_s=2e-3
    )
    job = make_job(cluster={"preset": "local", "device": "cpu", "devices_per_node": 2})
    layout = dataclasses.replace(job.layout, mode="given", dp_replicate=2, micro_batch=2)
    placed = with_probed(dataclasses.replace(job, layout=layout), probed)
    assert is_probed(placed)
    found = predict(placed, layout)
    work = count_work(placed, found.micro_batches, found.ledger.touched_bytes)
    assert found.time.parts["compute"] == pytest.approx(work.compute_s(probed) - probed.step_s, rel=1e-9)
    assert found.time.parts["gradient reduction"] > 0
    assert found.time.total_s == float(estimate_step(Workload.of(placed), Grid.of([layout])).step_s[0])


def constant_rates_of_a_core() -> Probed:
    made = constant_rates()
    return dataclasses.replace(
        made,
        device="cpu",
        gemms=tuple(dataclasses.replace(entry, precision="fp32") for entry in made.gemms),
        attention=tuple(dataclasses.replace(entry, precision="fp32") for entry in made.attention),
        compiled=False,
    )


def test_gradients_in_buckets_of_ddp_are_zeroed_and_accumulated(make_job):
    """Write zeros, read the new gradient, read and write the bucket: 16 bytes per parameter.

    FSDP's gradients are in no such buckets.
    """
    probed = constant_rates_of_a_core()
    job = with_probed(make_job(cluster={"preset": "local", "device": "cpu", "devices_per_node": 2}), probed)
    times = {}
    for name, changes in {
        "one": {},
        "ddp": {"dp_replicate": 2},
        "zero1": {"dp_shard": 2, "zero": 1},
        "zero3": {"dp_shard": 2, "zero": 3},
    }.items():
        layout = dataclasses.replace(job.layout, mode="given", micro_batch=2, **changes)
        times[name] = count_work(dataclasses.replace(job, layout=layout), 1, 0).compute_s(probed)
    extra = 16 * count_parameters(job.model) / COPY
    assert times["ddp"] == pytest.approx(times["one"] + extra)
    assert times["zero1"] == pytest.approx(times["one"] + extra)
    assert times["zero3"] == pytest.approx(times["one"])


def test_several_ranks_of_a_cpu_have_the_times_of_all_cores(make_job):
    """One rank has those of a core alone; so have two ranks without measurements of all cores."""
    alone = constant_rates_of_a_core()
    names = [field.name for field in dataclasses.fields(OperationTimes)]
    slower = OperationTimes(**{name: getattr(alone, name) for name in names} | {"step_s": 1.0})
    cluster = {"preset": "local", "device": "cpu", "devices_per_node": 2}
    job = make_job(cluster=cluster, train={"global_batch": 4})

    def predict_step(ranks, probed):
        layout = dataclasses.replace(job.layout, mode="given", dp_replicate=ranks, micro_batch=2)
        placed = with_probed(dataclasses.replace(job, layout=layout), probed)
        return predict(placed, layout).time.parts.get("step overhead", 0.0)

    both = dataclasses.replace(alone, all_cores=slower)
    assert predict_step(1, both) == predict_step(1, alone)
    assert predict_step(2, both) == pytest.approx(predict_step(2, alone) + 1.0)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"block_backend": "eager"}),
        ("train", {"precision": "fp32", "residual_dtype": "fp32"}),
        ("train", {"runtime": "torchtitan"}),
        ("train", {"precision": "fp8"}),
        ("train", {"compile_backend": "aot_eager"}),
        ("data", {"mask": "document"}),
        ("layout", {"tp": 2}),
        ("layout", {"dp_replicate": 2}),
        ("layout", {"offload": "optimizer"}),
        ("model", {"num_experts": 4, "experts_per_token": 2}),
        ("cluster", {"probed": None}),
    ],
)
def test_unprobed_settings_use_the_calibrated_estimate(job, section, changes):
    probed = with_probed(job, constant_rates())
    assert is_probed(probed)
    changed = dataclasses.replace(getattr(probed, section), **changes)
    assert not is_probed(dataclasses.replace(probed, **{section: changed}))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fit_recovers_injected_overheads(make_job, device):
    """The measured steps are computed from known overheads."""
    suite, preset = PROBE_SUITES[device], {"cuda": "h200-sxm", "cpu": "local"}[device]
    cluster = dataclasses.replace(make_job(cluster={"preset": preset}).cluster, device=device)
    runs = list_runs(suite, dataclasses.replace(cluster, devices_per_node=1))
    jobs = [run.plan.job for run in runs]
    law = {"precision": suite.precision}
    plain = Probed(
        device=device,
        gemms=tuple(gemm_time(*sizes, **law) for sizes in list_gemms(suite, jobs)),
        attention=tuple(attention_time(*heads, **law) for heads in list_attention(suite, jobs)),
        copy_bytes_per_s=COPY,
        optimizer_bytes_per_s=UPDATE,
        launch_s=1e-9,
        compiled=suite.compiled,
    )
    of_cpu = {"block_s": 2e-3, "parameter_passes": 8.0} if device == "cpu" else {}
    planted = dataclasses.replace(plain, elementwise=1.3, step_s=2e-3, **of_cpu)
    timed = []
    for run in runs:
        work = count_work(with_probed(run.plan.job, planted), 1, run.touched_bytes)
        timed.append(run.measured_step(work.total_s(planted)))
    found = fit_steps(plain, timed)
    assert found.elementwise == pytest.approx(1.3, rel=1e-2)
    assert (found.step_s, found.block_s) == pytest.approx((planted.step_s, planted.block_s), rel=1e-2)
    assert found.parameter_passes == pytest.approx(planted.parameter_passes, rel=1e-2)


def test_fit_has_no_negative_overhead(job):
    work = count_work(with_probed(job, constant_rates()), 1, 0)
    found = fit_steps(constant_rates(), [MeasuredStep(job, 1, 0, work.gemm_s / 2)])
    assert found.elementwise > 0
    assert (found.step_s, found.block_s) == (0, 0)

"""The benchmark of one device: its FLOPs equal the plan's; one failing configuration does not stop others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.layout.flops import flops_per_token
from meshwright.layout.parameters import count_active_matmul_parameters

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def job_of(tmp_path):
    def build(shape, *settings):
        from one_device_worker import Task, build_shape

        task = Task("ours", "ours", shape, steps=1, small=False, device="cuda", settings=settings)
        return build_shape(task, tmp_path)

    return build


@pytest.mark.parametrize(
    ("shape", "billions", "step_flops"), [("a", 1.236, 2.694e14), ("b", 3.213, 3.505e14)]
)
def test_flops_per_step_equal_the_published_targets(job_of, shape, billions, step_flops):
    job = job_of(shape)
    assert count_active_matmul_parameters(job.model) / 1e9 == pytest.approx(billions, abs=5e-4)
    tokens = job.train.global_batch * job.data.seq_len
    assert tokens * flops_per_token(job.model, job.data.seq_len) == pytest.approx(step_flops, rel=1e-3)


@pytest.mark.parametrize("shape", ["a", "b"])
def test_gemms_and_attention_of_the_floor_have_the_planned_flops_without_norms(job_of, shape):
    from step_floor import attention_flops, list_gemms

    model, tokens = job_of(shape).model, 4096
    gemms = sum(gemm.flops(tokens) for gemm in list_gemms(model))
    norms = 6.0 * tokens * (2 * model.num_layers + 1) * model.hidden_size
    total = gemms + norms + attention_flops(model, tokens, 4096)
    assert total == tokens * flops_per_token(model, 4096)


@pytest.mark.parametrize(("shape", "gigabytes"), [("a", 140.9), ("b", 134.3)])
def test_elementwise_bytes_per_step_are_as_computed_by_hand(job_of, shape, gigabytes):
    """About 32 ms of an H200's copy bandwidth."""
    from step_floor import elementwise_bytes

    job = job_of(shape)
    moved = elementwise_bytes(job.model, job.train.global_batch * job.data.seq_len)
    assert sum(moved.values()) / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_the_plain_torch_model_has_as_many_parameters_as_ours(job_of):
    import torch
    from torch_llama import Llama, Sizes

    from meshwright.layout.parameters import list_parameters

    model = job_of("a").model
    with torch.device("meta"):
        by_hand = Llama(Sizes(16, 2048, 32, 8, 8192, 128256, 5e5, 8))
    assert sum(p.numel() for p in by_hand.parameters()) == sum(p.count for p in list_parameters(model))


def test_settings_override_the_defaults_of_the_benchmark(job_of):
    job = job_of("a", "layout.recompute=none", "train.residual_dtype=fp32")
    assert (job.layout.recompute, job.train.residual_dtype, job.train.block_backend) == (
        "none",
        "fp32",
        "triton",
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "GEMMs"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<Traits<128, cutlass::bfloat16_t> >", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_add_div_mul_sqrt_0", "optimizer"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "elementwise"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_add_cat_mul_2", "elementwise"),
        ("triton_poi_fused_fill_mul_sigmoid_silu_silu_backward_0", "elementwise"),
        ("triton_red_fused__to_copy_amax_arange_exp_gather_log_mul_sub_sum_0", "loss"),
        ("triton_poi_fused__to_copy_t_3", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_a_kernel_is_classified_by_its_name(name, kind):
    from kernel_classes import class_of

    assert class_of(name) == kind


def test_idle_time_of_overlapping_streams_is_counted_once():
    from kernel_classes import fold_trace

    rows = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 1000},
        {"cat": "kernel", "name": "triton_poi_fused_mul_0", "ts": 500, "dur": 1000},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1600, "dur": 400},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9999},
    ]
    folded = fold_trace(rows, steps=2)
    assert folded["span_ms"] == 1.0
    assert folded["idle_ms"] == pytest.approx(0.05)
    assert folded["kinds_ms"] == {"GEMMs": 0.5, "copies": 0.2, "elementwise": 0.5}
    assert [row["name"] for row in folded["kernels"]][-1] == "Memcpy HtoD"


def test_speed_ratios_skip_failed_configurations():
    from one_device import compare, describe_all

    rows = [
        {"shape": "a", "kind": "ours", "step_s": 0.5, "flops_per_s": 5e14},
        {"shape": "a", "kind": "bare", "step_s": 0.55, "flops_per_s": 4.5e14},
        {"shape": "a", "kind": "floor", "failed": "RuntimeError"},
        {"shape": "b", "kind": "ours", "failed": "RuntimeError"},
    ]
    ratios = compare(rows)
    assert ratios == {"a": {"ours / bare": pytest.approx(1.1)}, "b": {}}
    told = describe_all({"date": "today", "machine": "here", "rows": rows, "ratios": ratios})
    assert any("floor" in line and line.endswith("failed") for line in told)


@pytest.mark.parametrize(
    ("shape", "length", "sequences"),
    [("a", 0, (8, 4096)), ("a", 8192, (4, 8192)), ("b", 16384, (1, 16384)), ("b", 131072, (1, 131072))],
)
def test_longer_sequences_reduce_the_batch_down_to_one_sequence(tmp_path, shape, length, sequences):
    from one_device_worker import Task, build_shape

    job = build_shape(Task("bare", "bare", shape, 1, small=False, device="cpu", length=length), tmp_path)
    assert (job.train.global_batch, job.data.seq_len) == sequences
    assert job.layout.micro_batch == job.train.global_batch


def test_every_configuration_is_measured_at_every_sequence_length(monkeypatch):
    from one_device import list_tasks, parse_arguments

    words = "--shape a --only ours --only bare --length 8192 --length 131072:layout.recompute=full"
    monkeypatch.setattr(sys, "argv", ["one_device.py", *words.split(), "--set", "train.residual_dtype=fp32"])
    tasks = list_tasks(parse_arguments(), "cpu")
    assert [(task.kind, task.length, task.settings) for task in tasks] == [
        ("ours", 8192, ("train.residual_dtype=fp32",)),
        ("bare", 8192, ()),
        ("ours", 131072, ("train.residual_dtype=fp32", "layout.recompute=full")),
        ("bare", 131072, ()),
    ]


def test_lengths_are_compared_separately_and_the_plan_with_the_measurement():
    from one_device import compare, describe_all

    planned = {"planned_step_s": 0.51, "planned_peak_bytes": 45 * 2**30}
    rows = [
        {"shape": "a", "length": 131072, "kind": "ours", **planned, "failed": "Traceback\nOutOfMemoryError",
         "reason": "out of memory", "peak_bytes": 130 * 2**30},
        {"shape": "a", "length": 8192, "kind": "bare", "step_s": 0.6, "flops_per_s": 4e14},
        {"shape": "a", "length": 8192, "kind": "ours", "step_s": 0.5, "flops_per_s": 5e14,
         "peak_bytes": 50 * 2**30, **planned},
    ]  # fmt: skip
    ratios = compare(rows)
    assert ratios == {"a, 8192 tokens": {"ours / bare": pytest.approx(1.2)}, "a, 131072 tokens": {}}
    told = describe_all({"date": "today", "machine": "here", "rows": rows, "ratios": ratios})
    assert told[2].endswith("peak 50.0 GiB; planned 510.0 ms (+2.0%), 45.0 GiB (-10.0%)")
    assert told[3].endswith("out of memory, 130.0 GiB reached, 45.0 GiB planned")


def test_an_out_of_memory_error_is_named():
    import torch
    from one_device_worker import name_failure

    assert name_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")) == "out of memory"
    assert name_failure(ValueError("one\ntwo")) == "ValueError: one"
    assert name_failure(KeyError()) == "KeyError"


@pytest.mark.slow
def test_a_failing_configuration_is_reported_and_others_run(tmp_path):
    """A complete run on the small shape.

    An unknown key fails one configuration; the floor is still measured.
    """
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / "one_device.py"), "--small", "--overlap", "--shape", "a"]
    command += ["--only", "ours", "--only", "floor", "--set", "train.nonsense=1", "--out", str(out), "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    rows = {row["kind"]: row for row in json.loads(done.stdout)["rows"]}
    assert "train.nonsense" in rows["ours"]["failed"]
    assert "train.nonsense" in done.stderr
    assert rows["floor"]["step_s"] == pytest.approx(sum(rows["floor"]["parts_s"].values()))
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"ours", "floor"} <= {row["kind"] for row in written if "step_s" in row or "failed" in row}

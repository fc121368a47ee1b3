"""The settings of a proof, its messages, and the samples that it compares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshwright.spec.load import load_job
from meshwright.train.batches import assign_samples
from meshwright.verify.proof_task import (
    ActivationDifference,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    TensorDifference,
    UpdateDifference,
    explain_settings,
    proof_job,
    reference_job,
    select_sample_positions,
)

TEXT = str(Path(__file__).parents[3] / "examples" / "quickstart.toml")


def test_proof_is_float32_eager_and_deterministic_on_cpus():
    overrides = [
        "cluster.device=cuda",
        "train.precision=fp16",
        "train.loss_scale=8.0",
        "train.block_backend=triton",
        "compression.kind=bf16",
    ]
    overrides += ["train.warmup=5", "train.noise_scale_every=2", "layout.dp_replicate=2"]
    job = load_job(TEXT, overrides)
    proved = proof_job(job, 2**30)
    assert (proved.train.precision, proved.train.steps, proved.train.warmup) == ("fp32", 10, 2)
    assert (proved.train.block_backend, proved.train.deterministic) == ("eager", True)
    assert (proved.compression.kind, proved.cluster.device) == ("none", "cpu")
    assert proved.layout == dataclasses.replace(job.layout, placement="rank-order")
    assert proved.train.lr == job.train.lr
    said = " ".join(explain_settings(job))
    for key in (
        "train.precision=fp16",
        "compression.kind=bf16",
        "instead of triton",
        "instead of 5",
    ):
        assert key in said
    fast = [
        "cluster.device=cuda",
        "train.precision=bf16",
        "train.block_backend=triton",
        "train.residual_dtype=bf16",
        "train.gemm_autotune=true",
    ]
    narrow = [
        "train.precision=fp8",
        "train.fp8_weight_grads=true",
        "train.block_backend=compile",
    ]
    for keys in (fast, [*narrow, "cluster.peak_fp8_flops_per_s=1e15"]):
        assert proof_job(load_job(TEXT, keys), 2**30).train == proof_job(load_job(TEXT, []), 2**30).train
    plain = load_job(TEXT, ["train.warmup=1", "cluster.device=cpu"])
    assert explain_settings(plain) == []


def test_a_placement_with_free_slots_is_proved_on_one_machine():
    on = [
        "cluster.device=cpu",
        "cluster.nodes=2",
        "cluster.devices_per_node=3",
        "cluster.nic_bytes_per_s=1e9",
    ]
    job = load_job(TEXT, [*on, "layout.dp_replicate=4", "layout.placement=[0,1,3,4]"])
    assert proof_job(job, 2**30).layout.placement == "rank-order"


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        (["train.lr=1e-5"], 1e-3),
        (["train.lr=2e-3"], 2e-3),
        (["train.optimizer=sgd", "train.lr=1e-3"], 0.1),
        (["train.lr=1e-4", "train.lr_scaling=linear", "train.lr_base_batch=12"], 2.5e-4),
    ],
)
def test_learning_rate_is_raised_until_updates_show(overrides, lr):
    """The floor is that of the peak, after scaling by the batch size; a raised rate is printed."""
    job = load_job(TEXT, [*overrides, "train.global_batch=48", "cluster.device=cpu", "train.warmup=0"])
    assert proof_job(job, 2**30).train.lr == pytest.approx(lr)
    assert [f"train.lr={lr:g} instead of" in line for line in explain_settings(job)] == [True] * (
        lr != job.train.lr
    )


def test_reference_is_one_process_with_the_same_micro_batch():
    overrides = ["layout.dp_replicate=4", "layout.micro_batch=3", "layout.recompute=full"]
    reference = reference_job(proof_job(load_job(TEXT, overrides), 2**30))
    assert reference.layout.world_size == 1
    assert (reference.layout.micro_batch, reference.layout.recompute) == (3, "none")


@pytest.mark.parametrize(("batch", "ranks"), [(12, 2), (7, 3), (2, 4), (1, 1)])
def test_samples_of_every_rank_are_compared(batch, ranks):
    """They are the first and the last sample of each rank, as ``train/batches.py`` assigns them."""
    expected = {
        place
        for rank in range(ranks)
        if (mine := assign_samples(batch, rank, ranks))
        for place in (mine[0], mine[-1])
    }
    assert set(select_sample_positions(batch, ranks)) == expected


def test_proof_files_round_trip(tmp_path):
    task = ProofTask((0, 5), "elsewhere")
    task.write(tmp_path)
    assert ProofTask.read(tmp_path) == task
    notes = ReferenceRecord(["a", ""], ["a.weight"], {"a.weight": ["b.weight"]}, {"1": {"a.weight": 2.0}})
    notes.write(tmp_path)
    assert ReferenceRecord.read(tmp_path) == notes
    findings = RankFindings(3, [ActivationDifference("a", "output", 5, None)])
    findings.gradients["1"] = {"a.weight": TensorDifference(0.5, 2.0, 0.1)}
    findings.weights = {"a.weight": TensorDifference(None, missing=True)}
    findings.updates["1"] = {"a.weight": UpdateDifference(0.5, "lr", "twice")}
    findings.write(tmp_path)
    assert RankFindings.read(tmp_path, 3) == findings

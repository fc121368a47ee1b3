"""Every key of the job file has an effect, is refused, or is reported as having none.

The walk changes one key at a time in small jobs of many kinds. What a run takes from the job without torch is
the outcome: predicted memory, collectives and times, learning rates, weight decay, the optimizer's settings.
Keys that only a run shows are listed with the package that reads them.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.core.errors import UserError
from meshwright.layout.lr_schedule import lr_at
from meshwright.layout.no_effect import REASONS, find_unused_settings
from meshwright.layout.optimizer_state import decays
from meshwright.layout.parameters import list_parameters
from meshwright.plan.build import summarize
from meshwright.plan.predict import complete_layout, predict
from meshwright.spec.execution import autotunes_gemms, resolve_block_backend
from meshwright.spec.job import Job
from meshwright.spec.job_keys import list_choices, list_keys
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.load import apply_override, build_job
from meshwright.spec.paths import PREPARED_INDEX
from meshwright.spec.train_defaults import balance_coefficient, defaults, setting

SOURCES = Path(meshwright.__file__).parent

DENSE = {
    "num_layers": 6,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 128,
    "vocab_size": 256,
}
EXPERTS = DENSE | {"num_experts": 4, "experts_per_token": 2}
LATENT = DENSE | {"attention": "latent", "latent_size": 32, "rope_head_dim": 16}
RESNET = {"architecture": "resnet", "blocks": [1, 1], "num_classes": 10, "image_size": 32}
JOBS: dict[str, str] = {
    "one process": "layout.dp_replicate=1",
    "replicas": "layout.dp_replicate=2",
    "zero-1": "layout.dp_shard=2 layout.zero=1",
    "zero-3": "layout.dp_shard=2 layout.micro_batch=1",
    "tensor": "layout.tp=2",
    "pipeline": "layout.pp=2",
    "interleaved": "layout.pp=2 layout.schedule=interleaved layout.virtual_stages=2",
    "context": "layout.cp=2",
    "experts": "layout.dp_shard=2 layout.zero=1",
    "latent": "layout.dp_replicate=1",
    "window": "model.window=8",
    "resnet": "layout.dp_replicate=2 cluster.nodes=2 cluster.devices_per_node=1",
    "cpu": "layout.dp_replicate=2 cluster.device=cpu",
    "sgd": "train.optimizer=sgd",
    "wsd": "train.schedule=wsd",
    "fp16": "train.precision=fp16",
    "fp8": "train.precision=fp8 train.block_backend=compile",
    "triton": "train.precision=bf16 train.block_backend=triton layout.micro_batch=8",
    "fp4": "train.precision=fp4 cluster.peak_fp4_flops_per_s=1e16",
    "offload": "layout.offload=optimizer",
    "nodes": "cluster.nodes=2 cluster.devices_per_node=1 layout.dp_replicate=2",
    "cpu nodes": "cluster.nodes=2 cluster.devices_per_node=2 layout.dp_replicate=4 cluster.device=cpu",
    "racks": "cluster.nodes=4 cluster.devices_per_node=1 cluster.nodes_per_rack=2 layout.dp_replicate=4 "
    "cluster.spine_oversubscription=2.0",
}
MODELS = {"experts": EXPERTS, "latent": LATENT, "resnet": RESNET}
VALUES = {
    "cluster.nodes": "1 cluster.devices_per_node=2",
    "cluster.nodes_per_rack": "4",
    "layout.bucket_mb": "0.01",
    "layout.cp": "2",
    "layout.dp_replicate": "2",
    "layout.dp_shard": "2",
    "layout.ep": "2",
    "layout.etp": "2",
    "layout.micro_batch": "4",
    "layout.placement": "[1,0]",
    "layout.pp": "2",
    "layout.prefetch": "2",
    "layout.stage_layers": "[1,5]",
    "layout.tp": "2",
    "layout.virtual_stages": "3",
    "layout.zero": "2",
    "model.attention": "latent model.latent_size=32 model.rope_head_dim=16",
    "model.blocks": "[2,1]",
    "model.bottleneck": "true",
    "model.head_dim": "32",
    "model.hidden_size": "128",
    "model.num_heads": "8",
    "model.num_kv_heads": "2",
    "model.positions": "learned model.max_positions=64",
    "model.rope_head_dim": "8",
    "model.stem": "small",
    "model.width": "32",
    "model.window_every": "2",
    "train.lr_base_batch": "4 train.lr_scaling=linear",
    "train.lr_scaling": "sqrt train.lr_base_batch=4",
    "model.channels": "1",
    "train.momentum": "0",
    "train.nesterov": "true",
    "train.runtime": "megatron-lm",
    "train.warmup": "2",
}
"""Values to try, with further overrides that they need. Other keys: each choice, or several numbers."""
NUMBERS = ("0.5", "3")

READERS = {
    "name": "runs",
    "run_dir": "runs",
    "model.preset": "spec/load.py",
    "model.architecture": "spec/model.py",
    "model.hf": "spec/hf_config.py",
    "model.max_positions": "spec/legality/model.py",
    "model.rope_theta": "models",
    "model.rope_factor": "models",
    "model.rope_low_freq_factor": "models",
    "model.rope_high_freq_factor": "models",
    "model.rope_original_positions": "models",
    "model.norm_eps": "models",
    "model.init_std": "models",
    "model.router": "models",
    "model.norm_groups": "spec/model.py",
    "cluster.preset": "cli",
    "cluster.file": "cli",
    "cluster.basis": "cli",
    "cluster.device_name": "cli",
    "cluster.failure_hours": "plan",
    "cluster.host_memory_bytes": "plan",
    "cluster.storage_bytes_per_s": "plan",
    "cluster.probed": "plan",
    "cluster.matmul_flops_per_s": "train",
    "data.path": "runs",
    "data.sources": "runs",
    "data.tokenizer": "runs",
    "data.prompt_masking": "runs",
    "data.text_field": "runs",
    "data.template": "runs",
    "data.prompt_field": "runs",
    "data.answer_field": "runs",
    "data.on_bad_records": "runs",
    "data.eval": "runs",
    "data.eval_fraction": "train",
    "data.cache": "runs",
    "data.follow": "train",
    "train.clip": "train",
    "train.on_bad_step": "train",
    "train.spike_factor": "train",
    "train.grad_noise": "train",
    "train.noise_scale_every": "train",
    "train.z_loss": "train",
    "train.loss_scale": "train",
    "train.seed": "train",
    "train.eval_every": "train",
    "train.eval_samples": "train",
    "train.tensorboard": "runs",
    "train.wandb": "report",
    "train.mlflow": "report",
    "train.deterministic": "train",
    "layout.mode": "plan",
    "layout.schedule_file": "layout",
    "checkpoint.dir": "runs",
    "checkpoint.every_steps": "checkpoint",
    "checkpoint.every_minutes": "checkpoint",
    "checkpoint.auto": "checkpoint",
    "checkpoint.keep_last": "checkpoint",
    "checkpoint.keep_every": "checkpoint",
    "checkpoint.on_best": "checkpoint",
    "checkpoint.stores": "checkpoint",
    "checkpoint.quorum": "checkpoint",
    "checkpoint.read": "checkpoint",
    "checkpoint.asynchronous": "checkpoint",
    "train.transport": "spec/execution.py",
    "elastic.collective_timeout_s": "parallel",
    "elastic.heartbeat_timeout_s": "runs",
    "elastic.restarts": "runs",
    "elastic.grow_after_s": "runs",
    "elastic.join_timeout_s": "runs",
    "elastic.may_change": "runs",
    "elastic.retry_device_s": "runs",
    "elastic.node_wait_s": "runs",
    "elastic.orphan_s": "runs",
    "elastic.policy": "runs",
    "elastic.snapshot_every": "train",
    "elastic.spares": "runs",
    "elastic.stop_grace_s": "runs",
    "elastic.straggler": "elastic",
    "elastic.metrics": "runs",
    "elastic.metrics_token_file": "runs",
}
"""Keys whose effect no plan shows, by the package or module that reads them."""
NOT_BUILT = {"consistency.mode": "consistency-mode-not-built"}
"""Keys of which only the default is implemented: other values are refused."""
DESCRIPTIONS = ("model.", "cluster.")
"""Tables that describe a model and a machine: a rate that this layout does not need is not a mistake."""

PLAN_ONLY = ("('model.", "('train.runtime=", "('train.precision=fp4")
"""Changes that are planned, even if `train` does not support them yet."""

ECHOES = ("layout", "reasons", "unused_settings")
"""Parts of a plan that repeat the job."""


@functools.cache
def settle(name: str, *changes: str) -> Job:
    """A job with its layout completed, as a plan has it. Raises if it is refused."""
    images = MODELS.get(name) is RESNET
    tree: dict[str, Any] = {
        "name": "walk",
        "model": copy.deepcopy(MODELS.get(name, DENSE)),
        "cluster": {"preset": "h100-sxm"},
        "data": {"path": "images"} if images else {"path": "text", "seq_len": 32},
        "train": {"steps": 8, "global_batch": 8, "block_backend": "eager"},
        "layout": {"dp_replicate": 1, "micro_batch": 2},
    }
    for change in (*JOBS[name].split(), *changes):
        if problem := apply_override(tree, change):
            raise UserError(problem)
    to_run = images or (name not in ("latent", "fp4", "window") and not str(changes).startswith(PLAN_ONLY))
    job = build_job(tree, to_run=to_run)
    settled = with_layout(job, complete_layout(job, job.layout))
    if problems := find_problems(settled, to_run):
        raise UserError(*problems)
    return settled


@functools.cache
def outcome(job: Job) -> str:
    """What a run of this job would do, as far as it is known without torch."""
    train, predicted = job.train, summarize(predict(job, job.layout))
    facts = {
        "plan": {key: value for key, value in predicted.items() if key not in ECHOES},
        "lr": [lr_at(step, train) for step in range(train.steps)],
        "decay": [
            decays(p.name, len(p.shape), train) and setting(train, "weight_decay")
            for p in list_parameters(job.model)
        ],
        "optimizer": {key: setting(train, key) for key in defaults(train)},
        "balance": balance_coefficient(train),
        "blocks": resolve_block_backend(job),
        "autotuned": autotunes_gemms(job),
        "precision": train.precision,
        "fp8": train.fp8_weight_grads,
    }
    return json.dumps(facts, default=str)


def judge(key: str, name: str) -> dict[str, str]:
    """For each value of a key in a job: refused, reported, changed, the same job, or silent."""
    found, plain = {}, settle(name)
    for value in (VALUES[key],) if key in VALUES else list_choices(key) or NUMBERS:
        try:
            job = settle(name, *f"{key}={value}".split())
        except UserError:
            found[value] = "refused"
            continue
        if any(unused.key == key for unused in find_unused_settings(job)):
            found[value] = "reported"
        else:
            found[value] = (
                "same" if job == plain else "changed" if outcome(job) != outcome(plain) else "silent"
            )
    return found


def test_every_key_of_a_model_and_a_cluster_changes_the_outcome_of_some_job():
    keys = [key for key in list_keys() if key.startswith(DESCRIPTIONS) and key not in READERS]
    without = [key for key in keys if not any("changed" in judge(key, name).values() for name in JOBS)]
    assert without == []


def test_no_legal_value_of_a_setting_is_silently_ignored():
    """And every setting changes the outcome of some job."""
    keys = [key for key in list_keys() if not key.startswith(DESCRIPTIONS)]
    keys = [key for key in keys if key not in READERS and key not in NOT_BUILT]
    walk = {key: {name: judge(key, name) for name in JOBS} for key in keys}
    silent = [
        f"{key}={value} in {name}"
        for key, jobs in walk.items()
        for name, found in jobs.items()
        for value, what in found.items()
        if what == "silent"
    ]
    assert silent == []
    without = [
        key for key, jobs in walk.items() if not any("changed" in found.values() for found in jobs.values())
    ]
    assert without == []


@functools.cache
def names_in(part: str) -> set[str]:
    """The attributes and strings in a module, or in the modules of a package."""
    files = (SOURCES / part).rglob("*.py") if (SOURCES / part).is_dir() else [SOURCES / part]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {
        node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
    }


def test_keys_that_no_plan_shows_are_read_by_the_run():
    unread = [key for key, part in READERS.items() if key.rpartition(".")[2] not in names_in(part)]
    assert unread == []
    assert READERS.keys() | NOT_BUILT.keys() <= set(list_keys())


@pytest.mark.parametrize(("key", "code"), NOT_BUILT.items())
def test_only_the_default_of_an_unbuilt_key_is_accepted(key, code):
    for value in list_choices(key)[1:]:
        with pytest.raises(UserError) as caught:
            settle("one process", f"{key}={value}")
        assert [problem.code for problem in caught.value.problems] == [code]


CASES = [
    ("compression.kind", "bf16", "one process"),
    ("compression.kind", "fp16", "tensor"),
    ("compression.kind", "bf16", "pipeline"),
    ("layout.bucket_mb", "1.0", "one process"),
    ("layout.bucket_mb", "1.0", "tensor"),
    ("layout.bucket_mb", "1.0", "zero-3"),
    ("layout.accumulate", "deferred layout.micro_batch=4", "zero-3"),
    ("layout.offload", "optimizer train.momentum=0", "sgd"),
    ("layout.offload", "optimizer", "cpu"),
    ("layout.offload", "all layout.dp_replicate=1 layout.dp_shard=2 layout.micro_batch=1", "cpu"),
    ("layout.placement", "rank-order", "replicas"),
    ("layout.placement", "rank-order", "nodes"),
    ("layout.prefetch", "7", "zero-3"),
    ("layout.prefetch", "4 layout.pp=2 layout.micro_batch=1", "zero-3"),
    ("train.block_backend", "triton cluster.device=cpu", "one process"),
    ("train.transport", "gloo cluster.device=cpu", "one process"),
    ("train.transport", "shared_memory cluster.nodes=2 cluster.devices_per_node=1", "cpu"),
    ("train.all_reduce", "hierarchical", "cpu"),
    ("train.all_reduce", "hierarchical", "nodes"),
    ("train.grad_dtype", "bf16 layout.micro_batch=4", "triton"),
    ("train.gemm_autotune", "true layout.dp_replicate=1 layout.tp=2 layout.micro_batch=1", "triton"),
    ("train.decay_embeddings", "false train.weight_decay=0", "one process"),
    ("train.schedule", "linear train.warmup=8", "one process"),
    ("train.min_lr_ratio", "0.5 train.warmup=9", "one process"),
    ("train.noise_scale_every", "9", "replicas"),
    ("train.eval_every", "9", "one process"),
    ("train.replica_check_every", "1", "zero-3"),
    ("train.replica_check_every", "9", "replicas"),
    ("checkpoint.every_steps", "9", "one process"),
    ("checkpoint.every_minutes", "5.0 checkpoint.auto=true", "one process"),
    ("checkpoint.keep_every", "4", "one process"),
    ("checkpoint.keep_every", "4 checkpoint.every_steps=3", "one process"),
    ("checkpoint.keep_every", "8 checkpoint.on_best=true train.eval_every=4", "one process"),
    ("checkpoint.on_best", "true", "one process"),
    ("checkpoint.quorum", "1", "one process"),
    ("checkpoint.read", "nearest", "one process"),
    ("elastic.collective_timeout_s", "60.0", "one process"),
    ("elastic.spares", "1 elastic.restarts=0", "replicas"),
    ("elastic.join_timeout_s", "60.0", "replicas"),
    ("elastic.node_wait_s", "10.0", "replicas"),
    ("elastic.node_wait_s", "10.0 elastic.policy=give-up", "nodes"),
    ("elastic.node_wait_s", "10.0 elastic.restarts=0", "nodes"),
    ("elastic.straggler", "replace", "one process"),
    ("elastic.metrics_token_file", "token", "replicas"),
    ("elastic.policy", "give-up", "replicas"),
    ("elastic.may_change", "any", "one process"),
    ("elastic.may_change", "data elastic.restarts=0", "replicas"),
    ("elastic.grow_after_s", "5.0", "replicas"),
    ("elastic.retry_device_s", "5.0", "nodes"),
    ("elastic.policy", "give-up elastic.restarts=0", "nodes"),
    ("data.cache", "elsewhere", "one process"),
    ("data.on_bad_records", "skip", "one process"),
    ("data.text_field", "body data.path=plain.txt", "one process"),
    ("elastic.snapshot_every", "9", "one process"),
]


@pytest.mark.parametrize(("key", "change", "name"), CASES)
def test_a_setting_without_effect_is_reported_once(key, change, name, tmp_path):
    (tmp_path / PREPARED_INDEX).touch()
    where = (f"data.path={tmp_path}",) if key in ("data.cache", "data.on_bad_records") else ()
    reported = [
        unused.key for unused in find_unused_settings(settle(name, *f"{key}={change}".split(), *where))
    ]
    assert reported.count(key) == 1


def test_every_row_of_the_table_has_a_case_and_a_default_is_never_reported():
    assert {key for key, _, _ in CASES} == REASONS.keys()
    for name in JOBS:
        assert find_unused_settings(settle(name)) == [], name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("compression.kind=bf16", "replicas"),
        ("compression.kind=bf16", "zero-3"),
        ("layout.bucket_mb=1.0", "zero-1"),
        ("layout.placement=rank-order cluster.nodes=2 cluster.devices_per_node=2 layout.tp=2", "replicas"),
        ("layout.placement=[1,0]", "replicas"),
        ("layout.bucket_mb=1.0 layout.offload=optimizer", "one process"),
        ("layout.accumulate=deferred", "zero-3"),
        ("layout.prefetch=6", "zero-3"),
        ("layout.offload=optimizer", "replicas"),
        ("train.noise_scale_every=8", "replicas"),
        ("train.min_lr_ratio=0.5 train.warmup=6", "one process"),
        ("elastic.snapshot_every=8", "one process"),
        ("data.text_field=body data.path=records.jsonl", "one process"),
        ("checkpoint.on_best=true train.eval_every=4", "one process"),
        ("elastic.stop_grace_s=60.0", "tensor"),
        ("elastic.spares=1", "one process"),
        ("elastic.policy=give-up", "nodes"),
        ("elastic.may_change=data elastic.policy=give-up", "replicas"),
        ("elastic.may_change=any elastic.grow_after_s=5.0 elastic.retry_device_s=0.0", "replicas"),
        ("elastic.node_wait_s=10.0", "nodes"),
        ("elastic.straggler=replace", "replicas"),
        ("elastic.metrics=127.0.0.1:0", "one process"),
        ("elastic.metrics_token_file=token elastic.metrics=127.0.0.1:0", "one process"),
        ("data.cache=elsewhere", "one process"),
    ],
)
def test_a_setting_with_an_effect_is_not_reported(change, name):
    assert find_unused_settings(settle(name, *change.split())) == []


def test_experts_reduced_over_tensor_parallel_ranks_are_compressed():
    """With tp and no ep, each rank routes a part of the tokens to all experts: it reduces their gradients."""
    job = settle("experts", "layout.dp_shard=1", "layout.zero=0", "layout.tp=2", "compression.kind=bf16")
    assert find_unused_settings(job) == []
    assert outcome(job) != outcome(settle("experts", "layout.dp_shard=1", "layout.zero=0", "layout.tp=2"))

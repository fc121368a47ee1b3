"""The block backend: Triton for Llama-shaped decoders with unsharded weights on a GPU, or a fallback."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.layout.no_effect import find_unused_settings
from meshwright.spec.execution import explain_block_backend, resolve_block_backend, uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from model_shapes import GPT_PARTS

LLAMA = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 256,
    "vocab_size": 256,
}

CPU = {"preset": "local", "device": "cpu", "devices_per_node": 1, "matmul_flops_per_s": 1e11}


def build(**tables: Any) -> Job:
    """A job that Triton blocks can run, with changed tables."""
    tree: dict[str, Any] = {
        "name": "small",
        "model": LLAMA,
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 8, "precision": "bf16", "block_backend": "triton"},
    }
    for name, keys in tables.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return build_job(tree, to_run=False)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"train": {"block_backend": "triton"}},
        {"train": {"precision": "fp8"}},
        {"train": {"precision": "fp16"}},
        {"train": {"residual_dtype": "bf16"}},
        {"layout": {"recompute": "full"}},
        {"layout": {"dp_replicate": 2}},
        {"layout": {"dp_shard": 2, "zero": 1}},
        {"data": {"mask": "document"}},
        {"model": {"tied_embeddings": True}},
        {"model": {"head_dim": 16}},
        {"model": {"head_dim": 64}},
    ],
    ids=str,
)
def test_triton_blocks_run_if_device_model_and_layout_support_them(tables):
    job = build(**tables)
    assert resolve_block_backend(job) == "triton"
    assert find_unused_settings(job) == []


@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"compile_backend": "aot_eager"}},
        {"train": {"precision": "fp32"}},
        {"model": {"attention_bias": True}},
        {"model": {"ffn_bias": True}},
        {"model": {"activation": "gelu_tanh"}},
        {"model": {"positions": "learned", "max_positions": 32}},
        {"model": {"norm": "layer"}},
        {"model": {"num_kv_heads": 4, "max_positions": 32, **GPT_PARTS}},
        {"model": {"num_experts": 4, "experts_per_token": 2}},
        {"model": {"head_dim": 24}},
        {"model": {"head_dim": 8}},
        {"layout": {"tp": 2}},
        {"layout": {"cp": 2}},
        {"layout": {"pp": 2}},
        {"layout": {"dp_shard": 2, "zero": 2}},
        {"layout": {"dp_shard": 2, "zero": 3}},
    ],
    ids=str,
)
def test_triton_falls_back_to_compile_with_a_reason(tables):
    job = build(**tables)
    assert resolve_block_backend(job) == "compile"
    assert [unused.key for unused in find_unused_settings(job)] == ["train.block_backend"]


def test_triton_falls_back_to_eager_on_a_cpu():
    """Compilation by inductor would take longer than a short run; nobody asked for it."""
    job = build(cluster=CPU)
    assert (resolve_block_backend(job), uses_eager_blocks(job)) == ("eager", True)
    (unused,) = find_unused_settings(job)
    assert unused.reason == "it needs a GPU; the blocks run as train.block_backend=eager"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, "triton by default: the fastest backend"),
        ({"layout": {"tp": 2}}, "compile by default: triton needs unsharded weights and sequences"),
        ({"model": {"attention_bias": True}}, "compile by default: triton needs plain attention heads"),
        (
            {"train": {"precision": "fp32"}},
            "eager by default: triton needs train.precision=bf16, fp16 or fp8",
        ),
        ({"cluster": CPU}, "eager by default: triton needs a GPU"),
        (
            {"model": {"num_experts": 4, "experts_per_token": 2}},
            "eager by default: triton needs a dense decoder",
        ),
    ],
    ids=str,
)
def test_default_backend_has_a_reason(tables, reason):
    tables = {**tables, "train": {**tables.get("train", {}), "block_backend": None}}
    (line,) = explain_block_backend(build(**tables))
    assert line.startswith(f"train.block_backend={reason}")


@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_other_backends_are_taken_as_given(backend):
    job = build(train={"block_backend": backend})
    assert resolve_block_backend(job) == backend
    assert explain_block_backend(job) == []


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_checkpointed_expert_blocks_are_said_to_run_eagerly(recompute):
    """torch.compile leaves them alone: the dispatch of tokens breaks the graph inside the checkpoint."""
    experts = {"num_experts": 4, "experts_per_token": 2}
    job = build(model=experts, train={"block_backend": "compile"}, layout={"recompute": recompute})
    found = explain_block_backend(job)
    assert [
        line.startswith("train.block_backend=compile: blocks with experts run eagerly") for line in found
    ] == ([] if recompute == "none" else [True])


def test_resnet_block_backend_is_eager():
    sizes = {"architecture": "resnet", "blocks": [1, 1], "num_classes": 10, "image_size": 32}
    tree = {
        "name": "small",
        "model": sizes,
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "images"},
        "train": {"steps": 4, "global_batch": 8, "precision": "bf16"},
    }
    assert resolve_block_backend(build_job(tree, to_run=False)) == "eager"


def test_grad_dtype_without_effect_is_reported():
    """bf16 gradients need one GPU and one micro-batch."""
    train = {
        "steps": 4,
        "global_batch": 8,
        "precision": "bf16",
        "block_backend": "triton",
        "grad_dtype": "bf16",
    }
    tree = {
        "name": "small",
        "model": LLAMA,
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "text", "seq_len": 32},
        "train": train,
        "layout": {"micro_batch": 8},
    }

    def unused(changes):
        return [setting.key for setting in find_unused_settings(build_job(tree | changes))]

    assert unused({}) == []
    others = [{"layout": {"micro_batch": 4}}, {"layout": {"micro_batch": 4, "dp_replicate": 2}}]
    others += [{"layout": {"micro_batch": 8, "offload": "optimizer"}}, {"model": {**LLAMA, "norm": "layer"}}]
    for other in others:
        assert "train.grad_dtype" in unused(other)

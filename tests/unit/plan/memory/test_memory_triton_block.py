"""Which jobs our own kernels compute: Llama-shaped decoders, whole on a GPU, compiled for 16 bits or 8."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.execution import explain_grad_dtype, uses_triton_blocks
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


def runs(**tables: Any) -> bool:
    """Whether the kernels compute a job that they are made for, with tables laid over it."""
    tree: dict[str, Any] = {
        "name": "small",
        "model": LLAMA,
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 8, "precision": "bf16", "block_backend": "triton"},
    }
    for name, keys in tables.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return uses_triton_blocks(build_job(tree, to_run=False))


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
def test_own_kernels_compute_it(tables):
    assert runs(**tables)


@pytest.mark.parametrize(
    "tables",
    [
        {"cluster": {"preset": "local", "device": "cpu", "devices_per_node": 1, "matmul_flops_per_s": 1e11}},
        {"train": {"block_backend": "compile"}},
        {"train": {"block_backend": "eager"}},
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
def test_own_kernels_leave_it_alone(tables):
    """Whatever one of these changes, a kernel does not do it, or nothing asked for a kernel."""
    assert not runs(**tables)


def test_a_convolutional_model_has_no_blocks_for_them():
    sizes = {"architecture": "resnet", "blocks": [1, 1], "num_classes": 10, "image_size": 32}
    tree = {
        "name": "small",
        "model": sizes,
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "images"},
        "train": {"steps": 4, "global_batch": 8, "precision": "bf16"},
    }
    assert not uses_triton_blocks(build_job(tree, to_run=False))


def test_gradients_that_stay_float32_say_so():
    """One GPU, one micro-batch: those of its matrices are of 16 bits. Elsewhere a plan has a sentence."""
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
    assert explain_grad_dtype(build_job(tree)) == []
    others = [{"layout": {"micro_batch": 4}}, {"layout": {"micro_batch": 4, "dp_replicate": 2}}]
    others += [{"layout": {"micro_batch": 8, "offload": "optimizer"}}, {"model": {**LLAMA, "norm": "layer"}}]
    for other in others:
        (sentence,) = explain_grad_dtype(build_job(tree | other))
        assert "has no effect here" in sentence
    assert explain_grad_dtype(build_job(tree | {"train": train | {"grad_dtype": "fp32"}})) == []

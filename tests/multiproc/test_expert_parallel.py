"""Expert parallelism: equal to one process and to the plan, also where experts get no token."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from prover import Prover, require_equal_and_planned
from reference_runs import TEN_STEPS, ResumeChecker, max_relative_diff, reference_losses
from safetensors.torch import load_file

from meshwright.checkpoint.hf.export import export_checkpoint
from meshwright.cli.generate import write_text
from meshwright.cli.output import Output
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.spec.load import apply_override, build_job

DECODER = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 264}
MIXTURE = {**DECODER, "ffn_size": 64, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}
BUSY = {**MIXTURE, "capacity_factor": 1.0, "shared_experts": 1, "ffn_bias": True, "activation": "gelu"}
"""Tokens are dropped, and experts have biases; `down.bias` is replicated over `etp`."""
BALANCED = {"balance_loss": 0.05, "z_loss": 0.01, "balance_rate": 0.01}


def slow(layout):
    """A case of `make test-all`."""
    return pytest.param(layout, marks=pytest.mark.slow)


def job_of(layout, model, data, train=()):
    """A small job with a layout in command-line form."""
    tree = {
        "name": "experts",
        "model": model,
        "data": {"path": str(data), "seq_len": 32},
        "train": {"steps": 10, "global_batch": 6, "lr": 3e-3, "warmup": 2, **dict(train)},
        "cluster": {"preset": "local", "device": "cpu"},
    }
    for word in ("micro_batch=2", *layout.split()):
        assert apply_override(tree, f"layout.{word}") is None
    return build_job(tree)


@pytest.fixture(scope="module")
def prover(tmp_path_factory, prepared):
    return Prover(tmp_path_factory.mktemp("experts"), prepared)


@pytest.mark.parametrize(
    "layout",
    [
        slow("dp_shard=2 ep=2 zero=1"),
        slow("dp_shard=2 ep=2 zero=3"),
        slow("tp=2 ep=2 sequence_parallel=true"),
        slow("cp=2 ep=2"),
        slow("cp=2 etp=2 zero=2 micro_batch=1"),
        slow("tp=2 ep=2"),
        slow("tp=2 etp=2 recompute=full"),
        slow("cp=2 ep=2 zero=3 context=ulysses recompute=selective"),
        slow("dp_replicate=2 cp=2 ep=2"),
        slow("dp_shard=4 ep=2 zero=1"),
        slow("dp_shard=4 ep=2 etp=2 zero=3"),
        slow("dp_replicate=2 dp_shard=2 ep=2 zero=2"),
        slow("cp=2 tp=2 ep=2"),
        slow("cp=2 tp=2 ep=2 zero=3 sequence_parallel=true"),
        slow("pp=2 dp_shard=2 ep=2 zero=1"),
        slow("pp=2 tp=2 ep=2 sequence_parallel=true"),
    ],
)
def test_sharded_experts_equal_one_process(prover, prepared, layout):
    """Losses, gradients, calls and bytes per axis, state per rank, and the load of every expert.

    Capacity and balance are counted over whole sequences, however their tokens are sharded.
    """
    proof = require_equal_and_planned(prover, job_of(layout, BUSY, prepared, BALANCED))
    steps = [[layer["dropped"] for layer in step] for step in proof.loads]
    assert len(steps) == 2
    assert all(sum(step) > 0 for step in steps), "some tokens are dropped"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory, prepared):
    """Reference and layout route every token to the first two experts."""
    folder = tmp_path_factory.mktemp("crowded")
    return Prover(folder, prepared, "parallelism_bugs:route_to_first_experts")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "layout",
    [
        slow("cp=2 ep=2"),
        "dp_shard=2 ep=2 zero=3",
        slow("pp=2"),
        slow("dp_shard=2 ep=2 zero=1"),
        slow("dp_shard=2 ep=2 zero=2"),
        slow("dp_shard=4 ep=4 zero=3"),
        slow("pp=2 cp=2 ep=2"),
        slow("pp=2 dp_shard=2 ep=2 zero=1"),
        slow("pp=2 dp_shard=2 ep=2 zero=3"),
        slow("tp=2 etp=2 recompute=full"),
    ],
)
def test_experts_without_tokens_equal_one_process(crowded, prepared, layout):
    """A rank with idle experts only takes part in all collectives without rows; its gradients are zero."""
    proof = require_equal_and_planned(
        crowded, job_of(layout, MIXTURE, prepared), "parallelism_bugs:route_to_first_experts"
    )
    assert {tuple(expert > 0 for expert in layer["load"]) for step in proof.loads for layer in step} == {
        (True, True, False, False)
    }
    compared = [tensor for found in proof.findings for tensor in found.gradients["1"].values()]
    assert not any(tensor.missing for tensor in compared)


PADDED = {**BALANCED, "balance_rate": 0.0}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Documents of 18 to 30 bytes: no two fit into a row of 32, so every row ends with padding."""
    folder = tmp_path_factory.mktemp("short")
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"document {number:02d}: " + "fox" * (2 + number % 5))
    out = folder / "prepared"
    prepare_corpus(CorpusSpec(sources=(f"{folder}/*.txt",), out=str(out), eval_fraction=0.1), folder)
    return out


@pytest.fixture(scope="module")
def padded_prover(tmp_path_factory, short_documents):
    return Prover(tmp_path_factory.mktemp("padded"), short_documents)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("cp=2 ep=2", BUSY),
        pytest.param("cp=2 tp=2", MIXTURE, marks=pytest.mark.slow),
        pytest.param("tp=2 etp=2 sequence_parallel=true recompute=full", BUSY, marks=pytest.mark.slow),
        pytest.param("dp_shard=2 ep=2 zero=3", MIXTURE, marks=pytest.mark.slow),
        pytest.param("pp=2 tp=2 schedule=zb-h1", MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_padding_counts_in_no_auxiliary_loss_in_any_layout(padded_prover, short_documents, layout, model):
    """Losses, gradients and expert load of one process; the load has the tokens of documents alone."""
    job = job_of(layout, model, short_documents, PADDED)
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, mask="document"))
    proof = require_equal_and_planned(padded_prover, job)
    routed = [sum(layer["load"]) for step in proof.loads for layer in step]
    assert max(routed) < 6 * 31 * 2, "padding was counted"
    assert proof.loads == proof.reference_loads


def as_overrides(table, section):
    return [f"{section}.{key}={str(value).lower()}" for key, value in dict(table).items()]


TRAINED = (*as_overrides(MIXTURE, "model"), "train.balance_rate=0.01")
SHARDS = ("layout.dp_shard=2", "layout.ep=2", "layout.zero=3")


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tp=2",),
        slow(("layout.dp_replicate=1",)),
        slow(("layout.cp=2", "layout.ep=2")),
        slow(("layout.pp=2", "layout.tp=2", "layout.etp=2", "layout.zero=0")),
    ],
    ids=" ".join,
)
def test_a_checkpoint_of_sharded_experts_resumes_in_any_layout(train, tmp_path, layout):
    """With optimizer state and biases: the loss curve of an uninterrupted run."""
    ResumeChecker(train, tmp_path, *TRAINED).require_equal_losses(SHARDS, layout)


def test_a_replicated_bias_is_saved_without_a_collective(train):
    """With etp=2 the columns of an expert are all-gathered; the bias of `down` is on both ranks."""
    settings = (*as_overrides(MIXTURE, "model"), "model.ffn_bias=true", "layout.cp=2", "layout.etp=2")
    result = train(*settings, "train.steps=2").result
    assert result["audit_ok"], result["differences"]


@pytest.mark.slow
def test_a_checkpoint_of_sharded_experts_resumes_bit_identically(train, tmp_path):
    ResumeChecker(train, tmp_path, *TRAINED).require_bit_identical(SHARDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (*SHARDS, "train.precision=bf16", "compression.kind=bf16", "layout.recompute=selective"),
        ("layout.cp=2", "layout.ep=2", "train.precision=fp16", "train.z_loss=0.01", "compression.kind=bf16"),
        ("layout.cp=2", "layout.etp=2", "layout.zero=1", "train.precision=fp16", "train.balance_loss=0.05"),
    ],
    ids=" ".join,
)
def test_16_bit_dispatch_stays_near_float32_with_a_clean_audit(train, settings):
    """Half the bytes, as predicted. Auxiliary losses are scaled like the loss. Losses within 1%."""
    training = [word for word in settings if word.startswith("train.") and "precision" not in word]
    exact = reference_losses(train, *as_overrides(MIXTURE, "model"), *training)
    assert (
        max_relative_diff(train(*TEN_STEPS, *as_overrides(MIXTURE, "model"), *settings).losses, exact) < 1e-2
    )


def test_sharded_experts_generate_and_export_like_one_process(train, tmp_path, capfd):
    """Equal exported weights, and equal text with and without tensor parallel."""
    settings = [*as_overrides(MIXTURE, "model"), "train.steps=3", "model.tied_embeddings=false"]
    settings.append("data.seq_len=31")  # odd: two ranks cannot have equal halves
    exported = []
    for number, layout in enumerate((("layout.dp_shard=2", "layout.ep=2"), ("layout.dp_replicate=1",))):
        checkpoint = Path(train(*settings, *layout).result["checkpoint"])
        export_checkpoint(checkpoint, tmp_path / str(number), "float32", 10**9)
        exported.append(load_file(tmp_path / str(number) / "model.safetensors"))
    ours, theirs = exported
    assert ours.keys() == theirs.keys()
    assert any(".experts.3." in name for name in ours)
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() < 1e-4 * theirs[name].norm(), name

    def written(tp):
        capfd.readouterr()
        settings = {"prompt": "the ", "tokens": 12, "template": None, "tp": tp}
        assert write_text(Output(as_json=True), checkpoint, settings) == 0
        return json.loads(capfd.readouterr().out)["text"]

    assert written(1) == written(2) != ""

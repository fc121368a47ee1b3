"""MoE models on real ranks: equal to one process, resumed bit-identically, exported and reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from prover import Prover

from meshwright.checkpoint.hf.export import export_checkpoint
from meshwright.core.errors import UserError
from meshwright.layout.state_chunks import SELECTION_BIAS
from meshwright.report.html import draw_page
from meshwright.report.run_report import read_report
from meshwright.spec.load import load_job
from meshwright.train.generate import GenerateTask, load_model
from saved_checkpoints import load_weights

EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_size=64")
BALANCED = (*EXPERTS, "train.balance_loss=0.05", "train.z_loss=0.01", "train.balance_rate=0.01")


@pytest.mark.parametrize(
    "overrides",
    [
        # Seven samples: the last micro-batch of a replica is padded with zero-weight samples.
        (
            "layout.dp_replicate=2",
            "train.global_batch=7",
            "layout.micro_batch=3",
            "model.capacity_factor=1.0",
        ),
        pytest.param(
            (
                "layout.dp_shard=2",
                "layout.recompute=selective",
                "model.router=sigmoid",
                "model.shared_experts=1",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("layout.pp=2", "layout.recompute=full", "layout.micro_batch=3", "train.global_batch=7"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_ddp_fsdp_and_pipeline_equal_one_process(job_file, prepared, tmp_path, overrides):
    """Losses, gradients, the load of every expert, and dropped tokens."""
    job = load_job(str(job_file), [*BALANCED, *overrides])
    proof = Prover(tmp_path, prepared).prove(job)
    assert proof.verdict.equal, proof.verdict.first_divergence
    assert proof.loads == proof.reference_loads
    layers, steps = job.model.num_layers, 2
    assert [len(step) for step in proof.loads] == [layers] * steps, "first and last step, every layer"
    choices = job.train.global_batch * job.data.seq_len * 2
    assert all(sum(layer["load"]) == choices for step in proof.loads for layer in step)
    dropped = sum(layer["dropped"] for step in proof.loads for layer in step)
    assert (dropped > 0) == (job.model.capacity_factor is not None)


def test_selection_biases_are_saved_resumed_and_reported(train, tmp_path):
    """A resumed run is bit-identical. Without ``balance_rate`` the biases stay and still select experts.

    `generate` uses the biases, the export refuses them, and the report shows the load of every expert.
    """
    common = [
        *BALANCED,
        "layout.dp_replicate=1",
        "train.steps=8",
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=9",
    ]
    straight = train(*common)
    rescued = tmp_path / "rescued"
    shutil.copytree(straight.run_dir / "checkpoints" / "step-00000004", rescued / "step-00000004")
    resumed = train(*common, f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == straight.losses[4:]
    first, last = (load_weights(rescued / f"step-{n:08d}") for n in (4, 8))
    assert (first[SELECTION_BIAS].abs() > 0).any()
    assert (first[SELECTION_BIAS].abs() <= 4 * 0.01 + 1e-6).all(), "more than balance_rate per step"
    assert not torch.equal(first[SELECTION_BIAS], last[SELECTION_BIAS])
    frozen = [word for word in common if "balance_rate" not in word]
    again = tmp_path / "again"
    shutil.copytree(rescued / "step-00000004", again / "step-00000004")
    train(*frozen, "train.steps=5", f"checkpoint.dir={again}", resume=True)
    kept = load_weights(again / "step-00000005")[SELECTION_BIAS]
    assert torch.equal(kept, first[SELECTION_BIAS]), "the biases changed without balance_rate"
    checkpoint = Path(straight.result["checkpoint"])
    model = load_model(GenerateTask(str(checkpoint)))
    for row, block in enumerate(model.list_blocks()):
        assert torch.equal(block.ffn.router.selection_bias, last[SELECTION_BIAS][row]), (
            "generate has other biases"
        )
    with pytest.raises(UserError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out", "float32", 10**9)
    assert caught.value.problems[0].code == "export-no-hf-form"
    report = read_report(straight.run_dir)
    assert report.as_dict()["experts"]["step"] == 8
    assert "times the mean" in dict(report.facts())["Experts"]
    assert any(chart.title.startswith("Busiest expert") for chart in report.small_charts())
    assert "Tokens routed to each expert in step 8" in draw_page(report)


def test_an_exported_moe_model_has_the_logits_of_transformers(train, tmp_path):
    """The model has no selection biases, which Mixtral cannot hold."""
    transformers = pytest.importorskip("transformers")
    trained = train(*EXPERTS, "layout.dp_replicate=1", "train.steps=2", "model.tied_embeddings=false")
    checkpoint, out = Path(trained.result["checkpoint"]), tmp_path / "out"
    done = export_checkpoint(checkpoint, out, "float32", 10**9)
    assert done.architecture == "MixtralForCausalLM"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_model(GenerateTask(str(checkpoint)))(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=1e-5, rtol=1e-5)

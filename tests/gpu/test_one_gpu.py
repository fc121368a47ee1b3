"""Runs on one GPU with the job file of the CPU tests.

From source: ``PYTHONPATH=src python3 -m pytest -m gpu``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright.api import load_run  # noqa: E402
from meshwright.core.events import EVENTS_FILE, EventWriter, read_events  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.measure.collective_counter import CollectiveCounter  # noqa: E402
from meshwright.parallel.mesh import init_mesh  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.spec.execution import resolve_block_backend  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.train import loop  # noqa: E402
from meshwright.train.build import build_trainer  # noqa: E402
from meshwright.train.rank_context import RankContext  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = ("cluster.device=cuda", "cluster.devices_per_node=1")


def test_a_gpu_run_has_the_losses_of_a_cpu_run(train):
    """float32 on both; the audit of the GPU run passes."""
    on_cpu = train("layout.dp_replicate=1")
    on_gpu = train(*ON_GPU)
    assert on_gpu.result["layout"]["dp_replicate"] == 1
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)


def test_state_equals_the_plan_and_the_peak_is_within_5_percent(train):
    """The model is large compared with the cuBLAS workspace."""
    shape = ["model.num_layers=8", "model.hidden_size=1024", "model.num_heads=16", "model.num_kv_heads=8"]
    shape += ["model.ffn_size=4096", "model.vocab_size=32000", "data.seq_len=512", "train.global_batch=16"]
    for precision in ("fp32", "bf16"):
        result = train(*ON_GPU, *shape, f"train.precision={precision}", "train.steps=3").result
        assert result["audit_ok"], result["differences"]
        assert result["state_bytes"] == result["predicted_state_bytes"]


WIDE = (
    "model.num_layers=6",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.ffn_size=2048",
    "model.vocab_size=32000",
    "data.seq_len=256",
    "train.global_batch=16",
    "train.steps=4",
)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_activation_checkpointing_keeps_the_losses_and_lowers_the_peak(train, precision, recompute):
    """The audit of the predicted peak passes."""
    plain = train(*ON_GPU, *WIDE, f"train.precision={precision}", "run_dir=plain")
    saved = train(
        *ON_GPU, *WIDE, f"train.precision={precision}", f"layout.recompute={recompute}", "run_dir=saved"
    )
    assert saved.losses == pytest.approx(plain.losses, rel=1e-4)
    assert saved.result["peak_memory_bytes"][0] < plain.result["peak_memory_bytes"][0]
    assert saved.result["audit_ok"], saved.result["differences"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_document_masks_use_fused_attention(train, precision):
    """The predicted peak has no score matrices; the audit of the peak passes."""
    result = train(*ON_GPU, *WIDE, "data.mask=document", f"train.precision={precision}").result
    assert result["audit_ok"], result["differences"]


@pytest.mark.parametrize(
    "more",
    [(), ("train.residual_dtype=bf16", "layout.recompute=selective")],
    ids=["fp32_residual", "bf16_residual"],
)
def test_triton_blocks_are_the_default_and_have_the_losses_of_eager_blocks(train, more):
    """With bf16 weight copies, cuDNN attention, the fused loss and AdamW that updates the copies."""
    bf16 = "train.precision=bf16"
    eager = train(*ON_GPU, *WIDE, bf16, "train.block_backend=eager", "run_dir=eager")
    triton = train(*ON_GPU, *WIDE, bf16, *more, "run_dir=triton")
    assert resolve_block_backend(load_run(triton.run_dir).contract.job) == "triton"
    assert triton.losses == pytest.approx(eager.losses, rel=1e-2)
    assert triton.result["audit_ok"], triton.result["differences"]


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon"])
def test_every_optimizer_has_the_predicted_state(train, optimizer):
    result = train(*ON_GPU, *WIDE, f"train.optimizer={optimizer}").result
    assert result["audit_ok"], result["differences"]


@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "full"])
def test_float32_attention_of_long_sequences_is_fused(train, heads):
    """With grouped and ungrouped heads, the audited peak has no score matrices."""
    shape = [
        "model.num_layers=4",
        "model.hidden_size=256",
        f"model.num_kv_heads={heads}",
        "data.seq_len=1024",
    ]
    result = train(*ON_GPU, *shape, "train.global_batch=16", "train.steps=3").result
    assert result["audit_ok"], result["differences"]


def test_a_resumed_gpu_run_has_the_losses_of_an_uninterrupted_run(train):
    first = train(*ON_GPU, "train.steps=6", "checkpoint.every_steps=3", "train.deterministic=true")
    (first.run_dir / "checkpoints/step-00000006/manifest.json").unlink()
    second = train(*ON_GPU, "train.steps=6", "train.deterministic=true", resume=True)
    assert second.losses == pytest.approx(first.losses, rel=1e-6)


def test_generate_works_on_the_gpu(train, tmp_path):
    from meshwright.train.generate import GenerateTask, generate_text

    trained = train(*ON_GPU)
    text = generate_text(GenerateTask(str(tmp_path / trained.result["checkpoint"]), "the ", 8, 0.0, 0))
    assert isinstance(text, str)


LONG_CYCLES = 10**9
"""GPU clock cycles: half a second."""


def test_a_step_returns_before_its_update_has_finished_if_another_step_follows(
    job_file, tmp_path, monkeypatch
):
    """With ``overlap_next_step`` the CPU waits for the loss only, otherwise also for the optimizer step."""
    plan, _ = build_plan(load_job(str(job_file), [*ON_GPU, "layout.dp_replicate=1", "train.steps=9"]))
    assignment = Assignment(str(tmp_path), plan.job.data.path, str(tmp_path / "checkpoints"))
    counter, events = CollectiveCounter(), EventWriter(tmp_path / EVENTS_FILE, 0)
    trainer = build_trainer(RankContext(plan, assignment, init_mesh(plan.job, counter), counter, events))
    meter, original = loop.start_meter(trainer), Trainer.update

    def long_update(trainer, lr, *arguments):
        norm = original(trainer, lr, *arguments)
        torch.cuda._sleep(LONG_CYCLES)
        return norm

    for _ in range(3):  # the first use of pinned memory or of a kernel may synchronize the device
        trainer.train_step(meter, overlap_next_step=True)
    monkeypatch.setattr(Trainer, "update", long_update)
    trainer.train_step(meter, overlap_next_step=True)
    assert not torch.cuda.current_stream().query()
    trainer.train_step(meter, overlap_next_step=False)
    assert torch.cuda.current_stream().query()
    events.close()


@pytest.mark.parametrize(
    ("backend", "module"),
    [("triton", "blocks.1"), ("compile", "blocks.1"), ("eager", "blocks.1.attention.wo")],
)
def test_a_nan_is_named_by_its_block_or_module(train, tmp_path, monkeypatch, backend, module):
    """A Triton block is one module; a compiled block is recomputed as an eager one.

    The weights are those before the update: fused AdamW checks the gradient norm on the device.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "multiproc"))
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:plant_nan")
    fault = {"kind": "weight", "module": "blocks.1.attention.wo", "ranks": [0], "step": 2}
    (tmp_path / "plant.json").write_text(json.dumps(fault))
    options = ("train.precision=bf16", f"train.block_backend={backend}", "run_dir=run")
    options += ("train.on_bad_step=stop",)
    failed = train(*ON_GPU, *WIDE, *options, expect=4)
    (found,) = [e for e in read_events(failed.run_dir / EVENTS_FILE).events if e["event"] == "not_finite"]
    assert found["module"].startswith(module)
    assert found["weights"] == ["blocks.1.attention.wo.weight"]

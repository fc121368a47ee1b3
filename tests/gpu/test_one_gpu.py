"""One GPU, the same job file as on CPU. From source: ``PYTHONPATH=src python3 -m pytest -m gpu``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from meshwright.core.events import EVENTS_FILE, EventWriter  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.measure.collective_counter import CollectiveCounter  # noqa: E402
from meshwright.parallel.mesh import init_mesh  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.train import loop  # noqa: E402
from meshwright.train.build import build_trainer  # noqa: E402
from meshwright.train.trainer import RankContext, Trainer  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = ("cluster.device=cuda", "cluster.devices_per_node=1")


def test_the_job_file_of_the_cpu_runs_on_the_gpu_with_the_same_loss(train):
    """float32 on both: the curves agree, and the audit holds on the GPU."""
    on_cpu = train("layout.dp_replicate=1")
    on_gpu = train(*ON_GPU)
    assert on_gpu.result["layout"]["dp_replicate"] == 1
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)


def test_state_is_equal_and_the_peak_within_five_per_cent(train):
    """A model large enough that the library's workspace is not the story."""
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
def test_recomputation_changes_no_loss_and_the_ledger_knows(train, precision, recompute):
    plain = train(*ON_GPU, *WIDE, f"train.precision={precision}", "run_dir=plain")
    saved = train(
        *ON_GPU, *WIDE, f"train.precision={precision}", f"layout.recompute={recompute}", "run_dir=saved"
    )
    assert saved.losses == pytest.approx(plain.losses, rel=1e-4)
    assert saved.result["peak_memory_bytes"][0] < plain.result["peak_memory_bytes"][0]
    assert saved.result["audit_ok"], saved.result["differences"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_document_mask_runs_in_a_fused_kernel(train, precision):
    """The peak is the ledger's: no kernel builds the score matrix of every head."""
    result = train(*ON_GPU, *WIDE, "data.mask=document", f"train.precision={precision}").result
    assert result["audit_ok"], result["differences"]


@pytest.mark.parametrize(
    "more", [(), ("train.residual_dtype=bf16", "layout.recompute=selective")], ids=["blocks", "low_stream"]
)
def test_compiled_blocks_give_the_same_losses(train, more):
    """With copies in 16 bits, cuDNN's attention, the fused loss and AdamW that writes the copies."""
    plain = train(*ON_GPU, *WIDE, "train.precision=bf16", "run_dir=plain")
    low = ("train.precision=bf16", "train.block_backend=triton")
    compiled = train(*ON_GPU, *WIDE, *low, *more, "run_dir=compiled")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-2)
    assert compiled.result["audit_ok"], compiled.result["differences"]


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon"])
def test_every_optimizer_holds_the_predicted_state(train, optimizer):
    result = train(*ON_GPU, *WIDE, f"train.optimizer={optimizer}").result
    assert result["audit_ok"], result["differences"]


@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "full"])
def test_float32_attention_never_holds_the_scores(train, heads):
    """Long sequences in float32: the fused kernel runs, grouped heads or not; the peak says so."""
    shape = [
        "model.num_layers=4",
        "model.hidden_size=256",
        f"model.num_kv_heads={heads}",
        "data.seq_len=1024",
    ]
    result = train(*ON_GPU, *shape, "train.global_batch=16", "train.steps=3").result
    assert result["audit_ok"], result["differences"]


def test_a_resumed_run_on_the_gpu_goes_on(train):
    first = train(*ON_GPU, "train.steps=6", "checkpoint.every_steps=3", "train.deterministic=true")
    (first.run_dir / "checkpoints/step-00000006/manifest.json").unlink()
    second = train(*ON_GPU, "train.steps=6", "train.deterministic=true", resume=True)
    assert second.losses == pytest.approx(first.losses[3:], rel=1e-6)


def test_generate_uses_the_gpu(train, tmp_path):
    from meshwright.train.generate import GenerateTask, generate_text

    trained = train(*ON_GPU)
    text = generate_text(GenerateTask(str(tmp_path / trained.result["checkpoint"]), "the ", 8, 0.0, 0))
    assert isinstance(text, str)


LONG = 10**9
"""Cycles of the device: half a second."""


def test_a_step_is_told_while_the_device_updates_if_another_comes_next(job_file, tmp_path, monkeypatch):
    """The host waits for the numbers alone; where something else comes next, for the update, too."""
    plan, _ = build_plan(load_job(str(job_file), [*ON_GPU, "layout.dp_replicate=1", "train.steps=9"]))
    assignment = Assignment(str(tmp_path), plan.job.data.path, str(tmp_path / "checkpoints"))
    counter, events = CollectiveCounter(), EventWriter(tmp_path / EVENTS_FILE, 0)
    trainer = build_trainer(RankContext(plan, assignment, init_mesh(plan.job, counter), counter, events))
    meter, original = loop.start_meter(trainer), Trainer.update

    def long_update(trainer, lr, *known):
        norm = original(trainer, lr, *known)
        torch.cuda._sleep(LONG)
        return norm

    for _ in range(3):  # a first use of pinned memory and of a kernel may wait for the device
        trainer.train_step(meter, overlap_next_step=True)
    monkeypatch.setattr(Trainer, "update", long_update)
    trainer.train_step(meter, overlap_next_step=True)
    assert not torch.cuda.current_stream().query()
    trainer.train_step(meter, overlap_next_step=False)
    assert torch.cuda.current_stream().query()
    events.close()

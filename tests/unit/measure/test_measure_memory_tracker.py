"""Measured live bytes of one process: storage is counted once; the predicted peak is within 5%."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.measure.memory_tracker import PeakTracker, state_bytes, unique_bytes
from meshwright.parallel.build import build_model
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.spec.load import load_job
from meshwright.train.optimizer import build_optimizer
from model_shapes import gpt_overrides


def test_shared_storage_counts_once():
    whole = torch.zeros(10)
    assert unique_bytes([whole[:4], whole[4:], whole[:4], None]) == 40


@pytest.fixture
def one_rank(tmp_path):
    """The name of a gloo group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_tensors_of_a_finished_collective_are_not_live(one_rank):
    """The thread of gloo releases them after the call has returned; the tracker waits for it."""
    functional = torch.ops._c10d_functional
    with PeakTracker([]) as tracker:
        for _ in range(100):
            x = torch.ones(1000)
            y = functional.wait_tensor(functional.all_reduce(x, "sum", one_rank))
            z = functional.wait_tensor(functional.all_gather_into_tensor(y, 1, one_rank))
            w = functional.wait_tensor(functional.all_to_all_single(z, [1000], [1000], one_rank))
            assert tracker.live_bytes == 4 * 4000
            del x, y, z, w
            assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 4 * 4000


@pytest.mark.timeout(60)
def test_collectives_of_a_checkpointed_block_are_seen_as_released(one_rank, monkeypatch):
    """Selective checkpointing calls each operator once more, which holds its arguments once more."""
    monkeypatch.setattr("meshwright.measure.memory_tracker.GLOO_RELEASE_LIMIT_S", 3600)
    functional = torch.ops._c10d_functional

    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = functional.wait_tensor(functional.all_reduce(x, "sum", one_rank))
            return functional.wait_tensor(functional.all_gather_into_tensor(y, 1, one_rank))

    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE
    )
    with PeakTracker([]) as tracker:
        for _ in range(100):
            x = torch.ones(1000)
            z = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            assert tracker.live_bytes == 2 * 4000
            del x, z
            assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 3 * 4000


GPT = dict(text.split("=") for text in gpt_overrides(max_positions=64))


@pytest.mark.parametrize(
    ("micro_batches", "precision"),
    [
        (1, "fp32"),
        (2, "bf16"),
        pytest.param(1, "bf16", marks=pytest.mark.slow),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"layout.recompute": "selective", "model.num_layers": 5},
        {"layout.recompute": "full", "model.num_layers": 5},
        {"layout.recompute": "full", "model.vocab_size": 4096},
        {"layout.recompute": "selective", "data.mask": "document", "model.num_layers": 4},
        GPT,
        {**GPT, "layout.recompute": "selective", "data.mask": "document", "model.vocab_size": 3000},
        {**GPT, "layout.recompute": "full", "model.num_kv_heads": 4},
        {"data.mask": "document", "data.seq_len": 64},
        {"model.head_dim": 64, "model.ffn_size": 16},
        {"model.head_dim": 64, "model.ffn_size": 16, "layout.recompute": "selective"},
        {"model.head_dim": 64, "model.ffn_size": 16, "layout.recompute": "full"},
        {"model.vocab_size": 4096, "model.tied_embeddings": "false"},
        {"model.num_layers": 6, "model.hidden_size": 192, "model.ffn_size": 512, "data.seq_len": 128},
        {"model.num_layers": 5, "model.num_heads": 8, "model.num_kv_heads": 8, "model.hidden_size": 128},
        {"model.hidden_size": 64, "model.head_dim": 32, "model.ffn_size": 1024},
    ],
    ids=str,
)
def test_predicted_peak_is_within_5_percent(job_file, shape, micro_batches, precision):
    """The ledger is compared with all live tensors of one eager step. State is exact."""
    overrides = [f"{k}={v}" for k, v in shape.items()] + [f"train.precision={precision}"]
    job = load_job(str(job_file), overrides)
    model = build_model(job, torch.device("cpu"))
    optimizer = build_optimizer(model, job.train)
    moments = [v for state in optimizer.state.values() for v in state.values()]
    batch = torch.randint(0, job.model.vocab_size, (4, job.data.seq_len + 1))
    with PeakTracker([*model.parameters(), *model.buffers(), *moments]) as tracker:
        for _ in range(micro_batches):
            inputs = [batch[:, :-1].clone(), batch[:, 1:].clone()]
            if job.data.mask == "document":
                inputs.append(torch.arange(job.data.seq_len).div(5, rounding_mode="floor").repeat(4, 1))
            before = tracker.live_bytes
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(*inputs)
            kept = tracker.live_bytes - before
            (loss / 7).backward()
            del inputs, loss
    ledger = predict_ledger(job, 4, micro_batches)
    assert state_bytes(RankParameters(model), optimizer) == ledger.state_bytes
    assert ledger.peak_bytes == pytest.approx(tracker.peak_bytes, rel=0.05), ledger.peak_at
    assert ledger.activation_bytes == pytest.approx(kept, rel=0.05)
    assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes

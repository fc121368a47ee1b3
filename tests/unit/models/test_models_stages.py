"""Optimizer, batches, counter, memory, peak: each alone, in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.dataset import IGNORE_INDEX, SampleBatch
from meshwright.measure.memory_tracker import PeakTracker, state_bytes, unique_bytes
from meshwright.parallel.build import build_model
from meshwright.parallel.sharded_state import ShardedState
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.spec.load import load_job
from meshwright.train.batches import Batcher, assign_samples
from meshwright.train.optimizer import build_optimizer
from meshwright.train.throughput import measure_matmul
from model_shapes import gpt_overrides


def test_state_made_at_once_equals_state_made_by_torch(job_file):
    """Three steps with our optimizer and with torch's lazy one: the same bits."""
    job = load_job(str(job_file))
    ours, theirs = (build_model(job, torch.device("cpu")) for _ in range(2))
    eager = build_optimizer(ours, job.train)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    lazy = torch.optim.AdamW(groups, lr=job.train.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    tokens = torch.arange(32).view(1, 32)
    for _ in range(3):
        for model, optimizer in ((ours, eager), (theirs, lazy)):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@given(st.integers(0, 200), st.integers(1, 17))
def test_samples_are_dealt_once_each_and_evenly(count, ranks):
    hands = [assign_samples(count, rank, ranks) for rank in range(ranks)]
    assert [s for hand in hands for s in hand] == list(range(count))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert len(hands[0]) == max(map(len, hands)), "rank 0 is the fullest: it sets the number of micro-batches"


class Counting:
    """Stands in for a dataset: row i holds i, i+1, ..., and is document 3 of something."""

    seq_len = 4

    def __init__(self, mask="causal"):
        self.mask = mask

    def read(self, indices):
        tokens = np.asarray(indices)[:, None] + np.arange(4)
        return SampleBatch(tokens, tokens + 1, np.full_like(tokens, 3) if self.mask == "document" else None)

    def count_targets(self, indices):
        return 4 * len(indices)


@pytest.mark.parametrize("mask", ["causal", "document"])
@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 6))
def test_every_rank_runs_the_same_micro_batches_and_every_sample_counts_once(mask, count, ranks, micro):
    samples = np.arange(100, 100 + count)
    shapes, seen = set(), []
    for rank in range(ranks):
        batches = list(
            Batcher(Counting(mask), rank, ranks, micro, sample_weight=1 / count).micro_batches(samples)
        )
        shapes.add((len(batches), micro))
        for tokens, targets, segments, weights in batches:
            assert tokens.shape == targets.shape == (micro, 4)
            assert tokens.dtype == targets.dtype == torch.int64
            assert (segments is not None) == (mask == "document")
            real = targets[:, 0] != IGNORE_INDEX
            assert weights.tolist() == pytest.approx((real / count).tolist()), "a share of the global batch"
            seen += tokens[real][:, 0].tolist()
            assert (targets[~real] == IGNORE_INDEX).all()
            assert (tokens[~real] == 0).all()
            if segments is not None:
                assert (segments[real] == 3).all()
                assert (segments[~real] == 0).all()
    assert len(shapes) == 1
    assert sorted(seen) == samples.tolist()
    assert Batcher(Counting(), 0, ranks, micro).count_targets(samples) == 4 * count


def test_shared_storage_counts_once():
    whole = torch.zeros(10)
    assert unique_bytes([whole[:4], whole[4:], whole[:4], None]) == 40


GPT = dict(text.split("=") for text in gpt_overrides(max_positions=64))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
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
def test_predicted_peak_is_within_five_per_cent(job_file, shape, micro_batches, precision):
    """The torch-free ledger against every tensor that one eager step really holds; the state to the byte."""
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
    assert state_bytes(ShardedState(model), optimizer) == ledger.state_bytes
    assert ledger.peak_bytes == pytest.approx(tracker.peak_bytes, rel=0.05), ledger.peak_at
    assert ledger.activation_bytes == pytest.approx(kept, rel=0.05)
    assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes


def test_matmul_probe_gives_a_rate():
    rate = measure_matmul(torch.device("cpu"), torch.float32, seconds=0.02)
    assert math.isfinite(rate)
    assert rate > 1e8

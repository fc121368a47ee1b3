"""Losses of data parallelism equal those of one process and of a plain torch training loop."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_runs import max_relative_diff

from meshwright.data.dataset import TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.parallel.build import build_model
from meshwright.spec.load import load_job
from saved_checkpoints import load_weights


def plain_torch_loop(
    job_file: Path, prepared: Path, overrides: list[str]
) -> tuple[list[float], torch.nn.Module]:
    """Train in one process with full batches, ``torch.optim.AdamW`` and no code of ``meshwright.train``."""
    job = load_job(str(job_file), overrides)
    data = TokenDataset.open(prepared, "train", job.data.seq_len)
    order = SampleOrder(data.shard_sample_counts, job.train.seed)
    model = build_model(job, torch.device("cpu"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.train.lr, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(job.train.steps):
        positions = np.arange(step * job.train.global_batch, (step + 1) * job.train.global_batch)
        rows = data.read(order.samples_at(positions))
        logits = model(torch.from_numpy(rows.tokens))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip)
        if step < job.train.warmup:
            lr = job.train.lr * (step + 1) / job.train.warmup
        else:
            progress = (step - job.train.warmup) / (job.train.steps - job.train.warmup)
            lr = job.train.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("batch", [pytest.param(12, marks=pytest.mark.slow), 7])
def test_losses_and_weights_of_1_to_4_ranks_equal_a_plain_torch_loop(train, job_file, prepared, batch):
    """Ten losses within 1e-5, and the final weights. With a batch of 7, ranks have zero-weight samples."""
    common = [f"train.global_batch={batch}", "train.steps=10"]
    reference, model = plain_torch_loop(job_file, prepared, common)
    for ranks in (1, 2, 3, 4):
        trained = train(*common, f"layout.dp_replicate={ranks}")
        assert trained.result["world_size"] == ranks
        assert max_relative_diff(trained.losses, reference) < 1e-5, f"{ranks} ranks"
        saved = load_weights(Path(trained.result["checkpoint"]))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(saved[name], parameter.detach(), rtol=2e-4, atol=2e-5, msg=name)


def test_a_rank_without_samples_changes_no_loss(train):
    """One sample on two ranks: rank 1 has only zero-weight micro-batches and still joins all collectives."""
    alone = train("train.global_batch=1", "layout.dp_replicate=1")
    together = train("train.global_batch=1", "layout.dp_replicate=2")
    assert max_relative_diff(together.losses, alone.losses) < 1e-5


def test_gradient_accumulation_changes_no_loss(train):
    """Two ranks with six micro-batches of one sample, under no_sync, equal two ranks with one of six."""
    whole = train("layout.dp_replicate=2", "layout.micro_batch=6")
    accumulated = train("layout.dp_replicate=2", "layout.micro_batch=1")
    assert max_relative_diff(accumulated.losses, whole.losses) < 1e-5


def test_eval_loss_of_3_ranks_equals_that_of_1(train):
    """Five held-out samples on three ranks: the padding has zero weight."""
    one = train("layout.dp_replicate=1", "train.eval_samples=5")
    three = train("layout.dp_replicate=3", "train.eval_samples=5")
    assert three.result["eval_loss"] == pytest.approx(one.result["eval_loss"], rel=1e-5)


def test_bf16_losses_stay_within_2_percent_of_float32(train):
    """bf16 GEMMs run on the CPU and change the losses by less than 2%."""
    exact = train("layout.dp_replicate=2", "train.steps=8")
    rounded = train("layout.dp_replicate=2", "train.steps=8", "train.precision=bf16")
    assert max_relative_diff(rounded.losses, exact.losses) < 0.02
    assert rounded.losses != exact.losses


def test_deterministic_mode_is_bit_identical_and_refuses_nondeterministic_operators(train, monkeypatch):
    """Two runs have equal losses. An operator without a deterministic implementation fails the run."""
    first = train("layout.dp_replicate=2", "train.deterministic=true")
    second = train("layout.dp_replicate=2", "train.deterministic=true")
    assert first.losses == second.losses
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:nondeterministic_op")
    assert train("layout.dp_replicate=2").result["status"] == "complete"
    refused = train("layout.dp_replicate=2", "train.deterministic=true", expect=4)
    assert refused.result["errors"][0]["code"] == "run-rank-died"
    assert "deterministic" in refused.result["errors"][0]["message"], "the error has torch's message"


@pytest.mark.slow
def test_sqrt_lr_scaling_multiplies_the_learning_rate(train):
    """Square-root scaling from a base batch of 3 to 12 equals a doubled ``train.lr``."""
    scaled = train("train.lr_scaling=sqrt", "train.lr_base_batch=3")
    doubled = train("train.lr=6e-3")
    plain = train()
    assert scaled.losses == doubled.losses
    assert scaled.losses != plain.losses

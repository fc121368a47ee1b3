"""The loss curve does not depend on the layout, and equals a bare torch loop written without our code."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshwright.data.dataset import TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.parallel.build import build_model
from meshwright.spec.load import load_job


def relative(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b), f"{len(a)} and {len(b)} losses"
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def bare_loop(job_file: Path, prepared: Path, overrides: list[str]) -> tuple[list[float], torch.nn.Module]:
    """One process, whole batches, plain AdamW: what every layout has to equal."""
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


@pytest.mark.parametrize("batch", [12, 7])
def test_one_to_four_ranks_give_the_loss_of_a_bare_torch_loop(train, job_file, prepared, batch):
    """Batch 7 leaves ranks with zero-weight samples; ten steps within 1e-5, and the weights agree too."""
    common = [f"train.global_batch={batch}", "train.steps=10"]
    reference, model = bare_loop(job_file, prepared, common)
    for ranks in (1, 2, 3, 4):
        trained = train(*common, f"layout.dp_replicate={ranks}")
        assert trained.result["world_size"] == ranks
        assert relative(trained.losses, reference) < 1e-5, f"{ranks} ranks"
        saved = load_file(Path(trained.result["checkpoint"]) / "model.safetensors")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(saved[name], parameter.detach(), rtol=2e-4, atol=2e-5, msg=name)


def test_a_rank_without_any_sample_still_takes_part(train):
    """One sample over two ranks: rank 1 runs zero-weight micro-batches only, and nothing hangs."""
    alone = train("train.global_batch=1", "layout.dp_replicate=1")
    together = train("train.global_batch=1", "layout.dp_replicate=2")
    assert relative(together.losses, alone.losses) < 1e-5


def test_accumulation_does_not_change_the_loss(train):
    """Micro-batches of one sample against whole shares, on two ranks, with no_sync in between."""
    whole = train("layout.dp_replicate=2", "layout.micro_batch=6")
    cut = train("layout.dp_replicate=2", "layout.micro_batch=1")
    assert relative(cut.losses, whole.losses) < 1e-5


def test_evaluation_does_not_depend_on_the_layout(train):
    """The held-out loss is a sum over tokens too: 5 samples over 3 ranks are padded and weigh nothing."""
    one = train("layout.dp_replicate=1", "train.eval_samples=5")
    three = train("layout.dp_replicate=3", "train.eval_samples=5")
    assert three.result["eval_loss"] == pytest.approx(one.result["eval_loss"], rel=1e-5)


def test_bf16_runs_and_stays_near_float32(train):
    """bf16 products (which crash without the launcher's care on some machines) follow the float32 curve."""
    exact = train("layout.dp_replicate=2", "train.steps=8")
    rounded = train("layout.dp_replicate=2", "train.steps=8", "train.precision=bf16")
    assert relative(rounded.losses, exact.losses) < 0.02
    assert rounded.losses != exact.losses


def test_deterministic_mode_repeats_to_the_last_bit_and_refuses_what_would_not(train, monkeypatch):
    """An operation without a repeatable version is an error in the rank, not a silent difference."""
    first = train("layout.dp_replicate=2", "train.deterministic=true")
    second = train("layout.dp_replicate=2", "train.deterministic=true")
    assert first.losses == second.losses
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "planted:not_deterministic")
    assert train("layout.dp_replicate=2").result["status"] == "complete"
    refused = train("layout.dp_replicate=2", "train.deterministic=true", expect=4)
    assert "deterministic" in refused.result["errors"][0]["message"]


def test_learning_rate_scaling_is_what_the_job_says(train):
    """Square-root scaling from a base batch of 3 doubles the rate: the same as doubling train.lr."""
    scaled = train("train.lr_scaling=sqrt", "train.lr_base_batch=3")
    doubled = train("train.lr=6e-3")
    plain = train()
    assert scaled.losses == doubled.losses
    assert scaled.losses != plain.losses

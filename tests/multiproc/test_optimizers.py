"""Optimizers and gradient noise on real ranks: losses of one process, predicted state, a clean audit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from meshwright.data.dataset import TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.parallel.build import build_model
from meshwright.spec.load import load_job


def step_events(trained):
    lines = (trained.run_dir / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == "step" and e["rank"] == 0]


def expected_noise_scale(job_file, prepared):
    """Noise scale of step 1, from the gradients of the first and the last six samples without the trainer."""
    job = load_job(str(job_file))
    data = TokenDataset.open(prepared, "train", job.data.seq_len)
    samples = SampleOrder(data.shard_sample_counts, job.train.seed).samples_at(np.arange(12))
    rows = data.read(samples)
    tokens, targets = torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets)
    model = build_model(job, torch.device("cpu"))
    means = []
    for half in (slice(6), slice(6, None)):
        model.zero_grad()
        (model(tokens[half], targets[half]) / targets[half].numel()).backward()
        means.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    part = sum(m.square().sum() for m in means) / 2
    whole = ((means[0] + means[1]) / 2).square().sum()
    return float(12 * (part - whole) / (2 * whole - part))


@pytest.mark.parametrize("optimizer", [pytest.param("lion", marks=pytest.mark.slow), "muon"])
def test_two_ranks_have_the_losses_of_one_and_the_expected_noise_scale(train, job_file, prepared, optimizer):
    """Ten losses within 1e-5, with gradient noise; state bytes equal the prediction."""
    common = [f"train.optimizer={optimizer}", "train.steps=10", "train.schedule=wsd", "train.grad_noise=1e-6"]
    alone = train(*common, "layout.dp_replicate=1")
    together = train(*common, "layout.dp_replicate=2", "train.noise_scale_every=1")
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert together.losses[-1] < together.losses[0]
    for trained in (alone, together):
        assert trained.result["audit_ok"]
        assert trained.result["state_bytes"] == trained.result["predicted_state_bytes"]
    assert [e["noise_scale"] for e in step_events(alone)] == [None] * 10
    measured = step_events(together)[0]["noise_scale"]
    assert measured == pytest.approx(expected_noise_scale(job_file, prepared), rel=1e-3)


def test_sgd_without_momentum_has_no_state_and_resumes(train):
    """The noise scale is measured every second step."""
    sgd = ["train.optimizer=sgd", "train.lr=0.1", "train.momentum=0.0", "train.noise_scale_every=2"]
    first = train(*sgd, "train.steps=4", "train.schedule=constant")
    assert first.result["state_bytes"]["optimizer"] == [0] * first.result["world_size"]
    assert [e["noise_scale"] is None for e in step_events(first)] == [True, False, True, False]
    resumed = train(*sgd, "train.steps=6", "train.schedule=constant", resume=True)
    assert resumed.losses[:4] == first.losses
    assert len(resumed.losses) == 6

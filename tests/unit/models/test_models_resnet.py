"""ResNet in one process: parameters, loss, norms, and memory compared with the ledger."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.data.images import ImageShape, open_images
from meshwright.layout.parameters import count_statistics, list_parameters
from meshwright.measure.memory_tracker import PeakTracker, state_bytes
from meshwright.models.resnet import BatchNorm, ResNet
from meshwright.parallel.build import build_model
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.spec.job import SYNTHETIC_IMAGES, Job
from meshwright.spec.load import build_job
from meshwright.spec.model import ResNetModel
from meshwright.train.image_batches import ImageBatcher
from meshwright.train.optimizer import build_optimizer

SMALL = {"architecture": "resnet", "num_classes": 10, "image_size": 16, "width": 8, "norm_groups": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "basic": {**SMALL, "blocks": [1, 1], "stem": "small"},
    "pooled": {**SMALL, "blocks": [2, 2, 2], "image_size": 45, "num_classes": 300},
    "bottleneck": {**SMALL, "blocks": [2, 1, 2], "stem": "small", "bottleneck": True, "width": 16},
    "wide": {
        **SMALL,
        "blocks": [1, 1, 1],
        "stem": "small",
        "width": 64,
        "image_size": 8,
        "num_classes": 1000,
    },
    "grey": {**SMALL, "blocks": [1, 1, 1, 1], "bottleneck": True, "channels": 1, "image_size": 64},
    "narrow": {**SMALL, "blocks": [2, 2], "width": 1, "norm_groups": 1},
    "batch norm": {**SMALL, "blocks": [1, 2], "norm": "batch", "norm_groups": None, "image_size": 32},
}


def job_of(model: dict[str, Any], precision: str = "fp32", recompute: str = "none") -> Job:
    """A job for this model, precision and activation checkpointing."""
    job = build_job(
        {
            "model": model,
            "cluster": {"preset": "local", "device": "cpu"},
            "data": {"path": SYNTHETIC_IMAGES},
            "train": {"steps": 1, "global_batch": 64},
            "layout": {"recompute": recompute},
        }
    )
    return dataclasses.replace(job, train=dataclasses.replace(job.train, precision=precision))


def build(model: dict[str, Any]) -> tuple[ResNet, ResNetModel]:
    """The network and the model section of a job."""
    job = job_of(model)
    network = build_model(job, torch.device("cpu"))
    assert isinstance(network, ResNet)
    assert isinstance(job.model, ResNetModel)
    return network, job.model


def batch_of(model: ResNetModel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first synthetic images and labels."""
    shape = ImageShape(model.channels, model.image_size, model.num_classes)
    images, labels = open_images(SYNTHETIC_IMAGES, "train", shape, None).read(np.arange(count))
    return torch.from_numpy(images), torch.from_numpy(labels)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_planned_parameters_are_those_of_torch(shape):
    """Names, shapes and order are equal, and so are the statistics of batch norms."""
    network, model = build(shape)
    assert [(n, tuple(p.shape)) for n, p in network.named_parameters()] == [
        (p.name, p.shape) for p in list_parameters(model)
    ]
    assert sum(b.numel() for b in network.buffers()) == count_statistics(model)
    norms = [p for n, p in network.named_parameters() if n.endswith("norm.weight")]
    assert all(bool((p == 1).all()) for p in norms)


def test_loss_is_a_sum_without_ignored_images():
    """The reference is torch's cross-entropy."""
    network, model = build(SHAPES["pooled"])
    images, labels = batch_of(model, 6)
    logits = network(images)
    whole = nn.functional.cross_entropy(logits[:4], labels[:4], reduction="sum")
    padded = torch.where(torch.arange(6) < 4, labels, IGNORE_INDEX)
    torch.testing.assert_close(network(images, padded), whole)
    images[4:] = 9.0
    torch.testing.assert_close(network(images, padded), whole)


def test_checkpointing_and_autocast_give_the_same_gradients():
    """``full`` is bit-identical. bf16 and fp16 are close to float32."""
    gradients: dict[tuple[str, str], torch.Tensor] = {}
    for precision, recompute in (("fp32", "none"), ("fp32", "full"), ("bf16", "full"), ("fp16", "none")):
        job = job_of(SHAPES["bottleneck"], precision, recompute)
        network = build_model(job, torch.device("cpu"))
        images, labels = batch_of(job.model, 8)
        low = torch.float16 if precision == "fp16" else torch.bfloat16
        with torch.autocast("cpu", low, enabled=precision != "fp32"):
            loss = network(images, labels)
        loss.backward()
        gradients[precision, recompute] = torch.cat([p.grad.flatten() for p in network.parameters()])
    exact = gradients["fp32", "none"]
    assert torch.equal(gradients["fp32", "full"], exact)
    for key in (("bf16", "full"), ("fp16", "none")):
        assert float((gradients[key] - exact).norm() / exact.norm()) < 0.05, key


def test_batch_norm_equals_torchs():
    ours, theirs = BatchNorm(4, 1e-5), nn.BatchNorm2d(4)
    nn.init.ones_(ours.weight)
    nn.init.zeros_(ours.bias)
    for seed in range(3):
        x = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(seed)) * 3 + 1
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_group_norm_treats_samples_independently():
    for name, independent in (("pooled", True), ("batch norm", False)):
        network, model = build(SHAPES[name])
        images, _ = batch_of(model, 4)
        together, alone = network(images)[:2], network(images[:2])
        assert torch.allclose(together, alone, atol=1e-5) == independent, name


def test_small_resnet_learns_synthetic_images():
    """40 steps halve the loss of guessing among four classes."""
    network, model = build({**SHAPES["basic"], "num_classes": 4})
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    images, labels = batch_of(model, 64)
    for _ in range(40):
        loss = network(images, labels) / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * float(np.log(4))


def test_image_batches_are_padded_with_zero_weight_images():
    """Two ranks read five images in micro-batches of two.

    Each image is read once and all shapes are equal.
    """
    data = open_images(SYNTHETIC_IMAGES, "train", ImageShape(3, 8, 5), None)
    samples, seen = np.arange(10, 15), []
    for rank in range(2):
        batches = list(ImageBatcher(data, rank, 2, 2).micro_batches(samples))
        assert [tuple(batch.inputs.shape) for batch in batches] == [(2, 3, 8, 8)] * 2
        for images, labels, *_ in batches:
            seen += [image.sum().item() for image in images[labels != IGNORE_INDEX]]
            assert not images[labels == IGNORE_INDEX].any()
    assert len(seen) == 5
    assert sorted(seen) == pytest.approx(sorted(data.read(samples)[0].sum(axis=(1, 2, 3)).tolist()), rel=1e-4)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "none"), ("bf16", "full")])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_predicted_memory_matches_an_eager_step(shape, micro_batches, precision, recompute):
    """State is exact. Activations and peak are within 1%, for one and six images.

    As in the training loop, a micro-batch is read while the last one is live: the peak of the narrow net.
    """
    if shape.get("norm") == "batch":
        recompute = "none"
    job = job_of(shape, precision, recompute)
    network = build_model(job, torch.device("cpu"))
    optimizer = build_optimizer(network, job.train)
    moments = [v for state in optimizer.state.values() for v in state.values()]
    for count in (1, 6):
        kept = 0
        with PeakTracker([*network.parameters(), *network.buffers(), *moments]) as tracker:
            for _ in range(micro_batches):
                images, labels = (t.clone() for t in batch_of(job.model, count))
                before = tracker.live_bytes
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = network(images, labels)
                kept = max(kept, tracker.live_bytes - before)
                (loss / 7).backward()
        del images, labels, loss
        train = dataclasses.replace(job.train, global_batch=count * micro_batches)
        ledger = predict_ledger(dataclasses.replace(job, train=train), count, micro_batches)
        assert state_bytes(RankParameters(network), optimizer) == ledger.state_bytes
        assert ledger.activation_bytes == pytest.approx(kept, rel=0.01)
        assert ledger.peak_bytes == pytest.approx(tracker.peak_bytes, rel=0.01), ledger.peak_at
        assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes
        network.zero_grad(set_to_none=True)

"""Added gradient noise depends on seed, step and name; the measured noise scale is that of the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.parallel.build import build_model
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.job import Train
from meshwright.spec.load import load_job
from meshwright.train.gradient_noise import EMA_DECAY, NoiseScale, add_noise, estimate_noise, noise_std

CPU = torch.device("cpu")


def make_train(**keys) -> Train:
    return Train(steps=9, global_batch=4, **keys)


# Added noise


def gradients_with_noise(job_file, step, **keys):
    """Zero gradients after noise was added."""
    model = build_model(load_job(str(job_file)), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_noise(RankParameters(model), make_train(**keys), step)
    return {name: p.grad for name, p in model.named_parameters()}


def test_added_noise_depends_on_seed_step_and_name_only(job_file):
    """Other random draws have no influence. Another seed, step or name gives other noise."""
    first = gradients_with_noise(job_file, 3, grad_noise=0.01, seed=1)
    torch.randn(7)
    again = gradients_with_noise(job_file, 3, grad_noise=0.01, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name, twin = "blocks.0.ffn.gate.weight", "blocks.0.ffn.up.weight"
    assert not torch.equal(first[name], first[twin])
    assert not torch.equal(first[name], gradients_with_noise(job_file, 4, grad_noise=0.01, seed=1)[name])
    assert not torch.equal(first[name], gradients_with_noise(job_file, 3, grad_noise=0.01, seed=2)[name])


def test_added_noise_has_the_variance_of_the_formula(job_file):
    """The variance is 0.04 / (1 + step)^0.55: a standard deviation of 0.2 at step 0."""
    assert noise_std(0, make_train(grad_noise=0.04)) == pytest.approx(0.2)
    assert noise_std(9, make_train(grad_noise=0.04)) == pytest.approx((0.04 / 10**0.55) ** 0.5)
    drawn = torch.cat([g.flatten() for g in gradients_with_noise(job_file, 9, grad_noise=0.04).values()])
    assert drawn.std().item() == pytest.approx((0.04 / 10**0.55) ** 0.5, rel=0.02)
    assert abs(drawn.mean().item()) < 0.002


def test_zero_noise_leaves_gradients_unchanged(job_file):
    assert all(not g.any() for g in gradients_with_noise(job_file, 0).values())


# Measured noise scale


def batch_of(job, samples, unequal=False):
    """Samples with few different tokens, so that the gradient is not only noise."""
    drawn = torch.randint(0, 8, (samples, job.data.seq_len + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:].clone()
    if unequal:
        for row in range(samples):
            targets[row, : 3 * row] = IGNORE_INDEX
    return tokens, targets


def sample_gradients(model, tokens, targets):
    """The summed-loss gradient of each sample, flattened, and its number of targets."""
    rows = []
    for row in range(len(tokens)):
        model.zero_grad()
        model(tokens[row : row + 1], targets[row : row + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().numpy())
    model.zero_grad()
    return np.stack(rows), (targets != IGNORE_INDEX).sum(dim=1).numpy()


def measure_one_process(model, tokens, targets, order):
    """The calls of the training loop in one process, with micro-batches of one sample in this order."""
    scale = NoiseScale(model, every=1)
    scale.begin(1)
    divisor = int((targets != IGNORE_INDEX).sum())
    seen = 0
    for row in order:
        (model(tokens[row : row + 1], targets[row : row + 1]) / divisor).backward()
        seen += int((targets[row] != IGNORE_INDEX).sum())
        scale.after_micro_batch(seen)
    own = [float(value) for value in scale.parts(divisor, seen)]
    whole = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    model.zero_grad()
    return own, whole, scale.estimate(own, len(order), 1.0)


def test_first_micro_batches_average_to_the_variance_of_sample_gradients(job_file):
    """With each sample once as the first micro-batch, the mean is tr(Sigma) / |G|^2 of the samples.

    Sampling without replacement makes this an identity, not an approximation.
    """
    job = load_job(str(job_file))
    model = build_model(job, CPU)
    tokens, targets = batch_of(job, 4)
    rows, counts = sample_gradients(model, tokens, targets)
    means = rows / counts[:, None]
    trace = means.var(axis=0, ddof=1).sum()
    square = (means.mean(axis=0) ** 2).sum() - trace / 4
    assert square > 0
    parts = []
    for first in range(4):
        own, whole, reported = measure_one_process(model, tokens, targets, [first, *({0, 1, 2, 3} - {first})])
        assert own == pytest.approx([(means[first] ** 2).sum(), 4.0], rel=1e-5)
        g_square, noise = estimate_noise(own[0], whole, 4)
        assert reported == pytest.approx(4 * noise / g_square, rel=1e-4)
        parts.append(own[0])
    g_square, noise = estimate_noise(np.mean(parts), whole, 4)
    assert g_square == pytest.approx(square, rel=1e-4)
    assert 4 * noise == pytest.approx(trace, rel=1e-4)


def test_parts_are_weighted_by_their_number_of_targets(job_file):
    """A part with 32 of 110 targets is compared as the mean of its 32. Its gradients are divided by 110."""
    job = load_job(str(job_file))
    model = build_model(job, CPU)
    tokens, targets = batch_of(job, 4, unequal=True)
    rows, counts = sample_gradients(model, tokens, targets)
    assert counts.tolist() == [32, 29, 26, 23]
    own, whole, _ = measure_one_process(model, tokens, targets, [0, 1, 2, 3])
    assert own == pytest.approx([((rows[0] / 32) ** 2).sum(), 110 / 32], rel=1e-5)
    assert whole == pytest.approx(((rows.sum(axis=0) / 110) ** 2).sum(), rel=1e-5)


def test_estimate_is_unbiased_for_parts_of_unequal_size():
    """Known values are |G|^2 = 4 and a noise of 50 per target. Parts have 5, 15 and 40 targets."""
    rng = np.random.default_rng(0)
    sizes = np.array([5, 15, 40])
    total, dims, draws = sizes.sum(), 25, 4000
    true = np.full(dims, 2 / np.sqrt(dims))
    noise = rng.normal(size=(draws, 3, dims)) * np.sqrt(sizes * 50 / dims)[None, :, None]
    sums = sizes[None, :, None] * true + noise  # the summed target gradients of a part
    local = ((sums / total) ** 2).sum(axis=2)  # the local value, divided by the global count
    part = (local * total / sizes).sum(axis=1).mean()
    whole = ((sums.sum(axis=1) / total) ** 2).sum(axis=1).mean()
    square, per_batch = estimate_noise(part, whole, 3.0)
    assert square == pytest.approx(4, rel=0.02)
    assert per_batch * total == pytest.approx(50, rel=0.02)


def measure(scale, module, step, part, whole, targets=4):
    """One step of 8 targets with given squared norms. The first micro-batch has some of the targets."""
    scale.begin(step)
    module.weight.grad = torch.full((1, 1), part**0.5)
    scale.after_micro_batch(targets)
    module.weight.grad = torch.full((1, 1), whole**0.5)
    scale.after_micro_batch(8)
    return scale.estimate([float(value) for value in scale.parts(8, 8)], samples=10, loss_scale=1.0)


def test_numerator_and_denominator_are_averaged_separately():
    """A step with a negative |G|^2 therefore does not spoil the average."""
    module = torch.nn.Linear(1, 1, bias=False)
    scale = NoiseScale(module, every=1)
    assert measure(scale, module, 1, part=3 / 4, whole=1.0) is None, "|G|^2 = 2 - 3 so far"
    square = (1 - EMA_DECAY) * (2 * 4 - 5) + EMA_DECAY * (1 - EMA_DECAY) * (2 - 3)
    noise = (1 - EMA_DECAY) * (5 - 4) + EMA_DECAY * (1 - EMA_DECAY) * (3 - 1)
    assert measure(scale, module, 2, part=5 / 4, whole=4.0) == pytest.approx(10 * noise / square)


def test_unmeasurable_steps_give_none_and_keep_the_average():
    """Cases: a step between measurements, one part with all or no targets, and an overflow."""
    module = torch.nn.Linear(1, 1, bias=False)
    scale = NoiseScale(module, every=2)
    assert measure(scale, module, 1, part=1.0, whole=1.0) is None
    assert scale.parts(8, 8) == [0.0, 0.0]
    assert measure(scale, module, 2, part=1.0, whole=1.0, targets=8) is None
    assert measure(scale, module, 4, part=0.0, whole=1.0, targets=0) is None
    assert measure(scale, module, 6, part=float("inf"), whole=1.0) is None
    assert measure(scale, module, 8, part=1.5 / 4, whole=1.0) == pytest.approx(10 * 0.5 / 0.5)
    assert NoiseScale(module, every=0).parts(8, 8) == []

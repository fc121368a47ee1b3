"""Every optimizer: its update against paper or torch, its state, groups, resuming and learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.parameters import list_parameters
from meshwright.measure.memory_tracker import state_bytes
from meshwright.parallel.build import build_model
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.load import load_job
from meshwright.train.optimizer import build_optimizer, set_lr
from meshwright.train.optimizers.muon import orthogonalise

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adamw": [],
    "sgd": [],
    "sgd, nesterov": ["train.optimizer=sgd", "train.nesterov=true"],
    "sgd, no momentum": ["train.optimizer=sgd", "train.momentum=0.0"],
    "lion": [],
    "muon": [],
    "muon, bf16": ["train.optimizer=muon", "train.precision=bf16"],
    "muon, embedding spared": ["train.optimizer=muon", "train.decay_embeddings=false"],
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def build(job_file, kind, *overrides):
    job = load_job(str(job_file), [*(OPTIMIZERS[kind] or [f"train.optimizer={kind}"]), *overrides])
    model = build_model(job, CPU)
    return job, model, build_optimizer(model, job.train)


def take_steps(model, optimizer, steps, first=0):
    """Steps on fixed batches; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        drawn = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step % 3))
        loss = model(drawn[:, :-1], drawn[:, 1:]) / 64
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_and_state(model, optimizer):
    """Weights and state by name, as in a checkpoint."""
    names = {p: name for name, p in model.named_parameters()}
    state = {f"{names[p]}:{k}": v for p, state in optimizer.state.items() for k, v in state.items()}
    return {name: p.detach() for p, name in names.items()} | state


@every_optimizer
def test_state_exists_from_the_start_with_the_predicted_size(job_file, kind):
    """The size equals the prediction before the first step and after two."""
    job, model, optimizer = build(job_file, kind)
    predicted = predict_optimizer(list_parameters(job.model), job.train).state_bytes
    assert state_bytes(RankParameters(model), optimizer)["optimizer"] == predicted
    take_steps(model, optimizer, 2)
    assert state_bytes(RankParameters(model), optimizer)["optimizer"] == predicted
    assert all(isinstance(v, torch.Tensor) for state in optimizer.state.values() for v in state.values())


@every_optimizer
def test_resuming_by_name_is_bit_identical(job_file, kind):
    """Two steps, a checkpoint and two more steps equal four steps, in weights and state."""
    _, straight, its_optimizer = build(job_file, kind)
    take_steps(straight, its_optimizer, 4)
    _, model, optimizer = build(job_file, kind)
    take_steps(model, optimizer, 2)
    checkpoint = save(weights_and_state(model, optimizer))
    _, fresh, resumed = build(job_file, kind, "train.seed=9")
    targets, saved = weights_and_state(fresh, resumed), load(checkpoint)
    assert targets.keys() == saved.keys()
    for name, target in targets.items():
        target.copy_(saved[name])
    take_steps(fresh, resumed, 2, first=2)
    reference = weights_and_state(straight, its_optimizer)
    differing = [
        n for n, value in weights_and_state(fresh, resumed).items() if not torch.equal(value, reference[n])
    ]
    assert differing == []


@every_optimizer
def test_every_optimizer_trains_the_tiny_model(job_file, kind):
    """30 steps over three batches lower the loss by at least a tenth."""
    _, model, optimizer = build(job_file, kind)
    set_lr(optimizer, 1.0 if "sgd" in kind else 3e-3)
    losses = take_steps(model, optimizer, 30)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@every_optimizer
def test_grad_scaler_steps_every_optimizer_and_skips_overflows(job_file, kind):
    """A scaled gradient gives the plain update, an infinite one gives none."""
    _, model, optimizer = build(job_file, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _, plain, its_optimizer = build(job_file, kind)
    tokens = torch.arange(32).view(1, 32)
    scaler.scale(model(tokens, tokens) / 32).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    (plain(tokens, tokens) / 32).backward()
    its_optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    before = [p.detach().clone() for p in model.parameters()]
    next(model.parameters()).grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_learning_rate_applies_to_every_parameter(job_file):
    """A rate of zero changes nothing, also in the AdamW part of Muon."""
    for kind in OPTIMIZERS:
        _, model, optimizer = build(job_file, kind)
        before = [p.detach().clone() for p in model.parameters()]
        set_lr(optimizer, 0.0)
        take_steps(model, optimizer, 1)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), kind


def test_parameter_groups_depend_on_names_only(job_file):
    """Norms and the excluded embedding are in groups without decay, in any order of registration."""
    job, model, optimizer = build(job_file, "muon, embedding spared")
    names = {p: name for name, p in model.named_parameters()}
    decay = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == {p.name for p in list_parameters(job.model)}
    assert {name for name, value in decay.items() if not value} == {
        "embed.weight",
        "norm.weight",
        *(f"blocks.{n}.{norm}.weight" for n in (0, 1) for norm in ("attention_norm", "ffn_norm")),
    }


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd, nesterov", "sgd, no momentum"])
def test_update_equals_torchs_unfused_optimizer(job_file, kind):
    """Torch's optimizer has the same groups and creates its state lazily."""
    _, model, optimizer = build(job_file, kind, "train.weight_decay=0.05")
    _, plain, _ = build(job_file, kind)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    else:
        momentum = 0.0 if "no momentum" in kind else 0.9
        nesterov = "nesterov" in kind
        reference = torch.optim.SGD(groups, lr=3e-3, momentum=momentum, nesterov=nesterov, foreach=False)
    assert take_steps(model, optimizer, 4) == pytest.approx(take_steps(plain, reference, 4), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def reference_steps(job_file, kind, update):
    """Four steps next to a float64 NumPy reference with the same gradients."""
    job, model, optimizer = build(job_file, kind)
    weights = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    kept = {}
    for step in range(4):
        drawn = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step))
        (model(drawn[:, :-1], drawn[:, 1:]) / 64).backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.double().numpy()
            weights[name] = update(name, weights[name], gradient, kept.setdefault(name, {}), step)
        optimizer.step()
        optimizer.zero_grad()
    return job, model, weights


def test_lion_equals_the_papers_algorithm(job_file):
    """The reference is program 1 of arXiv 2302.06675. A sign may differ where the momentum is nearly zero."""

    def update(name, w, g, kept, step):
        m = kept.get("m", np.zeros_like(g))
        decay = 0.3 if w.ndim == 2 else 0.0
        c = 0.9 * m + (1 - 0.9) * g
        kept["m"] = 0.99 * m + (1 - 0.99) * g
        return w - 3e-3 * (np.sign(c) + decay * w)

    _, model, weights = reference_steps(job_file, "lion", update)
    for name, parameter in model.named_parameters():
        differs = np.abs(parameter.detach().numpy() - weights[name]) > 1e-6
        assert differs.mean() < 1e-3, name


def test_muon_equals_the_authors_update(job_file):
    """The reference has momentum, Nesterov, five quintic steps and 0.2 sqrt(longer side) in float64.

    Other parameters use AdamW.
    """

    def adamw(w, g, kept, step):
        m = kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * g
        v = kept["v"] = 0.95 * kept.get("v", 0.0) + 0.05 * g * g
        decay = 0.1 if w.ndim == 2 else 0.0
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        return w - 3e-3 * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay * w)

    def update(name, w, g, kept, step):
        if not (name.startswith("blocks.") and w.ndim == 2):
            return adamw(w, g, kept, step)
        m = kept["m"] = 0.95 * kept.get("m", 0.0) + 0.05 * g
        x = 0.05 * g + 0.95 * m
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return w - 3e-3 * (0.2 * np.sqrt(max(w.shape)) * x + 0.1 * w)

    _, model, weights = reference_steps(job_file, "muon", update)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4)])
def test_newton_schulz_makes_a_matrix_nearly_orthogonal(shape):
    """Singular values end between 0.6 and 1.3 and the singular vectors stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.linspace(1, 4, shape[1])
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert values.min() / values.max() < 0.6, "not orthogonal at the start"
    made = orthogonalise(matrix, torch.float32)
    assert made.shape == shape
    inner = left.T @ made @ right.T
    assert ((inner.diagonal() > 0.6) & (inner.diagonal() < 1.3)).all()
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_newton_schulz_of_zero_is_zero(job_file):
    """There is no division by zero."""
    assert torch.equal(orthogonalise(torch.zeros(3, 5), torch.float32), torch.zeros(3, 5))


def test_eager_state_equals_torchs_lazy_state(job_file):
    """Three steps with either optimizer are bit-identical."""
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

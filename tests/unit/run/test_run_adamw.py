"""The AdamW that is compiled: torch's own numbers, clipping on the way, 16-bit copies, few compilations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.run.models.init import build_model
from meshwright.run.optimizer import build_optimizer, compiles_update, set_lr
from meshwright.run.parallel.ownership import Owned
from meshwright.run.precision import Precision
from meshwright.run.update_rules import adamw
from meshwright.run.update_rules.adamw import FusedAdamW, clipping_factor
from meshwright.spec.load import load_job

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPES = [(24, 16), (7, 3), (16,), (48, 32), (5,), (16, 2)]
"""Large and whole rows of compiled code, and others."""
LR, BETAS, EPS = 3e-3, (0.9, 0.95), 1e-8


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """So that small tensors go the way of large ones."""
    monkeypatch.setattr(adamw, "LEAST_COMPILED", 32)


def draw(seed: int, *, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict]:
    """Matrices decay, the rest does not."""
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def build(backend: str | None = None, copies: bool = False) -> tuple[list[nn.Parameter], dict, FusedAdamW]:
    parameters = [nn.Parameter(value) for value in draw(0)]
    lows = {p: p.detach().bfloat16() for p in parameters if p.ndim == 2} if copies else {}
    optimizer = FusedAdamW(groups(parameters), LR, BETAS, EPS, lows, backend)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return parameters, lows, optimizer


def build_torchs() -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    parameters = [nn.Parameter(value) for value in draw(0)]
    return parameters, torch.optim.AdamW(groups(parameters), lr=LR, betas=BETAS, eps=EPS, fused=True)


def take_step(parameters, optimizer, step: int, most: float) -> None:
    for p, gradient in zip(parameters, draw(step + 1, size=0.3 if step % 2 else 0.01), strict=True):
        p.grad = gradient
    set_lr(optimizer, LR / (step + 1))
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    if isinstance(optimizer, FusedAdamW):
        optimizer.factor = clipping_factor(norm, most)
    else:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    optimizer.step()


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_numbers_are_torchs(backend):
    """Over steps with another rate each, decay and none, gradients that are clipped and some that are not."""
    ours, _, fused = build(backend)
    theirs, torchs = build_torchs()
    for step in range(6):
        take_step(ours, fused, step, most=1.0)
        take_step(theirs, torchs, step, most=1.0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
        for key, value in torchs.state[other].items():
            torch.testing.assert_close(fused.state[own][key], value, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_in_16_bits_move_as_the_same_ones_in_float32(backend):
    """Large and small parameters, clipped and not: only what is read is shorter."""
    kinds, found = (torch.float32, torch.bfloat16), []
    for kind in kinds:
        parameters, _, optimizer = build(backend)
        for step in range(3):
            for p, gradient in zip(parameters, draw(step + 1), strict=True):
                p.grad_dtype = kind
                p.grad = gradient.bfloat16().to(kind)
            optimizer.factor = torch.tensor(0.3) if step else None
            optimizer.step()
        assert {p.grad.dtype for p in parameters} == {kind}
        found.append(parameters)
    for wide, narrow in zip(*found, strict=True):
        assert torch.equal(wide, narrow)


def test_the_norm_of_gradients_in_16_bits_is_not_rounded_to_16_bits():
    """Some in each precision; of half a million ones, 16 bits would make 704, for 707.1."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in (5, (1000, 250), (1000, 250)))
    model[0].grad = torch.full((5,), 2.0)
    for parameter in (model[1], model[2]):
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.ones(1000, 250, dtype=torch.bfloat16)
    norm = Owned(model).norm()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((500_000 + 20) ** 0.5, rel=1e-6)


def test_the_factor_is_that_of_torchs_clipping():
    for size in (1e-4, 0.5, 30.0):
        gradients = [nn.Parameter(value) for value in draw(0)]
        for p in gradients:
            p.grad = p.detach() * size
        before = [p.grad.clone() for p in gradients]
        norm = nn.utils.clip_grad_norm_(gradients, 1.0)
        for p, whole in zip(gradients, before, strict=True):
            torch.testing.assert_close(whole * clipping_factor(norm, 1.0), p.grad)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_copies_are_the_rounded_parameters(backend):
    parameters, lows, optimizer = build(backend, copies=True)
    for step in range(2):
        take_step(parameters, optimizer, step, most=1.0)
    assert optimizer.writes_copies
    assert len(lows) == sum(p.ndim == 2 for p in parameters)
    for p, low in lows.items():
        assert torch.equal(low, p.detach().bfloat16())


def test_copies_of_parameters_that_others_own_are_not_promised():
    """Rows of a parameter are moved under another name: the copy of the whole stays as it was."""
    parameters, lows, _ = build(copies=True)
    rows = [nn.Parameter(p.detach()[:1]) for p in parameters]
    assert not FusedAdamW([{"params": rows}], LR, BETAS, EPS, lows).writes_copies


def test_a_parameter_without_gradient_stays_and_counts_no_step():
    parameters, _, optimizer = build()
    before = parameters[0].detach().clone()
    for p in parameters[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [0, *[1] * (len(SHAPES) - 1)]


def test_it_compiles_once_with_and_once_without_a_copy():
    """Whatever the shapes, rates, decays, steps and factors are."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    matrices = [nn.Parameter(torch.ones(rows, 16 * wide)) for rows, wide in ((2, 1), (3, 2), (7, 5), (32, 1))]
    lows = {p: p.detach().bfloat16() for p in matrices[2:]}
    halves = [{"params": matrices[::2], "weight_decay": 0.1}, {"params": matrices[1::2]}]
    optimizer = FusedAdamW(halves, LR, BETAS, EPS, lows, backend)
    for p in matrices:
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    for step in range(3):
        for p in matrices:
            p.grad = torch.ones_like(p)
        set_lr(optimizer, LR / (step + 1))
        optimizer.factor = torch.tensor(1.0 / (step + 1))
        optimizer.step()
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_the_job_says_when_the_update_is_compiled(job_file):
    def compiles(*overrides: str, device: torch.device = GPU) -> bool:
        return compiles_update(load_job(str(job_file), list(overrides)), device)

    inductor = "train.compile=true"
    assert compiles(inductor)
    assert not compiles()
    assert not compiles(inductor, device=CPU)
    assert not compiles(inductor, "train.compile_backend=aot_eager")
    assert not compiles(inductor, "train.optimizer=lion")
    assert not compiles(inductor, "train.precision=fp16")
    assert not compiles(inductor, "train.grad_noise=0.1")
    assert not compiles(inductor, "layout.offload=optimizer")


def test_only_large_parameters_of_whole_rows_are_moved_by_compiled_code():
    parameters, _, optimizer = build()
    moved, update = [], optimizer._update
    optimizer._update = lambda *tensors: moved.append(tensors[0].numel()) or update(*tensors)
    take_step(parameters, optimizer, 0, most=1.0)
    assert moved == [24 * 16, 48 * 32, 16 * 2]


def test_clipping_tells_the_optimizer_and_leaves_gradients_alone(job_file):
    """The same step as with torch's AdamW and gradients that were scaled; its state is made at once."""
    job = load_job(str(job_file), ["train.compile=true", "train.compile_backend=aot_eager"])
    found = []
    for compiled in (False, True):
        model = build_model(job, CPU)
        optimizer = build_optimizer(model, job.train, compiled=compiled)
        model(*torch.ones(2, 2, 8, dtype=torch.int64)).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        norm = Precision(job, CPU).clip(Owned(model), optimizer, 0.5)
        assert norm > 0.5
        untouched = all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
        assert untouched == compiled == isinstance(optimizer, FusedAdamW)
        optimizer.step()
        found.append(SimpleNamespace(norm=norm, weights=[p.detach() for p in model.parameters()]))
    assert found[0].norm == found[1].norm
    for ours, theirs in zip(found[1].weights, found[0].weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

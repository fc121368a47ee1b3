"""Fused AdamW equals torch's AdamW, with clipping and bf16 weight copies in the same pass."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.parallel.build import build_model
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.execution import uses_fused_adamw
from meshwright.spec.load import load_job
from meshwright.train.amp import MixedPrecision
from meshwright.train.optimizer import build_optimizer, set_lr
from meshwright.train.optimizers.adamw import FusedAdamW, clipping_factor

CPU = torch.device("cpu")
SHAPES = [(24, 16), (7, 3), (16,), (48, 32), (5,), (16, 2)]
LR, BETAS, EPS = 3e-3, (0.9, 0.95), 1e-8


def draw(seed: int, *, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict]:
    """Parameter groups: matrices decay, other parameters do not."""
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def build(copies: bool = False) -> tuple[list[nn.Parameter], dict, FusedAdamW]:
    parameters = [nn.Parameter(value) for value in draw(0)]
    lows = {p: p.detach().bfloat16() for p in parameters if p.ndim == 2} if copies else {}
    optimizer = FusedAdamW(groups(parameters), LR, BETAS, EPS, lows)
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


def test_updates_equal_those_of_torch():
    """The steps have different learning rates, with and without decay and clipping."""
    ours, _, fused = build()
    theirs, torchs = build_torchs()
    for step in range(6):
        take_step(ours, fused, step, most=1.0)
        take_step(theirs, torchs, step, most=1.0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
        for key, value in torchs.state[other].items():
            torch.testing.assert_close(fused.state[own][key], value, rtol=1e-5, atol=1e-7, msg=key)


def test_bf16_gradients_give_the_update_of_equal_float32_gradients():
    """This holds with and without clipping."""
    kinds, found = (torch.float32, torch.bfloat16), []
    for kind in kinds:
        parameters, _, optimizer = build()
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


def test_norm_of_bf16_gradients_is_computed_in_float32():
    """The norm of each bf16 gradient is 577.06. In 16 bits it would be 576."""
    shapes = (5, (1000, 333), (1000, 333))
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    model[0].grad = torch.full((5,), 2.0)
    for parameter in (model[1], model[2]):
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.ones(1000, 333, dtype=torch.bfloat16)
    norm = RankParameters(model).grad_norm()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx((666_000 + 20) ** 0.5, rel=1e-6)


def test_clipping_factor_equals_torchs():
    for size in (1e-4, 0.5, 30.0):
        gradients = [nn.Parameter(value) for value in draw(0)]
        for p in gradients:
            p.grad = p.detach() * size
        before = [p.grad.clone() for p in gradients]
        norm = nn.utils.clip_grad_norm_(gradients, 1.0)
        for p, whole in zip(gradients, before, strict=True):
            torch.testing.assert_close(whole * clipping_factor(norm, 1.0), p.grad)


def test_weight_copies_are_the_rounded_parameters():
    parameters, lows, optimizer = build(copies=True)
    for step in range(2):
        take_step(parameters, optimizer, step, most=1.0)
    assert optimizer.updates_weight_copies
    assert len(lows) == sum(p.ndim == 2 for p in parameters)
    for p, low in lows.items():
        assert torch.equal(low, p.detach().bfloat16())


def test_weight_copies_of_sharded_parameters_are_not_updated():
    """The optimizer has rows of the parameter, so the copy of the full parameter is unchanged."""
    parameters, lows, _ = build(copies=True)
    rows = [nn.Parameter(p.detach()[:1]) for p in parameters]
    assert not FusedAdamW([{"params": rows}], LR, BETAS, EPS, lows).updates_weight_copies


def test_parameter_without_gradient_is_unchanged_and_counts_no_step():
    parameters, _, optimizer = build()
    before = parameters[0].detach().clone()
    for p in parameters[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [0, *[1] * (len(SHAPES) - 1)]


@pytest.mark.parametrize("most", [1.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_with_a_norm_that_is_not_finite_changes_no_state(most, value):
    parameters, lows, optimizer = build(copies=True)
    take_step(parameters, optimizer, 0, most)
    state = [
        *parameters,
        *lows.values(),
        *(v for values in optimizer.state.values() for v in values.values()),
    ]
    before = [tensor.detach().clone() for tensor in state]
    optimizer.factor = clipping_factor(torch.tensor(value), most)
    optimizer.step()
    assert all(map(torch.equal, before, state))


def test_fused_update_depends_on_the_job(job_file):
    def fuses(*overrides: str, device: str = "cuda") -> bool:
        return uses_fused_adamw(load_job(str(job_file), [f"cluster.device={device}", *overrides]))

    inductor = "train.block_backend=triton"
    assert fuses(inductor)
    assert not fuses()
    assert not fuses(inductor, device="cpu")
    assert not fuses(inductor, "train.compile_backend=aot_eager")
    assert not fuses(inductor, "train.optimizer=lion")
    assert not fuses(inductor, "train.precision=fp16")
    assert not fuses(inductor, "train.grad_noise=0.1")
    assert not fuses(inductor, "layout.offload=optimizer")


def test_fused_clipping_does_not_change_gradients(job_file):
    """The step equals that of torch's AdamW with scaled gradients. Its state exists from the start."""
    job = load_job(str(job_file), ["train.block_backend=compile", "train.compile_backend=aot_eager"])
    found = []
    for fused in (False, True):
        model = build_model(job, CPU)
        optimizer = build_optimizer(model, job.train, fused=fused)
        model(*torch.ones(2, 2, 8, dtype=torch.int64)).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        precision, state = MixedPrecision(job, CPU), RankParameters(model)
        norm = precision.unscale_gradients(state, optimizer)
        precision.clip_gradients(state, optimizer, 0.5, norm)
        assert norm > 0.5
        untouched = all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
        assert untouched == fused == isinstance(optimizer, FusedAdamW)
        optimizer.step()
        found.append(SimpleNamespace(norm=norm, weights=[p.detach() for p in model.parameters()]))
    assert found[0].norm == found[1].norm
    for ours, theirs in zip(found[1].weights, found[0].weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

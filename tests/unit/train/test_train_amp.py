"""Dynamic loss scaling of fp16: overflows are skipped, the scale is checkpointed, a collapse is detected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.core.errors import RunFailedError
from meshwright.models.block_backend import compile_blocks
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel
from meshwright.train import amp
from meshwright.train.amp import MixedPrecision
from meshwright.train.optimizer import build_optimizer
from triton_decoders import batch, build

CPU = torch.device("cpu")
EXPERTS = DecoderModel(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=128,
    num_experts=4, experts_per_token=2,
)  # fmt: skip


@pytest.fixture
def job(job_file):
    """An fp16 job with a loss scale of 8."""
    return load_job(str(job_file), ["train.precision=fp16", "train.loss_scale=8"])


def take_step(precision: MixedPrecision, weight: nn.Parameter, optimizer, value: float) -> dict:
    """One step on a loss whose gradient is ``value``."""
    precision.backward((weight * value).sum())
    state = RankParameters(nn.ParameterList([weight]))
    norm = precision.unscale_gradients(state, optimizer)
    precision.clip_gradients(state, optimizer, 0.0, norm)
    precision.step(optimizer, norm)
    optimizer.zero_grad()
    return precision.step_fields(float(norm), bad=False)


def test_loss_scale_does_not_change_the_update(job):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    fields = take_step(MixedPrecision(job, CPU), weight, optimizer, 3.0)
    assert weight.item() == 1.0 - 0.5 * 3.0
    assert fields == {"loss_scale": 8.0, "skipped": False}


def test_overflow_skips_the_step_and_halves_the_scale(job):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    fields = take_step(MixedPrecision(job, CPU), weight, optimizer, float("inf"))
    assert weight.item() == 1.0
    assert fields == {"loss_scale": 4.0, "skipped": True}


@pytest.mark.parametrize("saved", [True, False])
def test_loss_scale_collapse_names_its_first_and_last_step(job, saved):
    weight = nn.Parameter(torch.ones(1))
    optimizer, precision = torch.optim.SGD([weight], lr=0.5), MixedPrecision(job, CPU)
    take_step(precision, weight, optimizer, 1.0)
    for step in range(2, 5):
        take_step(precision, weight, optimizer, float("nan"))
        precision.check_loss_scale(step, lambda: True)
    take_step(precision, weight, optimizer, float("nan"))
    with pytest.raises(
        RunFailedError, match=r"collapsed at step 5: it fell to 0.5 .* from step 2 on"
    ) as error:
        precision.check_loss_scale(5, lambda: saved)
    (problem,) = error.value.problems
    assert problem.code == "train-fp16-collapsed"
    assert ("resume" in problem.fix, "no checkpoint was written" in problem.rule) == (saved, not saved)


def test_loss_scale_is_restored_from_a_checkpoint(job):
    weight = nn.Parameter(torch.ones(1))
    optimizer, before, after = (
        torch.optim.SGD([weight], lr=0.5),
        MixedPrecision(job, CPU),
        MixedPrecision(job, CPU),
    )
    take_step(before, weight, optimizer, float("inf"))
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert take_step(after, weight, optimizer, float("inf"))["loss_scale"] == 2.0


def test_a_bad_step_is_not_an_overflow(job):
    precision = MixedPrecision(job, CPU)
    assert precision.step_fields(0.0, bad=False)["skipped"] is False
    for bad, overflow in ((False, True), (True, False)):
        assert precision.step_fields(float("inf"), bad)["skipped"] is True
        assert precision.skipped == overflow


def test_other_precisions_have_no_loss_scale(job_file):
    precision = MixedPrecision(load_job(str(job_file), ["train.precision=bf16"]), CPU)
    assert precision.state_dict() is None
    assert precision.step_fields(1.0, bad=False) == {"loss_scale": None, "skipped": None}


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "fused adamw"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_optimizer_changes_a_weight_if_the_gradient_norm_is_not_finite(job_file, name, value):
    """The step is then recomputed with these weights. A finite gradient changes them."""
    optimizer_name = name.removeprefix("fused ")
    job = load_job(str(job_file), [f"train.optimizer={optimizer_name}"])
    model = nn.ModuleDict({"blocks": nn.Linear(4, 4)})  # a matrix of a block, for Muon
    state, precision = RankParameters(model), MixedPrecision(job, CPU)
    optimizer = build_optimizer(state, job.train, fused=name == "fused adamw")
    before = [p.detach().clone() for p in model.parameters()]
    for gradient, changed in ((value, False), (1.0, True)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model["blocks"].weight.grad[0, 0] = gradient
        norm = precision.unscale_gradients(state, optimizer)
        precision.clip_gradients(state, optimizer, 1.0, norm)
        precision.step(optimizer, norm)
        assert [bool((p != b).any()) for p, b in zip(model.parameters(), before, strict=True)] == [
            changed
        ] * 2


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["triton", "compiled-experts"])
def test_backward_pass_recomputes_with_the_attention_kernel_of_the_forward_pass(
    job_file, monkeypatch, kind, recompute
):
    """The compiled blocks' kernel is not the default one here; torch refuses a recomputation that differs."""
    monkeypatch.setattr(amp, "prefer_fast_attention", lambda device: sdpa_kernel([SDPBackend.MATH]))
    precision = MixedPrecision(
        load_job(str(job_file), ["train.precision=bf16", "train.block_backend=compile"]), CPU
    )
    if kind == "triton":
        net = build(recompute=recompute)
    else:
        net = build(EXPERTS, triton=False, copies=False, recompute=recompute)
        compile_blocks(net, backend="aot_eager")
    tokens, targets, _ = batch()
    with precision.autocast():
        loss = net(tokens, targets)
    precision.backward(loss)
    assert all(parameter.grad.count_nonzero() > 0 for parameter in net.parameters())

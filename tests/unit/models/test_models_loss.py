"""The chunked cross-entropy equals the plain one and never holds the logits of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.measure.memory_tracker import PeakTracker
from meshwright.models import loss as losses
from meshwright.models.loss import linear_cross_entropy

TOKENS, WIDTH, WORDS = 37, 16, 50


def operands(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(0, WORDS, (tokens,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return x, weight, targets


def plain_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.to(x.dtype).T).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk):
    """The cases include a short last chunk and a loss that is scaled afterwards."""
    x, weight, targets = operands()
    expected = plain_loss(x, weight, targets)
    wanted = torch.autograd.grad(expected * 3.0, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, chunk)
    found = torch.autograd.grad(loss * 3.0, (x, weight))
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, chunk), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_bf16_operands_keep_float32_loss_and_weight_gradient(dtype, tolerance):
    x, weight, targets = operands(dtype)
    loss = linear_cross_entropy(x, weight, targets, 8)
    loss.backward()
    assert (loss.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32, dtype, torch.float32)
    exact_x = x.detach().float().requires_grad_()
    exact = plain_loss(exact_x, weight.detach().requires_grad_(), targets)
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    difference = (x.grad.float() - exact_x.grad).norm() / exact_x.grad.norm()
    assert difference.item() < tolerance


def test_only_ignored_targets_give_zero_loss_and_gradient():
    x, weight, targets = operands()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE_INDEX), 8)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_chunked_loss_never_holds_all_logits():
    """The plain loss holds them three times. The test covers forward, backward and evaluation."""
    x, weight, targets = operands(tokens=4096)
    logits_bytes = 4096 * WORDS * 4

    def growth(compute) -> int:
        with PeakTracker([x, weight, targets]) as tracker:
            before = tracker.live_bytes
            compute()
        return tracker.peak_bytes - before

    def chunked() -> None:
        linear_cross_entropy(x, weight, targets, 64).backward()

    def evaluated() -> None:
        with torch.no_grad():
            linear_cross_entropy(x, weight, targets, 64)

    gradients = 2 * (x.nbytes + weight.nbytes)
    assert growth(lambda: plain_loss(x, weight, targets).backward()) > 2 * logits_bytes
    x.grad = weight.grad = None
    assert growth(chunked) < gradients + logits_bytes / 8
    assert growth(evaluated) < logits_bytes / 8


def test_weight_gradient_is_not_copied():
    x, weight, targets = operands()
    loss = linear_cross_entropy(x, weight, targets, 8)
    made = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == made


@pytest.fixture
def without_compile(monkeypatch):
    """The fused loss without compilation, which would take seconds."""
    monkeypatch.setattr(losses, "_compile_softmax_loss", lambda: losses.fused_softmax_loss)


@pytest.mark.parametrize("chunk", [1, 5, 36, 1000])
def test_fused_loss_equals_the_plain_one(without_compile, chunk):
    """The dtype is float32. The cases have ignored targets, a short last chunk and no gradients."""
    x, weight, targets = operands()
    expected = plain_loss(x, weight, targets)
    wanted = torch.autograd.grad(expected * 3.0, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, chunk, fused=True)
    found = torch.autograd.grad(loss * 3.0, (x, weight))
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, chunk, fused=True), expected)


@pytest.mark.parametrize("kept", [True, False], ids=["copy kept", "copy made"])
def test_fused_bf16_loss_matches_the_eager_one(without_compile, kept):
    """Both round the logits to 16 bits. Losses agree in float32 and gradients to one rounding."""
    x, weight, targets = operands(torch.bfloat16)
    low = weight.detach().to(torch.bfloat16) if kept else None
    eager = linear_cross_entropy(x, weight, targets, 8)
    wanted = torch.autograd.grad(eager, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, 8, weight_copy_VD=low, fused=True)
    found = torch.autograd.grad(loss, (x, weight))
    torch.testing.assert_close(loss, eager, rtol=1e-6, atol=0.0)
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.float32]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() < 2**-8 * theirs.float().norm()


def test_loss_gemms_read_the_bf16_weight_copy():
    """This holds in eager mode too. With a copy of zeros all tokens are equally likely."""
    x, weight, targets = operands(torch.bfloat16)
    low = torch.zeros_like(weight, dtype=torch.bfloat16, requires_grad=False)
    loss = linear_cross_entropy(x, weight, targets, 8, weight_copy_VD=low)
    counted = int((targets != IGNORE_INDEX).sum())
    assert loss.item() == pytest.approx(counted * torch.tensor(float(WORDS)).log().item(), rel=1e-5)


def test_fused_loss_of_only_ignored_targets_is_zero(without_compile):
    x, weight, targets = operands(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE_INDEX), 8, fused=True)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_fused_logits_are_never_held_in_float32(monkeypatch):
    """Input and output of the compiled function have the dtype of the GEMM."""
    seen = []

    def spy(logits, targets, wanted):
        loss, gradient = losses.fused_softmax_loss(logits, targets, wanted)
        seen.append((logits.dtype, None if gradient is None else gradient.dtype))
        return loss, gradient

    monkeypatch.setattr(losses, "_compile_softmax_loss", lambda: spy)
    x, weight, targets = operands(torch.bfloat16)
    linear_cross_entropy(x, weight, targets, 37, fused=True)
    with torch.no_grad():
        linear_cross_entropy(x, weight, targets, 37, fused=True)
    assert seen == [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, None)]


@pytest.mark.slow
def test_fused_loss_compiles():
    x, weight, targets = operands(torch.bfloat16)
    eager = linear_cross_entropy(x, weight, targets, 20)
    wanted = torch.autograd.grad(eager, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, 20, fused=True)
    torch.testing.assert_close(loss, eager, rtol=1e-5, atol=0.0)
    for ours, theirs in zip(torch.autograd.grad(loss, (x, weight)), wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() < 2**-8 * theirs.float().norm()

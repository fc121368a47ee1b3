"""The chunked cross-entropy is the plain one, and never holds the logits of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)

from meshwright.prepare.dataset import IGNORED
from meshwright.run.memory import PeakTracker
from meshwright.run.models.loss import linear_cross_entropy

TOKENS, WIDTH, WORDS = 37, 16, 50


def operands(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(0, WORDS, (tokens,), generator=generator)
    targets[::5] = IGNORED
    return x, weight, targets


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.to(x.dtype).T).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
def test_loss_and_gradients_are_those_of_the_plain_form(chunk):
    """Also where the last chunk is short, and scaled by whatever comes after the loss."""
    x, weight, targets = operands()
    expected = plain(x, weight, targets)
    wanted = torch.autograd.grad(expected * 3.0, (x, weight))
    loss = linear_cross_entropy(x, weight, targets, chunk)
    found = torch.autograd.grad(loss * 3.0, (x, weight))
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, chunk), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_sixteen_bit_operands_keep_a_float32_loss_and_weight_gradient(dtype, tolerance):
    x, weight, targets = operands(dtype)
    loss = linear_cross_entropy(x, weight, targets, 8)
    loss.backward()
    assert (loss.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32, dtype, torch.float32)
    exact_x = x.detach().float().requires_grad_()
    exact = plain(exact_x, weight.detach().requires_grad_(), targets)
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    difference = (x.grad.float() - exact_x.grad).norm() / exact_x.grad.norm()
    assert difference.item() < tolerance


def test_ignored_targets_alone_give_zero_and_no_gradient():
    x, weight, targets = operands()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORED), 8)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_the_logits_of_the_whole_batch_are_never_held():
    """What the plain form holds three times, the chunked one does not hold once; forward, backward, eval."""
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
    assert growth(lambda: plain(x, weight, targets).backward()) > 2 * logits_bytes
    x.grad = weight.grad = None
    assert growth(chunked) < gradients + logits_bytes / 8
    assert growth(evaluated) < logits_bytes / 8


def test_the_weights_gradient_is_handed_over_not_copied():
    x, weight, targets = operands()
    loss = linear_cross_entropy(x, weight, targets, 8)
    made = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == made

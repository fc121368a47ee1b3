"""Fused loss and fused AdamW on a GPU: equal to torch, without a device sync."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from meshwright.data.dataset import IGNORE_INDEX  # noqa: E402
from meshwright.models.loss import linear_cross_entropy  # noqa: E402
from meshwright.train.optimizers.adamw import FusedAdamW, clipping_factor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def forbid_device_syncs() -> Iterator[None]:
    """Every device sync that torch detects is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect all syncs
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_fused_loss_matches_the_eager_loss_without_a_device_sync():
    """Three chunks, the last one short; the GEMM accumulates the head's gradient in float32."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2600, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(4096, 256, device="cuda", generator=generator) / 16).requires_grad_()
    targets = torch.randint(0, 4096, (2600,), device="cuda", generator=generator)
    targets[::7] = IGNORE_INDEX
    low = weight.detach().bfloat16()

    def gradients(*, fused: bool):
        loss = linear_cross_entropy(
            x, weight, targets, 1024, weight_copy_VD=low if fused else None, fused=fused
        )
        return loss.detach(), *torch.autograd.grad(loss / 100, (x, weight))

    eager, fused = gradients(fused=False), gradients(fused=True)
    torch.testing.assert_close(fused[0], eager[0], rtol=1e-5, atol=0.0)
    for ours, theirs in zip(fused[1:], eager[1:], strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.float() - theirs.float()).norm() < 2**-7 * theirs.float().norm()
    with forbid_device_syncs():
        gradients(fused=True)


@pytest.mark.parametrize("matrix_grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_adamw_matches_torch_without_a_device_sync(matrix_grad_dtype):
    """Matrices and vectors, with and without bf16 weight copies, aligned and unaligned."""
    shapes = [(2048, 2048), (512,), (300, 7), (1024, 6144), (3,)]
    memory = torch.randn(4 + 300, 7, device="cuda")
    ours = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    ours[2] = torch.nn.Parameter(memory[3:303])  # not aligned to 16 bytes
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    copies = {p: p.detach().bfloat16() for p in ours[2:]}
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    fused = FusedAdamW([{"params": ours, "weight_decay": 0.1}], **settings, copies=copies)
    torchs = torch.optim.AdamW(theirs, **settings, weight_decay=0.1, fused=True)
    for p in ours:
        p.grad_dtype = matrix_grad_dtype if p.dim() == 2 else torch.float32
        blank = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        fused.state[p] = {"step": torch.zeros((), device="cuda"), **blank}

    def step() -> None:
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own).to(own.grad_dtype)
            other.grad = own.grad.float().clone()  # clipped in place
        fused.factor = clipping_factor(torch.nn.utils.get_total_norm([p.grad for p in theirs]), 1.0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        fused.step()
        torchs.step()

    step()
    with forbid_device_syncs():
        step()
    step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused.state[own]["exp_avg_sq"], torchs.state[other]["exp_avg_sq"])
    for p, low in copies.items():
        assert torch.equal(low, p.detach().bfloat16())
    assert torch.equal(memory[3:303], ours[2]), "the update was not in place"

"""Triton blocks with explicit backward passes are as close to float32 as the torch modules.

On CPUs torch operations replace the Triton kernels, so these tests check how the passes are composed.
``tests/gpu/test_triton_kernels_on_gpu.py`` compares the kernels with these operations.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.layout.stages import StageSpec
from meshwright.models import loss as losses
from meshwright.models import triton_block
from meshwright.models.decoder import Decoder
from meshwright.models.kernels import fp8
from meshwright.models.kernels import fused as kernels
from meshwright.models.kernels.gemm import TORCH_GEMMS
from meshwright.models.rope import apply_rope
from triton_decoders import (
    EXACT,
    LENGTH,
    LOW,
    SAMPLES,
    SHAPE,
    StepResult,
    batch,
    build,
    record_saved_bytes,
    step,
)

UNGROUPED = dataclasses.replace(SHAPE, num_kv_heads=4)
TIED = dataclasses.replace(SHAPE, tied_embeddings=True)
NEAR = {False: 0.03, True: 0.3}
"""Largest relative error of all gradients against float32, by whether GEMMs are FP8; half of it is usual."""


def distances(found: StepResult, exact: StepResult) -> dict[str, float]:
    """Relative error of the loss and of each gradient."""
    off = {name: float((g - exact[1][name]).norm() / exact[1][name].norm()) for name, g in found[1].items()}
    return {"loss": abs(found[0] / exact[0] - 1), **off}


def overall(off: dict[str, float]) -> float:
    """Relative error of all gradients."""
    return math.sqrt(sum(d * d for name, d in off.items() if name != "loss") / (len(off) - 1))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("model", [SHAPE, UNGROUPED, TIED], ids=["grouped", "ungrouped", "tied"])
@pytest.mark.parametrize("residual_dtype", [EXACT, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("uses_fp8", [False, True], ids=["bf16", "fp8"])
def test_gradients_are_as_close_to_float32_as_those_of_torch_modules(uses_fp8, residual_dtype, model, masked):
    """Both round in different places. An extra rounding or a missing term shows in the overall error."""
    exact = step(build(model, triton=False, copies=False), masked=masked, low=False)
    modules = distances(
        step(build(model, residual_dtype, triton=False, uses_fp8=uses_fp8), masked=masked), exact
    )
    found = distances(step(build(model, residual_dtype, uses_fp8=uses_fp8), masked=masked), exact)
    assert found["loss"] < (1e-2 if uses_fp8 else 2e-3)
    assert overall(found) < min(1.25 * overall(modules), NEAR[uses_fp8])
    assert (overall(found) > 2 * NEAR[False]) == uses_fp8, "not in the precision that was asked for"
    for name, off in found.items():
        assert off < 2 * modules[name] + NEAR[uses_fp8] / 3, name


@pytest.mark.parametrize("uses_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("residual_dtype", [EXACT, LOW], ids=["fp32", "bf16"])
def test_checkpointing_is_bit_identical_and_evaluation_has_the_same_loss(residual_dtype, uses_fp8):
    modes = ("none", "selective", "full")
    nets = {mode: build(residual_dtype=residual_dtype, recompute=mode, uses_fp8=uses_fp8) for mode in modes}
    found = {mode: step(net, masked=True) for mode, net in nets.items()}
    expected, gradients = found["selective"]
    tokens, targets, documents = batch()
    for mode, (loss, others) in found.items():
        assert loss == expected, mode
        assert [name for name, g in others.items() if not torch.equal(g, gradients[name])] == [], mode
        with torch.no_grad(), torch.autocast("cpu", LOW):
            assert nets[mode](tokens, targets, documents).item() == expected, mode


def test_recomputed_swiglu_is_bit_identical():
    """Saving it and recomputing it therefore give the same gradients."""
    both = draw(200, 200)
    assert torch.equal(kernels.swiglu_backward(both, both[:, :100])[1], kernels.swiglu(both, EXACT).values)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_of_micro_batches_accumulate(recompute):
    """The sum is bit-identical, also for the embedding. No two gradients share memory."""
    first = step(build(recompute=recompute))[1]
    second = step(build(recompute=recompute), seed=3)[1]
    net = build(recompute=recompute)
    step(net)
    _, sums = step(net, seed=3)
    assert "embed.weight" in sums
    for name, gradient in sums.items():
        assert gradient.dtype == EXACT, name
        assert gradient.norm() > 0, name
        assert torch.equal(gradient, first[name] + second[name]), name
    assert len({gradient.data_ptr() for gradient in sums.values()}) == len(sums)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("uses_fp8", [False, True], ids=["bf16", "fp8"])
def test_bf16_weight_gradients_are_the_float32_ones_rounded(uses_fp8, recompute):
    """Only weight gradients of the blocks change. Norms, embedding and head stay float32."""
    loss, wide = step(build(uses_fp8=uses_fp8, recompute=recompute))
    found, narrow = step(build(uses_fp8=uses_fp8, recompute=recompute, grad_dtype=LOW))
    assert found == loss
    rounded = {name for name, gradient in narrow.items() if gradient.dtype == LOW}
    assert rounded == {name for name in wide if name.startswith("blocks.") and "norm" not in name}
    for name, gradient in narrow.items():
        assert torch.equal(gradient, wide[name].to(gradient.dtype)), name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_triton_modules_keep_parameter_names_and_run_hooks(recompute):
    plain, net, called = build(triton=False, copies=False), build(recompute=recompute), []
    assert list(net.state_dict()) == list(plain.state_dict())
    for name, module in net.named_modules():
        if name in ("embed", "norm", "blocks.0", "blocks.1", "blocks.2"):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    step(net)
    assert called == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]


def test_logits_match_the_loss():
    net = build()
    tokens, targets, _ = batch()
    with torch.no_grad(), torch.autocast("cpu", LOW):
        logits, loss = net(tokens).float().flatten(0, 1), net(tokens, targets)
    own = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    assert own.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("recompute", "residual_dtype"), [("selective", LOW), ("selective", EXACT), ("none", LOW)]
)
def test_saved_bytes_of_a_block_are_exact(recompute, residual_dtype):
    """A block saves residual stream, inverse RMS, q, k, v, attention, log-sum-exp, gate and up.

    Without checkpointing it also saves GEMM inputs.
    """
    net = build(residual_dtype=residual_dtype, recompute=recompute)
    net.weight_copies.refresh()
    tokens, width, inner = SAMPLES * LENGTH, SHAPE.hidden_size, SHAPE.ffn_size
    x = torch.randn(SAMPLES, LENGTH, width).to(residual_dtype).requires_grad_()
    delta = torch.randn(SAMPLES, LENGTH, width).to(LOW).requires_grad_()
    with record_saved_bytes(net) as kept, torch.autocast("cpu", LOW):
        parts = net.blocks["0"]((x, delta), (net.rope_cos, net.rope_sin), None)
    streams, attention = 2 * (width * residual_dtype.itemsize + 4), 2 * SHAPE.query_size + 4 * SHAPE.num_heads
    expected = streams + 2 * (SHAPE.query_size + 2 * SHAPE.kv_size) + attention + 2 * 2 * inner
    if recompute == "none":
        expected += 2 * (2 * width + inner)
    assert sum(kept.values()) == tokens * expected
    sum(part.float().sum() for part in parts).backward()


ROPE_BACKWARD, NORM_BACKWARD, SWIGLU_BACKWARD = (
    kernels.rope_backward,
    kernels.rms_norm_backward,
    kernels.swiglu_backward,
)


def rotated_forward(q, k, v, cos, sin):
    """Gradients rotated in the forward direction."""
    return ROPE_BACKWARD(q, k, v, cos, -sin)


def without_the_residual_gradient(grad, total, inverse, weight, beside, normed=True):
    """The norm's gradient without the gradient of the residual stream."""
    return NORM_BACKWARD(grad, total, inverse, weight, None, normed)


def without_the_mean(grad, total, inverse, weight, beside, normed=True):
    """Without the term that projects out the direction of the norm's input."""
    expected = NORM_BACKWARD(grad, total, inverse, weight, beside, normed)
    unit = total.float() * inverse.unsqueeze(1)
    mean = (grad.float() * weight * unit).mean(-1, keepdim=True)
    stream = expected.residual_ND.float() + unit * mean * inverse.unsqueeze(1)
    return expected._replace(residual_ND=stream.to(total.dtype), delta_ND=stream.to(grad.dtype))


def gate_and_up_swapped(both, grad, inner=True):
    """The gradients of gate and up, swapped."""
    out, again = SWIGLU_BACKWARD(both, grad, inner)
    return torch.cat(out.chunk(2, dim=-1)[::-1], dim=-1), again


def with_a_constant_sigmoid(both, grad, inner=True):
    """The gradient of SwiGLU with a constant sigmoid."""
    gate, up = both.float().chunk(2, dim=-1)
    out, again = SWIGLU_BACKWARD(both, grad, inner)
    to_gate = (grad.float() * up * torch.sigmoid(gate)).to(both.dtype)
    return torch.cat((to_gate, out.chunk(2, dim=-1)[1]), dim=-1), again


def with_a_wrong_inner(both, grad, inner=True):
    """The input of ``down``, recomputed without the sigmoid."""
    gate, up = both.chunk(2, dim=-1)
    return SWIGLU_BACKWARD(both, grad, inner)[0], gate * up


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rope_backward", rotated_forward),
        ("rms_norm_backward", without_the_residual_gradient),
        ("rms_norm_backward", without_the_mean),
        ("swiglu_backward", gate_and_up_swapped),
        ("swiglu_backward", with_a_constant_sigmoid),
        ("swiglu_backward", with_a_wrong_inner),
    ],
)
def test_injected_defect_is_detected(monkeypatch, name, wrong):
    """One wrong term exceeds the bounds above many times."""
    exact = step(build(triton=False, copies=False), low=False)
    right = distances(step(build()), exact)
    monkeypatch.setattr(kernels, name, wrong)
    found = distances(step(build()), exact)
    assert overall(found) > max(3 * overall(right), NEAR[False])
    assert found["loss"] == right["loss"], "the forward pass reads none of it"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_token_counts_not_divisible_by_16_use_a_bf16_weight_gradient():
    """FP8 operands need multiples of 16 in both dimensions."""
    matrix = triton_block.LinearGemms(draw(32, 48).to(LOW), True, True, (16, 16))
    for tokens, least, most in ((24, 0.0, 0.005), (32, 0.01, 0.06)):
        grad, x = draw(tokens, 32, seed=1).to(LOW), draw(tokens, 48, seed=2).to(LOW)
        parts, exact = matrix.weight_grads(grad, x), grad.float().T @ x.float()
        assert [part.shape for part in parts] == [(16, 48), (16, 48)]
        assert least < (torch.cat(parts) - exact).norm() / exact.norm() < most, f"{tokens} tokens"


@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "norm alone"])
def test_norm_and_its_gradients_match_autograd(added, beside):
    x, delta = draw(10, 12).requires_grad_(), draw(10, 12, seed=1)
    grad, other, eps = draw(10, 12, seed=2), draw(10, 12, seed=3), 0.1
    weight = draw(12, seed=4).requires_grad_()
    total = x + delta if added else x * 1.0
    normed = F.rms_norm(total, (12,), weight, eps)
    past = (other if beside else torch.zeros_like(other)) * 1.0
    expected, of_weight = torch.autograd.grad((normed, total), (x, weight), (grad, past))
    with torch.no_grad():
        stream, out, inverse = kernels.add_rms_norm(x, delta if added else None, weight, eps, EXACT)
        found = kernels.rms_norm_backward(grad, stream, inverse, weight, other if beside else None)
        short = kernels.rms_norm_backward(grad, stream, inverse, weight, None, normed=False)
    assert (stream is x) != added
    assert out.scale is None
    assert short.normed_ND is None
    near(stream, total)
    for ours, theirs in ((out.values, normed), (found.normed_ND, normed), (found.weight_D, of_weight)):
        near(ours, theirs)
    for ours in (found.residual_ND, found.delta_ND):
        near(ours, expected)


def test_swiglu_and_its_gradients_match_autograd():
    both, grad = (3 * draw(10, 24)).requires_grad_(), draw(10, 12, seed=1)
    gate, up = both.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    (expected,) = torch.autograd.grad(inner, both, grad)
    with torch.no_grad():
        near(kernels.swiglu(both, EXACT).values, inner)
        found, again = kernels.swiglu_backward(both, grad)
        near(found, expected)
        near(again, inner)
        assert kernels.swiglu_backward(both, grad, inner=False)[1] is None


def test_rope_matches_the_model_and_its_backward_is_the_gradient():
    """Queries and keys are rotated in place next to the values. Gradients may have any memory layout."""
    samples, length, size, queries, keys = 2, 5, 8, 4, 2
    angles = draw(length, size // 2).repeat(1, 2)
    rope = angles.cos(), angles.sin()
    rows = draw(samples, length, (queries + 2 * keys) * size, seed=1).requires_grad_()
    heads = rows.view(samples, length, -1, size).transpose(1, 2).split((queries, keys, keys), dim=1)
    rotated = (*(apply_rope(part, *rope) for part in heads[:2]), heads[2])
    grads = [draw(*part.shape, seed=seed) for seed, part in enumerate(rotated, 2)]
    grads[1] = grads[1].transpose(1, 2).contiguous().transpose(1, 2)
    (expected,) = torch.autograd.grad(rotated, rows, grads)
    with torch.no_grad():
        in_place = rows.clone().view(samples, length, -1, size).transpose(1, 2)
        kernels.rotate_heads(in_place[:, : queries + keys], *rope)
        near(in_place, torch.cat(rotated, dim=1))
        near(kernels.rope_backward(*grads, *rope), expected.flatten(0, 1))


def test_fp8_rows_and_columns_are_within_their_rounding():
    """With three mantissa bits each value is within 1/16, down to a small share of the largest of its row."""
    x = draw(32, 48) * torch.logspace(-6, 6, 32).unsqueeze(1)
    by_rows, by_columns = kernels.cast_rows(x), kernels.cast_columns(x)
    assert by_rows.values.dtype == by_columns.values.dtype == fp8.E4M3
    assert (by_columns.values.shape, by_columns.scale.shape) == ((48, 32), (48, 1))
    for cast, exact in ((by_rows, x), (by_columns, x.T)):
        again = cast.values.float() * cast.scale
        largest = exact.abs().amax(1, keepdim=True)
        least = largest / fp8.E4M3_MAX * 2**-10
        assert ((again - exact).abs() <= exact.abs() / 16 + least).all()
        near(again.abs().amax(1, keepdim=True) / largest, torch.ones_like(largest))
    factors = torch.logspace(-3, 3, 48)
    folded, expected = kernels.cast_rows(x, by=factors.view(-1, 1)), kernels.cast_rows(x * factors)
    assert torch.equal(folded.values.float(), expected.values.float())
    assert torch.equal(folded.scale, expected.scale)
    transposed = kernels.cast_transposed(x, by_rows.scale)
    assert transposed.is_contiguous()
    assert torch.equal(transposed.float(), by_rows.values.float().T)


def test_fused_column_amax_equals_that_of_the_cast():
    both, grad = draw(32, 64).to(LOW), draw(32, 32, seed=1).to(LOW)
    out, inner, out_amax, inner_amax = kernels.swiglu_backward_amax(both, grad)
    plain, again = kernels.swiglu_backward(both, grad)
    assert torch.equal(out, plain)
    assert torch.equal(inner, again)
    for values, amax in ((out, out_amax), (inner, inner_amax)):
        assert amax.dtype == EXACT
        assert torch.equal(amax, kernels.column_amax(values))
        known, looked_for = kernels.cast_columns(values, amax), kernels.cast_columns(values)
        assert torch.equal(known.values.float(), looked_for.values.float())
        assert torch.equal(known.scale, looked_for.scale)
    assert torch.equal(
        kernels.column_amax(torch.tensor([[1.0, -3.0], [-2.0, 0.0]])), torch.tensor([2.0, 3.0])
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_casts_keep_nan_and_infinity(value):
    """A diverging run is detected by its loss."""
    x, other, weight = draw(16, 32), draw(16, 32, seed=1), draw(32, seed=2)
    x[3, 4] = value
    for cast, row in (
        (kernels.cast_rows(x), 3),
        (kernels.cast_columns(x), 4),
        (kernels.add_rms_norm(x, other, weight, 1e-5, fp8.E4M3)[1], 3),
        (kernels.swiglu(torch.cat((other, x), dim=-1), fp8.E4M3), 3),
    ):
        again = cast.values.float() * cast.scale
        assert not again[row].isfinite().all()
        assert again[row - 1].isfinite().all()


def test_fp8_gemm_inputs_are_the_cast_of_the_exact_ones():
    x, delta, weight, both = draw(16, 32), draw(16, 32, seed=1), draw(32, seed=2), draw(16, 64, seed=3)
    _, plain, _ = kernels.add_rms_norm(x, delta, weight, 1e-5, EXACT)
    _, scaled, _ = kernels.add_rms_norm(x, delta, weight, 1e-5, fp8.E4M3)
    for found, exact in ((scaled, plain), (kernels.swiglu(both, fp8.E4M3), kernels.swiglu(both, EXACT))):
        expected = kernels.cast_rows(exact.values)
        assert torch.equal(found.values.float(), expected.values.float())
        assert torch.equal(found.scale, expected.scale)


def test_scale_multiplies_in_place():
    x = draw(10, 12).to(LOW)
    place, before = x.data_ptr(), x.clone()
    kernels.scale(x, torch.tensor(1.0))
    assert torch.equal(x, before)
    kernels.scale(x, torch.tensor(0.25))
    assert torch.equal(x, before / 4)
    assert (x.data_ptr(), x.dtype) == (place, LOW)


@pytest.mark.parametrize("expected", [1.0, 1 / 256, 0.1, 3.0])
def test_gradients_do_not_depend_on_the_expected_loss_gradient(expected):
    """A fake replaces the GPU kernel that uses it. The backward pass starts with 1/7."""

    def in_place(logits, targets, wanted):
        loss, gradient = losses.softmax_loss(logits, targets, wanted)
        return loss, gradient.mul_(expected)

    x, weight = draw(40, 16).requires_grad_(), draw(50, 16, seed=1).requires_grad_()
    targets = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(2))
    own = losses._LinearCrossEntropy.apply(
        x, weight, weight.detach(), targets, 16, in_place, False, expected, TORCH_GEMMS
    )
    plain = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(plain / 7, (x, weight))
    for ours, theirs in zip(torch.autograd.grad(own / 7, (x, weight)), wanted, strict=True):
        near(ours, theirs)


@pytest.mark.parametrize("expected", [1 / 64, 100.0])
def test_expected_loss_gradient_has_no_effect_on_a_cpu(expected):
    """No CPU kernel uses it. The head stores it, and a stage without a head ignores it."""
    net = build()
    net.set_expected_loss_grad(expected)
    assert net.head.expected_loss_grad == expected
    _, gradients = step(net)
    for name, gradient in step(build())[1].items():
        assert torch.equal(gradient, gradients[name]), name
    first = Decoder(SHAPE, LENGTH, stage=StageSpec(SHAPE, 0, range(1), first=True, last=False))
    first.set_expected_loss_grad(expected)
    assert not hasattr(first, "head")

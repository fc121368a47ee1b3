"""bf16 weight copies: results, saved bytes, and refreshes after the master weights change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import compile_blocks
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill
from meshwright.models.linear import Linear, MergedLinear, low_precision_linear
from meshwright.models.weight_source import RandomWeights
from meshwright.spec.model import DecoderModel
from model_shapes import GPT_PARTS
from triton_decoders import record_saved_bytes

LLAMA = DecoderModel(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=50)
GPT = dataclasses.replace(LLAMA, num_kv_heads=4, max_positions=16, tied_embeddings=True, **GPT_PARTS)
LENGTH, SAMPLES = 16, 4
# torch.compile reads .grad of a non-leaf; it hides the warning, but not where warnings are errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning", "ignore:.*:DeprecationWarning"
)


def build(model: DecoderModel, recompute: str = "none", copied: bool = True) -> Decoder:
    """A decoder with bf16 weight copies."""
    net = Decoder(model, LENGTH, 8, recompute)
    weights = RandomWeights(dataclasses.replace(model, init_std=0.2), 0)
    fill(net, [name for name, _ in net.named_parameters()], weights, torch.device("cpu"))
    if copied:
        torch.compiler.reset()  # it limits how often a block is compiled
        net.residual_dtype = torch.bfloat16
        net.weight_copies = WeightCopies(net, torch.bfloat16)
        compile_blocks(net, backend="aot_eager")
    return net


def step(net: Decoder) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    tokens = torch.randint(0, 50, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(tokens[:, :-1].clone(), tokens[:, 1:].clone()) / tokens.numel()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


def test_gradients_reach_each_master_weight_in_float32():
    """They equal those of three float32 GEMMs with the same rounded weights, split by rows."""
    torch.manual_seed(0)
    masters = [nn.Parameter(torch.randn(rows, 8)) for rows in (16, 4, 4)]
    low = torch.cat([master.detach() for master in masters]).bfloat16()
    x = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    out = low_precision_linear(x, low, *masters)
    seed = torch.randn_like(out)
    out.backward(seed)
    assert torch.equal(out, x @ low.T)
    assert torch.allclose(x.grad.float(), (seed @ low).float(), rtol=1e-2, atol=1e-2)
    expected = (seed.float().flatten(0, 1).T @ x.detach().float().flatten(0, 1)).split([16, 4, 4])
    for master, gradient in zip(masters, expected, strict=True):
        assert master.grad.dtype == torch.float32
        assert torch.allclose(master.grad, gradient, rtol=1e-2, atol=1e-2)


def test_merged_linears_match_single_ones():
    """The forward pass is bit-identical. Gradients are within 16-bit rounding."""
    torch.manual_seed(0)
    linears = [Linear(8, width, bias=False) for width in (16, 4)]
    low = torch.cat([linear.weight.detach() for linear in linears]).bfloat16()
    x = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    parts = MergedLinear(linears, low).matmul(x)
    seeds = [torch.randn_like(part) for part in parts]
    found = torch.autograd.grad(parts, [x, *(linear.weight for linear in linears)], seeds)
    lows = low.split([16, 4])
    for part, own in zip(parts, lows, strict=True):
        assert torch.equal(part, x @ own.T)
    grads = [seed.float().flatten(0, 1) for seed in seeds]
    expected = [sum(grad @ own.float() for grad, own in zip(grads, lows, strict=True)).view_as(x)]
    expected += [grad.T @ x.detach().float().flatten(0, 1) for grad in grads]
    for gradient, exact in zip(found, expected, strict=True):
        assert torch.allclose(gradient.float(), exact, rtol=2e-2, atol=5e-2)
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        pytest.param(LLAMA, "none", marks=pytest.mark.slow),
        (LLAMA, "selective"),
        pytest.param(LLAMA, "full", marks=pytest.mark.slow),
        (GPT, "none"),
    ],
)
def test_step_with_weight_copies_matches_one_without(model, recompute):
    """The results are within 16-bit rounding, with merged linears and with biases, which are not merged."""
    plain, expected = step(build(model, copied=False))
    net = build(model, recompute)
    assert (net.blocks["0"].attention.qkv is None) == model.attention_bias
    found, gradients = step(net)
    assert found == pytest.approx(plain, rel=2e-3)
    whole = nn.utils.get_total_norm(list(expected.values()))  # the gradient of a key bias is noise
    for name, gradient in gradients.items():
        off = (gradient - expected[name]).norm()
        assert off < 0.03 * expected[name].norm() + 1e-3 * whole, name


def test_selective_checkpointing_of_a_compiled_block_saves_its_gemm_outputs():
    """It saves exactly input, q, k, v, attention with its log-sum-exp, the output of wo, gate and up."""
    net = build(LLAMA, "selective")
    net.weight_copies.refresh()
    block, tokens, width = net.blocks["0"], SAMPLES * LENGTH, LLAMA.hidden_size
    x = torch.randn(SAMPLES, LENGTH, width).bfloat16().requires_grad_()
    rope = net.rope_cos, net.rope_sin
    with torch.autocast("cpu", torch.bfloat16):
        block(x, rope, None)  # compiles
        with record_saved_bytes(net) as kept:
            out = block(x, rope, None)
    heads = LLAMA.query_size + 2 * LLAMA.kv_size
    expected = 2 * (width + heads + LLAMA.query_size + width + 2 * LLAMA.ffn_size) + 4 * LLAMA.num_heads
    assert sum(kept.values()) == tokens * expected
    out.sum().backward()


def test_copies_are_refreshed_when_masters_change():
    net = build(LLAMA)
    step(net)
    copies = net.weight_copies.copies
    before = {name: copies[p].clone() for name, p in net.named_parameters() if p in copies}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    optimizer.step()
    net.weight_copies.is_stale = True
    step(net)
    for name, parameter in net.named_parameters():
        if parameter in copies:
            assert torch.equal(copies[parameter], parameter.detach().bfloat16()), name
            assert not torch.equal(copies[parameter], before[name]), name

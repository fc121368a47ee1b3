"""Activation checkpointing changes the saved tensors, not the results."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.measure.memory_tracker import PeakTracker
from meshwright.models.block_backend import compile_blocks
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill
from meshwright.models.weight_source import RandomWeights
from meshwright.spec.model import DecoderModel
from model_shapes import GPT_PARTS

SHAPE = DecoderModel(num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=50)
GPT = DecoderModel(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    ffn_size=128,
    vocab_size=50,
    max_positions=16,
    tied_embeddings=True,
    **GPT_PARTS,
)


def step(model: DecoderModel, recompute: str, compiled: bool = False, low: bool = False):
    """Loss, gradients and saved bytes of one step."""
    net = Decoder(model, 16, 8, recompute)
    weights = RandomWeights(dataclasses.replace(model, init_std=0.2), 0)
    fill(net, [name for name, _ in net.named_parameters()], weights, torch.device("cpu"))
    if compiled:
        compile_blocks(net, backend="aot_eager")
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(1))
    with PeakTracker([*net.parameters(), *net.buffers()]) as tracker:
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        before = tracker.live_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = net(inputs, targets)
        kept = tracker.live_bytes - before
        loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}, kept


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", [SHAPE, GPT], ids=["llama", "gpt"])
def test_every_mode_is_bit_identical_and_saves_less(model, low):
    loss, gradients, kept = step(model, "none", low=low)
    sizes = [kept]
    for mode in ("selective", "full"):
        again, regained, kept = step(model, mode, low=low)
        assert again == loss
        for name, gradient in gradients.items():
            assert torch.equal(gradient, regained[name]), f"{mode}: {name}"
        sizes.append(kept)
    assert sizes[0] > sizes[1] > sizes[2]


def test_selective_recomputes_no_gemm():
    """Each GEMM of the forward pass of a block runs once. With ``full`` all but the last run twice."""
    flops = {}
    for mode in ("none", "selective", "full"):
        with FlopCounterMode(display=False) as counter:
            step(SHAPE, mode)
        flops[mode] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert flops["selective"] == flops["none"]
    attention = 2 * (SHAPE.query_size + SHAPE.kv_size) * SHAPE.hidden_size
    again = attention + 2 * SHAPE.hidden_size * SHAPE.ffn_size
    assert flops["full"] == flops["none"] + SHAPE.num_layers * 2 * 4 * 16 * again


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_match_eager_in_every_mode(mode):
    """The compile backend is ``aot_eager``."""
    torch.compiler.reset()
    loss, gradients, _ = step(SHAPE, "none")
    again, regained, _ = step(SHAPE, mode, compiled=True)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(regained[name], gradient, rtol=1e-4, atol=1e-5)

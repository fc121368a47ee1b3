"""Mixture of experts against a dense reference that runs every token through every expert."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from meshwright.layout.parameters import list_parameters
from meshwright.models.decoder import Decoder
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.routing import AuxiliaryLosses, Tokens, queue_positions
from meshwright.spec.model import DecoderModel

MODEL = DecoderModel(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    ffn_size=24,
    vocab_size=32,
    num_experts=4,
    experts_per_token=2,
)
BATCH, LENGTH = 3, 8


def model_with(**changes):
    """The model with changed fields."""
    return dataclasses.replace(MODEL, **changes)


def randomize(module, seed=0):
    """Fill the parameters of a module with random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def build_moe(model):
    """An MoE layer with random weights."""
    return randomize(MixtureOfExperts(model))


def residual(seed=1):
    """A random residual stream."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, MODEL.hidden_size, generator=generator, requires_grad=True)


def one_expert(layer, model, number, x):
    """One expert on all tokens, from its rows of the concatenated weights."""

    def linear(part, x, outer):
        rows = slice(number * outer, (number + 1) * outer)
        expert_linear = getattr(layer.experts, part)
        return functional.linear(
            x, expert_linear.weight[rows], None if expert_linear.bias is None else expert_linear.bias[rows]
        )

    up = linear("up", x, model.expert_width)
    inner = (
        functional.silu(linear("gate", x, model.expert_width)) * up
        if model.activation == "swiglu"
        else functional.gelu(up)
    )
    return linear("down", inner, model.hidden_size)


def reference_scores(layer, model, x):
    """Router logits and scores of the reference."""
    logits = x @ layer.router.weight.T
    return logits, logits.softmax(-1) if model.router == "softmax" else logits.sigmoid()


def reference_moe(layer, model, x, capacity=None, bias=0.0):
    """The output of the reference, the chosen experts and the dropped pairs."""
    _, scores = reference_scores(layer, model, x)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(
        -1, (scores + bias).topk(model.experts_per_token, dim=-1).indices, True
    )
    weights = torch.where(chosen, scores, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    earlier = chosen.long().cumsum(1) - chosen.long()
    dropped = chosen & (earlier >= capacity) if capacity is not None else torch.zeros_like(chosen)
    out = sum(
        torch.where(dropped[..., e], 0.0, weights[..., e]).unsqueeze(-1) * one_expert(layer, model, e, x)
        for e in range(model.num_experts)
    )
    if layer.shared is not None:
        out = out + layer.shared(x)
    return out, chosen, dropped


def sample_weights(share):
    """Equal shares of the batch for all sequences, without padding."""
    return torch.tensor([[share, LENGTH]] * BATCH)


def gradients_of(layer, x, out):
    """The gradients of the input and of all parameters."""
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(out.square().sum(), [x, *parameters.values()])
    return dict(zip(["x", *parameters], found, strict=True))


SHAPES = {
    "plain": {},
    "sigmoid": {"router": "sigmoid"},
    "shared": {"shared_experts": 2, "expert_ffn_size": 20},
    "gelu with biases": {"activation": "gelu", "ffn_bias": True},
    "swiglu with biases": {"ffn_bias": True},
    "one expert per token": {"experts_per_token": 1},
    "all experts": {"experts_per_token": 4},
    "dropping": {"capacity_factor": 0.6},
    "hardly dropping": {"capacity_factor": 1.3, "router": "sigmoid"},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_output_and_gradients_match_the_reference(changes):
    """The cases include layers with and without a capacity."""
    model = model_with(**changes)
    layer, x = build_moe(model), residual()
    capacity = None
    if model.capacity_factor:
        capacity = math.ceil(model.capacity_factor * LENGTH * model.experts_per_token / model.num_experts)
    expected, _, dropped = reference_moe(layer, model, x, capacity)
    found = layer(x, sample_weights(1 / BATCH))
    assert dropped.any() == (model.capacity_factor is not None), "the case drops tokens as intended"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = gradients_of(layer, x, expected)
    for name, gradient in gradients_of(layer, x, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


def test_generation_ignores_the_capacity():
    model = model_with(capacity_factor=0.25)
    layer, x = build_moe(model), residual()
    torch.testing.assert_close(layer(x), reference_moe(layer, model, x)[0], rtol=1e-5, atol=1e-5)


def test_capacity_applies_per_sequence_and_drops_its_last_tokens():
    """The routing of a sequence does not depend on the other sequences of its micro-batch."""
    layer, x = build_moe(model_with(capacity_factor=0.6)), residual()
    together = layer(x, sample_weights(1.0))
    for row in range(BATCH):
        alone = layer(x[row : row + 1], sample_weights(1.0)[:1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
    experts = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1], [1, 2], [2, 0]])
    places = queue_positions(torch.tensor([0, 0, 0, 1, 1, 1]), experts, 3)
    assert places.tolist() == [[0, 0], [1, 1], [2, 0], [0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("balance", "z"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_auxiliary_losses_have_the_gradients_of_their_formulas(router, balance, z):
    """The reference is autograd of the explicit losses.

    The second sequence ends with padding, the third is a zero-weight sample.
    """
    model = model_with(router=router)
    layer, x = build_moe(model), residual()
    weights, lengths = torch.tensor([0.25, 0.25, 0.0]), torch.tensor([LENGTH, LENGTH - 2, 0])
    given = torch.stack((weights, lengths), dim=1)
    plain = gradients_of(layer, x, layer(x, given))
    scale = torch.tensor(8.0)
    layer.router.auxiliary = AuxiliaryLosses(balance, z, lambda: scale)
    layer.router.load, layer.router.is_counting = torch.zeros(7, dtype=torch.float64), True
    found = gradients_of(layer, x, layer(x, given))
    logits, scores = reference_scores(layer, model, x)
    probabilities = scores / scores.sum(-1, keepdim=True)
    _, chosen, _ = reference_moe(layer, model, x)
    real = (torch.arange(LENGTH) < lengths.unsqueeze(1)).unsqueeze(-1) / lengths.clamp(min=1).view(-1, 1, 1)
    frequency = (chosen * real).sum(1) / model.experts_per_token
    balances = model.num_experts * (frequency * (probabilities * real).sum(1)).sum(-1)
    zs = (logits.logsumexp(-1, keepdim=True).square() * real).sum((1, 2))
    loss = (weights * (balance * balances + z * zs)).sum()
    extra = torch.autograd.grad(loss, [x, layer.router.weight])
    for name, expected in zip(("x", "router.weight"), extra, strict=True):
        torch.testing.assert_close(found[name] - plain[name], scale * expected, rtol=1e-3, atol=2e-5)
    values = [(weights * balances).sum().item() if balance else 0, (weights * zs).sum().item() if z else 0]
    counts = (chosen & (real > 0)).sum((0, 1))
    assert layer.router.load[: model.num_experts].tolist() == counts.tolist(), "padding is not counted"
    assert layer.router.load[5:].tolist() == pytest.approx(values, rel=1e-5)
    for name in plain:
        if name not in ("x", "router.weight"):
            torch.testing.assert_close(found[name], plain[name], msg=name)


def test_selection_bias_changes_experts_but_not_weights():
    layer, x = build_moe(MODEL), residual()
    layer.router.selection_bias = torch.tensor([0.0, 5.0, 0.0, 0.0])
    expected, chosen, _ = reference_moe(layer, MODEL, x, bias=layer.router.selection_bias)
    assert chosen[..., 1].all(), "every token chooses the favoured expert"
    torch.testing.assert_close(layer(x, sample_weights(1.0)), expected, rtol=1e-5, atol=1e-5)


def test_expert_without_tokens_has_a_zero_gradient():
    layer, x = build_moe(model_with(ffn_bias=True)), residual()
    layer.router.choose = lambda scores, chosen: torch.tensor([0, 2]).expand_as(chosen)
    layer(x, sample_weights(1.0)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
    rows = layer.experts.up.weight.grad.view(4, -1).abs().sum(1)
    assert (rows > 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_top_1_router_has_a_gradient_of_exactly_zero(router):
    """Its weight is 1 for all scores. AdamW would turn a rounding error into a full update."""
    layer = build_moe(model_with(router=router, experts_per_token=1))
    layer(residual(), sample_weights(1.0)).square().sum().backward()
    assert (layer.router.weight.grad == 0).all()


def test_layer_without_tokens_has_gradients():
    """With expert parallel a rank may receive no tokens."""
    layer = build_moe(MODEL)
    out = layer.experts(torch.empty(0, MODEL.hidden_size, requires_grad=True), [0, 0, 0, 0])
    out.sum().backward()
    assert all((p.grad == 0).all() for p in layer.experts.parameters())


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("changes", [{}, {"shared_experts": 1, "capacity_factor": 0.8}])
def test_activation_checkpointing_keeps_results_and_expert_load(recompute, changes):
    """Loss, gradients and the load of each layer are the same.

    Evaluation and zero-weight samples count no load.
    """
    model = model_with(dense_layers=1, num_layers=3, **changes)

    def run(mode):
        decoder = randomize(Decoder(model, LENGTH, recompute=mode))
        loads = []
        for block in decoder.list_blocks():
            if block.is_moe:
                block.ffn.router.auxiliary = AuxiliaryLosses(0.1, 0.1)
                block.ffn.router.load = torch.zeros(7, dtype=torch.float64)
                loads.append(block.ffn.router.load)
        tokens = torch.randint(32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
        batch = (tokens, tokens, None, torch.tensor([[0.5, LENGTH], [0.5, LENGTH], [0.0, 0]]))
        with torch.no_grad():
            decoder(*batch)
        loss = decoder(*batch)
        loss.backward()
        return loss, {n: p.grad for n, p in decoder.named_parameters()}, torch.stack(loads)

    loss, gradients, loads = run("none")
    again, found, counted = run(recompute)
    assert loss == again
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], msg=name)
    assert torch.equal(loads, counted)
    assert loads[:, :4].sum(1).tolist() == [2 * LENGTH * 2] * 2, "two real sequences, two experts per token"
    assert (loads[:, 4] > 0).any() == ("capacity_factor" in changes)


@pytest.mark.parametrize("changes", [{}, {"shared_experts": 1, "ffn_bias": True, "activation": "gelu"}])
def test_moe_parameters_are_the_planned_ones(changes):
    model = model_with(dense_layers=1, **changes)
    listed = [(p.name, p.shape) for p in list_parameters(model)]
    assert [(n, tuple(p.shape)) for n, p in Decoder(model, LENGTH).named_parameters()] == listed


def test_bf16_rounds_gemms_but_not_the_routing():
    model = model_with(shared_experts=1)
    layer, x = build_moe(model), residual()
    exact, choices = layer(x, sample_weights(1.0)), []
    layer.router.choose = lambda scores, chosen: choices.append(chosen) or chosen
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x.bfloat16(), sample_weights(1.0))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=0.05, atol=0.05)
    expected, weight = layer.router(x.bfloat16().flatten(0, 1), None, Tokens()), layer.router.weight
    assert torch.equal(choices[0], expected.experts_NK)
    low.sum().backward()
    assert weight.grad.dtype == torch.float32

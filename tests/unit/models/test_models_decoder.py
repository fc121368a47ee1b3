"""The decoder: planned parameters, initial weights that depend on names only, and its computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.layout.parameters import list_parameters
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill
from meshwright.models.rope import apply_rope, build_rope, scale_rope_frequencies
from meshwright.models.weight_source import RandomWeights, parameter_seed
from meshwright.parallel.build import build_model
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel
from model_shapes import GPT_PARTS


def small(**changes) -> DecoderModel:
    fields = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48}
    return DecoderModel(**{**fields, "vocab_size": 50, **changes})


def built(model: DecoderModel, seed: int = 0) -> Decoder:
    net = Decoder(model, 16)
    draw_into(net, model, seed)
    return net


def draw_into(net: Decoder, model: DecoderModel, seed: int) -> None:
    fill(net, [name for name, _ in net.named_parameters()], RandomWeights(model, seed), torch.device("cpu"))


GPT = {**GPT_PARTS, "num_kv_heads": 4, "max_positions": 24, "tied_embeddings": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"head_dim": 12},
        GPT,
        {"norm": "layer"},
        {"activation": "gelu", "ffn_bias": True},
        {"attention_bias": True},
        {"positions": "learned", "max_positions": 16},
    ],
    ids=str,
)
def test_decoder_parameters_are_the_planned_ones_in_order(changes):
    """layout.parameters lists, without torch, exactly the parameters that torch registers."""
    model = small(**changes)
    planned = [(p.name, p.shape) for p in list_parameters(model)]
    assert [(n, tuple(p.shape)) for n, p in Decoder(model, 16).named_parameters()] == planned


def test_initial_weights_depend_on_seed_and_name_only():
    """Other parameters and their order do not change the initial values of a parameter."""
    deep, shallow = built(small(num_layers=4)), built(small(num_layers=1))
    torch.testing.assert_close(
        deep.blocks["0"].ffn.up.weight, shallow.blocks["0"].ffn.up.weight, rtol=0, atol=0
    )
    assert not torch.equal(deep.blocks["0"].ffn.up.weight, deep.blocks["1"].ffn.up.weight)
    assert not torch.equal(built(small(), seed=1).embed.weight, built(small(), seed=2).embed.weight)


def test_initial_weights_are_frozen():
    """The generator's seed is part of the contract. A change would silently change every run."""
    assert parameter_seed(0, "embed.weight") == 922937692374169618
    expected = [0.009152090176939964, -0.002937102457508445, -0.01635526679456234]
    assert built(small()).embed.weight.flatten()[:3].tolist() == pytest.approx(expected, rel=1e-6)


def test_initialization_does_not_use_the_global_random_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = small()
    net = Decoder(model, 16)
    torch.set_rng_state(before)
    draw_into(net, model, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_is_causal():
    net = built(small())
    tokens = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50
    torch.testing.assert_close(net(tokens)[0, :10], net(changed)[0, :10])
    assert not torch.allclose(net(tokens)[0, 10:], net(changed)[0, 10:])


def test_grouped_query_attention_equals_repeated_kv_heads():
    """Two query heads on one key-value head equal two copies of that head."""
    grouped, full = small(num_kv_heads=2), small(num_kv_heads=4)
    one, other = built(grouped), built(full)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            source = dict(one.named_parameters())[name]
            if ".wk." in name or ".wv." in name:
                source = source.view(2, 8, -1).repeat_interleave(2, dim=0).reshape(parameter.shape)
            parameter.copy_(source)
    tokens = torch.arange(16).view(1, 16)
    torch.testing.assert_close(one(tokens), other(tokens))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 11))
def test_rope_scores_depend_on_distance_only(i, j, shift):
    cos, sin = build_rope(small(), torch.arange(64))
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def product(a: int, b: int) -> float:
        return float(
            (
                apply_rope(q, cos[a : a + 1], sin[a : a + 1]) * apply_rope(k, cos[b : b + 1], sin[b : b + 1])
            ).sum()
        )

    assert product(i, j) == pytest.approx(product(i + shift, j + shift), abs=1e-4)


def test_loss_is_a_sum_without_ignored_targets():
    net = built(small())
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(2))
    whole = net(tokens, targets)
    parts = net(tokens[:1], targets[:1]) + net(tokens[1:], targets[1:])
    torch.testing.assert_close(whole, parts)
    targets[1] = IGNORE_INDEX
    torch.testing.assert_close(net(tokens, targets), net(tokens[:1], targets[:1]))
    nothing = net(tokens, torch.full_like(targets, IGNORE_INDEX))
    assert nothing.item() == 0.0
    nothing.backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in net.parameters()), (
        "zero-weight samples have no gradient"
    )


def test_tied_head_uses_the_embedding_weight():
    net = built(small(tied_embeddings=True))
    assert net.head.weight is net.embed.weight
    assert sum(p.numel() for p in net.parameters()) == sum(
        p.count for p in list_parameters(small(tied_embeddings=True))
    )


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "learned", "max_positions": 16}], ids=["rope", "learned"]
)
def test_packed_documents_have_the_losses_of_separate_ones(changes):
    """With the document mask no document attends to another and positions restart."""
    net = built(small(**changes))
    documents = [torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 4, 5)]
    packed = torch.cat(documents).view(1, -1)
    targets = (packed + 1) % 50
    segments = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)]).view(1, -1)
    together = net(packed, targets, segments)
    together.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    alone = sum(net(d.view(1, -1), ((d + 1) % 50).view(1, -1)) for d in documents)
    alone.backward()
    torch.testing.assert_close(together, alone)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(net(packed, targets), alone), "without the mask documents attend to each other"


def test_biases_start_at_zero_and_norms_at_one():
    net = built(small(**GPT))
    assert not net.blocks["0"].attention.wq.bias.any()
    assert not net.norm.bias.any()
    assert (net.norm.weight == 1).all()


def test_low_rope_frequencies_are_scaled_and_high_ones_are_not():
    """Llama 3.1 divides frequencies below the low factor and keeps those above the high one."""
    plain, longer = small(head_dim=8), small(head_dim=8, rope_factor=8.0, rope_original_positions=64)
    frequencies = torch.tensor([1.0, 0.2, 0.01, 0.0001], dtype=torch.float64)
    scaled = scale_rope_frequencies(longer, frequencies)
    assert torch.equal(scale_rope_frequencies(plain, frequencies), frequencies)
    assert scaled[0] == 1.0
    assert scaled[3] == pytest.approx(0.0001 / 8)
    assert 0.2 / 8 < scaled[1] < 0.2


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_packed_rows_of_a_dataset_train_as_separate_documents(positions, tmp_path):
    """Loss and gradients of packed rows equal those of one document per row."""
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path, ByteTokenizer(), has_loss_mask=True) as writer:
        for size in (5, 3, 20, 1, 9, 12, 2):
            marks = (np.arange(size) >= size // 2).astype(np.uint8)
            writer.add("train", rng.integers(0, 256, size), marks)
        writer.finish()
    packed = TokenDataset.open(tmp_path, "train", 16, "document", prompt_masking=True).read([0, 1, 2, 3])
    assert packed.segments.max() >= 2, "several documents share a row"
    learned = ["model.positions=learned", "model.max_positions=16"] if positions == "learned" else []
    job = load_job("tiny", ["data.seq_len=16", *learned])
    losses, gradients = [], []
    for alone in (False, True):
        net = build_model(job, torch.device("cpu"))
        rows = [(packed.tokens, packed.targets, packed.segments)]
        if alone:
            pieces = [
                (row, packed.segments[row] == number)
                for row in range(len(packed.tokens))
                for number in range(packed.segments[row].max() + 1)
            ]
            rows = [(packed.tokens[r][None, at], packed.targets[r][None, at]) for r, at in pieces]
        loss = sum(net(*map(torch.from_numpy, arrays)) for arrays in rows)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5, msg=name)

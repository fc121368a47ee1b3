"""Parameter counts equal the published ones; buckets are an exact, ordered partition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.units import MIB
from meshwright.layout.ddp_buckets import bucket_parameters
from meshwright.layout.flops import flops_per_token
from meshwright.layout.parameters import (
    Parameter,
    count_active_matmul_parameters,
    count_active_parameters,
    count_matmul_parameters,
    count_parameters,
    list_parameters,
)
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel
from meshwright.spec.presets import preset_names

PUBLISHED = {
    "llama1-7b": 6_738_415_616,
    "llama1-13b": 13_015_864_320,
    "llama1-33b": 32_528_943_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
}
"""Parameters as the weights on the Hugging Face hub have them."""
ABOUT = {
    "gpt3-175b": (174.6e9, None),
    "gpt-22b": (22e9, None),
    "gpt-530b": (529.6e9, None),
    "gpt-1t": (1008.0e9, None),
    "bloom-176b": (176_247_271_424, None),
    "mpt-7b": (6_649_286_656, None),
    "mpt-30b": (29.96e9, None),
    "nemotron-340b": (341e9, None),
    "mixtral-8x22b": (140.6e9, 39e9),
    "deepseek-v2": (235.7e9, 21e9),
    "deepseek-v3": (671e9, 37e9),
    "kimi-k2": (1.026e12, 32e9),
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-235b-a22b": (235.1e9, 22e9),
    "gpt-oss-120b": (116.83e9, None),
}
"""Published parameters, in all and for each token, to the digits of the source: GPT-3 in Narayanan et al.
2021, whose vocabulary is padded; 22B, 530B and 1T there and in Korthikanti et al. 2022; the others as their
authors or their weights have them."""
OWN = {"demo-2m", "tiny", "gpt-130b", "resnet-tiny", "resnet18", "resnet50"}
"""Presets that nobody published as a decoder of this count; see the tests of their own."""

models = st.builds(
    DecoderModel,
    num_layers=st.integers(1, 4),
    hidden_size=st.integers(1, 48),
    num_heads=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    ffn_size=st.integers(1, 64),
    vocab_size=st.integers(1, 100),
    head_dim=st.integers(1, 16),
    tied_embeddings=st.booleans(),
)


def preset(name: str) -> DecoderModel:
    return load_job(name, on="h100-sxm", to_run=False).model


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_preset_parameter_counts_equal_the_published_ones(name, count):
    assert count_parameters(preset(name)) == count


@pytest.mark.parametrize("name", ABOUT)
def test_preset_parameter_counts_are_within_a_percent_of_the_published_ones(name):
    """Parameters that are not modelled (query norms, sinks, router biases) are fewer than that.

    Those for each token are published to two digits, and some count the input embedding, so within 3%.
    """
    total, active = ABOUT[name]
    assert count_parameters(preset(name)) == pytest.approx(total, rel=0.01)
    if active is not None:
        assert count_active_parameters(preset(name)) == pytest.approx(active, rel=0.03)


def test_gpt_oss_counts_its_active_parameters_without_the_input_embedding():
    """OpenAI publishes 5.1 billion and does not count the embedding, whose rows are looked up."""
    assert count_active_matmul_parameters(preset("gpt-oss-120b")) == pytest.approx(5.13e9, rel=0.01)


def test_the_130_billion_gpt_follows_the_published_formula():
    """Narayanan et al. 2021: 12 L D^2 (1 + 13 / 12 D + (V + S) / 12 L D)."""
    layers, width, vocab, positions = 70, 12288, 51200, 2048
    scale = 1 + 13 / (12 * width) + (vocab + positions) / (12 * layers * width)
    assert count_parameters(preset("gpt-130b")) == pytest.approx(12 * layers * width**2 * scale, rel=1e-6)


def test_every_preset_has_a_published_count():
    assert set(preset_names("models")) == {*PUBLISHED, *ABOUT, *OWN}


@given(
    st.builds(
        DecoderModel,
        num_layers=st.integers(1, 4),
        hidden_size=st.integers(1, 48),
        num_heads=st.integers(1, 4),
        num_kv_heads=st.integers(1, 4),
        ffn_size=st.integers(1, 64),
        vocab_size=st.integers(1, 100),
        head_dim=st.integers(1, 16),
        ffn_bias=st.booleans(),
        activation=st.sampled_from(["swiglu", "gelu"]),
        num_experts=st.integers(2, 8),
        experts_per_token=st.integers(1, 2),
        expert_ffn_size=st.none() | st.integers(1, 32),
        shared_experts=st.integers(0, 2),
        dense_layers=st.integers(0, 1),
        tied_embeddings=st.booleans(),
    )
)
def test_total_and_active_parameters_of_experts_are_counted(model):
    """Experts, shared experts and a router replace the feed-forward of a dense layer."""
    dense = dataclasses.replace(
        model,
        num_experts=None,
        experts_per_token=None,
        expert_ffn_size=None,
        shared_experts=0,
        dense_layers=0,
    )
    matrices, width = (3 if model.activation == "swiglu" else 2), model.hidden_size

    def feed_forward(ffn: int) -> int:
        return matrices * width * ffn + model.ffn_bias * ((matrices - 1) * ffn + width)

    ffn, layers = model.expert_width, model.num_layers - model.dense_layers
    shared = feed_forward(model.shared_experts * ffn) if model.shared_experts else 0
    for count, experts in (
        (count_parameters, model.num_experts),
        (count_active_parameters, model.experts_per_token),
    ):
        grown = (
            experts * feed_forward(ffn) + shared + model.num_experts * width - feed_forward(model.ffn_size)
        )
        assert count(model) == count_parameters(dense) + layers * grown
    assert count_active_matmul_parameters(model) - count_matmul_parameters(model) == (
        count_active_parameters(model) - count_parameters(model)
    )
    assert count_active_matmul_parameters(dense) == count_matmul_parameters(dense)


@pytest.mark.parametrize("queries", [None, 24])
def test_latent_attention_has_the_matrices_of_its_paper(queries):
    model = DecoderModel(
        num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=4, ffn_size=1, vocab_size=1, head_dim=16,
        attention="latent", latent_size=32, query_latent_size=queries, rope_head_dim=8, value_head_dim=12,
    )  # fmt: skip
    shapes = {p.name.split(".", 3)[3]: p.shape for p in list_parameters(model) if ".attention." in p.name}
    query = {"wq.weight": (96, 64)}
    if queries:
        query = {"q_down.weight": (24, 64), "q_norm.weight": (24,), "q_up.weight": (96, 24)}
    assert shapes == {
        **query,
        "kv_down.weight": (40, 64),
        "kv_norm.weight": (32,),
        "kv_up.weight": (4 * (16 + 12), 32),
        "wo.weight": (64, 48),
    }


@given(models)
def test_parameter_count_follows_the_formula(model):
    """2 VD (VD if tied) + L (2 DQ + 2 DK + 3 DF + 2 D) + D."""
    width, queries, keys = model.hidden_size, model.query_size, model.kv_size
    block = 2 * width * queries + 2 * width * keys + 3 * width * model.ffn_size + 2 * width
    heads = 1 if model.tied_embeddings else 2
    total = heads * model.vocab_size * width + model.num_layers * block + width
    assert count_parameters(model) == total
    assert count_matmul_parameters(model) == total - (heads - 1) * model.vocab_size * width


@given(models)
def test_names_are_unique_and_a_tied_head_is_not_listed(model):
    names = [p.name for p in list_parameters(model)]
    assert len(names) == len(set(names)) == 9 * model.num_layers + 2 + (not model.tied_embeddings)
    assert ("head.weight" in names) == (not model.tied_embeddings)
    assert names[0] == "embed.weight"


def test_flops_of_a_token_equal_the_hand_computed_value():
    """llama3-8b at 4,096: 6 x (8,030,261,248 - 525,336,576) + 6 x 4,096 x 4,096 x 32."""
    assert flops_per_token(preset("llama3-8b"), 4096) == 45_029_548_032 + 3_221_225_472


def test_flops_of_a_tied_model_count_the_head_and_only_once():
    """The tiny model at 32: 6 x 94,528 (the embedding is the head) + 6 x 32 x 64 x 2."""
    assert flops_per_token(preset("tiny"), 32) == 567_168 + 24_576


def test_only_attention_flops_depend_on_the_sequence_length():
    model = preset("llama3-8b")
    at = {n: flops_per_token(model, n) for n in (1024, 2048, 4096)}
    assert at[4096] - at[2048] == 2 * (at[2048] - at[1024])


parameters = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=40).map(
    lambda sizes: [Parameter(f"p{i}", (size,)) for i, size in enumerate(sizes)]
)


@given(parameters, st.floats(1e-6, 20))
@example([Parameter("p0", (MIB // 4,))], 1.0)
def test_buckets_hold_every_parameter_once_in_reverse_order_and_close_at_the_cap(listed, bucket_mb):
    buckets = bucket_parameters(listed, bucket_mb)
    assert list(itertools.chain(*buckets)) == [p.name for p in reversed(listed)]
    size = {p.name: 4 * p.count for p in listed}
    cap = int(bucket_mb * MIB)
    for bucket in buckets[:-1]:
        assert sum(size[n] for n in bucket) >= cap, "a bucket closes only when the cap is reached"
    for bucket in buckets:
        assert bucket, "no bucket is empty"
        assert sum(size[n] for n in bucket[:-1]) < cap or len(bucket) == 1, (
            "a bucket closes as soon as the cap is reached"
        )


def test_bucket_filled_exactly_is_closed():
    listed = [Parameter(name, (MIB // 4,)) for name in "abc"]
    assert bucket_parameters(listed, 1.0) == [["c"], ["b"], ["a"]]
    assert bucket_parameters(listed, 2.0) == [["c", "b"], ["a"]]
    assert bucket_parameters(listed, 100.0) == [["c", "b", "a"]]


@settings(max_examples=30)
@given(models, st.floats(0.001, 1.0))
def test_buckets_depend_on_the_model_only(model, bucket_mb):
    """A resumed run has the same buckets."""
    listed = list_parameters(model)
    assert bucket_parameters(listed, bucket_mb) == bucket_parameters(list(listed), bucket_mb)

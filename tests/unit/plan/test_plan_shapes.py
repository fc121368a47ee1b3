"""Parameters: counts equal the published ones; buckets are an exact, ordered partition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.units import MIB
from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.compute import flops_per_token
from meshwright.plan.shapes import Parameter, count_matmul_parameters, count_parameters, list_parameters
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
"""Parameters as the weights on the Hugging Face hub have them."""

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
    return load_job(name, on="h100-sxm").model


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_of_a_preset_are_as_many_as_published(name, count):
    assert count_parameters(preset(name)) == count


@given(models)
def test_the_count_follows_the_formula(model):
    """2 VD (1 if tied) + L (2 DQ + 2 DK + 3 DF + 2 D) + D."""
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


def test_attention_is_linear_in_the_sequence_and_the_rest_does_not_depend_on_it():
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
        assert sum(size[n] for n in bucket[:-1]) < cap or len(bucket) == 1, "and closes at once"


def test_a_bucket_that_is_filled_exactly_is_closed():
    listed = [Parameter(name, (MIB // 4,)) for name in "abc"]
    assert bucket_parameters(listed, 1.0) == [["c"], ["b"], ["a"]]
    assert bucket_parameters(listed, 2.0) == [["c", "b"], ["a"]]
    assert bucket_parameters(listed, 100.0) == [["c", "b", "a"]]


@settings(max_examples=30)
@given(models, st.floats(0.001, 1.0))
def test_buckets_depend_on_the_model_alone(model, bucket_mb):
    """A resumed run cuts its sums as the first one did."""
    listed = list_parameters(model)
    assert bucket_parameters(listed, bucket_mb) == bucket_parameters(list(listed), bucket_mb)

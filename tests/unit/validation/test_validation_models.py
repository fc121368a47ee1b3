"""Components of a published model: chosen by its parameter count if that decides, otherwise by its name."""

from __future__ import annotations

import pytest

from meshwright.layout.parameters import list_parameters
from meshwright.plan.estimate.weights import count_elements
from meshwright.spec.load import build_job
from meshwright.spec.presets import preset_names

LLAMA = {
    "model_name": "Llama-3-8B", "params_b": "8.03", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192",
}  # fmt: skip
SMALL = {
    **LLAMA, "model_name": "Llama-3.2-1B", "params_b": "1.24", "layers": "16", "hidden": "2048",
    "ffn_hidden": "8192",
}  # fmt: skip
DEEPSEEK = {
    "model_name": "DeepSeekV3 (w/o MTP)", "params_b": "671", "layers": "61", "hidden": "7168", "heads": "128",
    "kv_heads": "128", "ffn_hidden": "18432", "vocab": "129280", "experts": "256", "top_k": "8",
    "shared_experts": "1", "moe_ffn": "2048", "dense_layers": "3", "attention": "mla",
    "source": "Megatron-Bridge",
}  # fmt: skip
OSS = {
    "model_name": "GPT OSS 120B", "params_b": "117", "layers": "36", "hidden": "2880", "heads": "64",
    "kv_heads": "8", "ffn_hidden": "2880", "vocab": "201088", "experts": "128", "top_k": "4",
    "moe_ffn": "2880", "attention": "gqa+sliding128/2",
}  # fmt: skip
GPT3 = {
    "model_name": "GPT-174.6B", "params_b": "174.6", "layers": "96", "hidden": "12288", "heads": "96",
    "kv_heads": "96", "ffn_hidden": "49152",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "activation", "tied"),
    [
        ({}, "gelu", True),  # a GPT by name, which 3.6 confirms
        ({"params_b": "3.76"}, "gelu", False),  # head and embedding are separate
        (LLAMA, "swiglu", False),
        (SMALL, "swiglu", True),  # 1.24 counts the embedding once
        ({"model_name": "Homemade", "params_b": "3.55"}, "gelu", True),
        ({"model_name": "Homemade", "params_b": "4.85", "ffn_hidden": "12288"}, "swiglu", False),
        ({"model_name": "Nemotron-22B", "params_b": "22", "layers": "40", "hidden": "6144", "heads": "48",
          "kv_heads": "48", "ffn_hidden": "24576", "vocab": "256000"}, "gelu", False),
    ],
)  # fmt: skip
def test_parameter_count_decides_activation_and_tied_embeddings(case, cells, activation, tied):
    model = case(**cells).workload.model
    assert (model.activation, model.tied_embeddings) == (activation, tied)


def test_choice_against_the_name_is_listed(case):
    listed = [text for text in case(params_b="3.76").filled if "params_b" in text]
    assert listed == ["from params_b=3.76: ungated feed-forward, untied embeddings"]
    assert case().filled == ()


@pytest.mark.parametrize(
    ("cells", "billions"), [(LLAMA, 8.03), (SMALL, 1.24), (DEEPSEEK, 671), (OSS, 117), (GPT3, 174.6)]
)
def test_parameter_counts_equal_the_published_ones(case, cells, billions):
    """The references are the figures of the models' authors."""
    assert count_elements(case(**cells).workload.model) / 1e9 == pytest.approx(billions, rel=0.006)


@pytest.mark.parametrize(
    "preset", ["llama3-8b", "llama3.2-1b", "gpt-22b", "mixtral-8x7b", "deepseek-v2", "gpt-oss-120b"]
)
def test_parameter_count_equals_the_sum_of_shapes(preset):
    data, train = {"path": "text", "seq_len": 64}, {"steps": 1, "global_batch": 1}
    cluster = {"preset": "h100-sxm"}
    model = build_job(
        {"model": {"preset": preset}, "cluster": cluster, "data": data, "train": train}, to_run=False
    ).model
    exact = sum(parameter.count for parameter in list_parameters(model))
    assert count_elements(model) == pytest.approx(exact, rel=5e-4), "expert biases are not counted"


def test_latent_attention_experts_and_windows_are_parsed(case):
    deep, oss = case(**DEEPSEEK).workload.model, case(**OSS).workload.model
    assert (deep.attention, deep.latent_size, deep.num_layers, deep.dense_layers) == ("latent", 512, 61, 3)
    assert (oss.window, oss.window_every, oss.head_size, oss.experts_per_token) == (128, 2, 64, 4)


def test_multi_token_prediction_adds_a_layer(case):
    named = {**DEEPSEEK, "model_name": "DeepSeekV3"}
    assert case(**{**named, "note": "with MTP"}).workload.model.num_layers == 62
    assert case(**{**named, "note": "without MTP"}).workload.model.num_layers == 61
    assert case(**named).workload.model.num_layers == 61, "the source does not decide"


def test_experts_on_every_second_layer_are_read_from_column_or_note(case):
    every = {**DEEPSEEK, "model_name": "Maverick", "layers": "48", "dense_layers": ""}
    assert case(**{**every, "moe_every": "2"}).workload.model.expert_layers == 24
    found = case(**{**every, "note": "MoE every 2 layers"})
    assert found.workload.model.expert_layers == 24
    assert any("24 dense layers" in text for text in found.filled)


def test_token_dropping_is_a_capacity_factor(case):
    name = {"model_name": "Qwen3_30B_a3B (tokendrop)", "params_b": "30.5", "layers": "48", "hidden": "2048",
            "heads": "32", "kv_heads": "4", "ffn_hidden": "768", "vocab": "151936", "experts": "128",
            "top_k": "8", "moe_ffn": "768"}  # fmt: skip
    model = case(**name).workload.model
    assert (model.capacity_factor, model.head_size) == (1.0, 128)


def test_missing_sizes_get_listed_defaults(case):
    found = case(heads="", kv_heads="", ffn_hidden="", vocab="", params_b="")
    model = found.workload.model
    assert (model.num_heads, model.num_kv_heads, model.ffn_size, model.vocab_size) == (24, 24, 12288, 51200)
    assumed = [text.removeprefix("assumed ").partition("=")[0] for text in found.filled]
    assert assumed == ["heads", "ffn_hidden", "kv_heads", "vocab"]


NO_SHAPE = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "params_b"), "")


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("Llama 2 7B", "llama2-7b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Llama 3.3 70B", "llama3-70b"),
        ("LLaMA-65B", "llama1-65b"),
        ("GPT-175B", "gpt3-175b"),
        ("BLOOM", "bloom-176b"),
        ("DeepSeek-V3 671B", "deepseek-v3"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_usual_spellings_of_a_preset_are_recognized(case, written, preset):
    assert f"dimensions of the preset {preset}" in case(model_name=written, **NO_SHAPE).filled


def test_every_decoder_preset_is_found_by_its_own_name(case):
    names = [name for name in preset_names("models") if not name.startswith("resnet")]
    for name in names:
        assert f"dimensions of the preset {name}" in case(model_name=name, **NO_SHAPE, tp="1", dp="64").filled


def test_a_preset_has_its_experts_its_attention_and_its_activation(case):
    """Its name alone says what a row leaves blank: Mixtral is no dense model of its width."""
    mixtral, deepseek, gpt = (
        case(model_name=name, **NO_SHAPE).workload.model
        for name in ("Mixtral 8x7B", "DeepSeek-V3", "GPT-3 175B")
    )
    assert (mixtral.num_experts, mixtral.experts_per_token) == (8, 2)
    assert (deepseek.attention, deepseek.num_experts, deepseek.dense_layers) == ("latent", 256, 3)
    assert (gpt.activation, gpt.positions, gpt.max_positions) == ("gelu_tanh", "learned", 2048)


def test_cells_replace_the_numbers_of_a_preset(case):
    shortened = {**NO_SHAPE, "layers": "4", "vocab": "32000"}
    model = case(model_name="DeepSeek-V3", **shortened, note="with MTP").workload.model
    assert (model.num_layers, model.vocab_size, model.num_experts) == (5, 32000, 256)


def test_sliding_window_is_read_from_the_attention(case):
    assert case(attention="gqa, SWA 4096").workload.model.window == 4096


def test_preset_name_gives_missing_dimensions(case, read):
    blank = {
        "layers": "",
        "hidden": "",
        "heads": "",
        "kv_heads": "",
        "ffn_hidden": "",
        "vocab": "",
        "params_b": "",
    }
    assert case(model_name="Llama-3.1-70B", **blank).workload.model.num_layers == 80
    assert read(model_name="nobody knows", **blank).reason == "hidden not published"


@pytest.mark.parametrize(
    "name", ["Nemotron-H 56B", "Nemotron_3_Nano", "Jamba", "Qwen3-Next-80B", "BERT-large", "ViT"]
)
def test_models_that_are_not_attention_decoders_are_not_expressed(read, name):
    assert read(model_name=name).case is None


def test_nemotron_340b_is_not_taken_for_nemotron_3(case):
    assert case(model_name="Nemotron-340B", params_b="").workload.model.positions == "rope"

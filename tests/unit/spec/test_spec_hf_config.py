"""A Hugging Face config.json becomes a model; unsupported keys are refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.layout.parameters import count_parameters
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.spec.hf_config import check_config, read_config
from meshwright.spec.hf_config_reader import IDLE_VALUES, ROPE_KEYS
from meshwright.spec.load import build_job, load_job
from meshwright.spec.model import DecoderModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 320,
}
KEYS = sorted({*LLAMA, *GPT2, *IDLE_VALUES, *ROPE_KEYS["llama3"], "rope_scaling", "rope_parameters"})
KEYS += ["layer_types", "hidden_act", "activation_function", "attn_pdrop", "tie_word_embeddings", "head_dim"]
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def folder(tmp_path):
    """``folder(config)``: a folder with this config.json. A string is written unchanged."""

    def make(config: dict[str, Any] | str, name: str = "hf") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "config.json").write_text(text)
        return path

    return make


@pytest.fixture
def hf_model(tree, folder):
    """The model of a job that reads this config."""

    def build(config: dict[str, Any], **tables: Any):
        made = tree(**tables)
        made["model"] = {"hf": str(folder(config)), **tables.get("model", {})}
        return build_job(made).model

    return build


@pytest.fixture
def problems(hf_model):
    """The problems of a job that reads this config."""

    def find(config: dict[str, Any], **tables: Any):
        with pytest.raises(UserError) as caught:
            hf_model(config, **tables)
        return caught.value.problems

    return find


def test_llama_config_fields(hf_model):
    model = hf_model({**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    assert (model.num_layers, model.hidden_size, model.ffn_size, model.vocab_size) == (2, 64, 96, 320)
    assert (model.num_heads, model.num_kv_heads, model.head_size) == (4, 2, 16)
    assert (model.attention_bias, model.ffn_bias, model.tied_embeddings) == (True, True, True)
    assert (model.positions, model.norm, model.activation) == ("rope", "rms", "swiglu")
    assert (model.norm_eps, model.rope_theta, model.max_positions) == (1e-6, 10000.0, 512)


PUBLISHED = {
    "Llama 3.1 8B": (
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
        | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072},
        8_030_261_248,
    ),
    "Mistral 7B": (
        MISTRAL
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        }
        | {"num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096},
        7_241_732_096,
    ),
    "GPT-2": (
        GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
}


def test_mixtral_config_fields(tree, folder):
    """Mixtral 8x7B has as many parameters as its preset and the default norm_eps of its class.

    Router jitter is unsupported and refused.
    """
    kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    config = {**PUBLISHED["Mistral 7B"][0], **kind, "sliding_window": None, "num_experts_per_tok": 2}
    made = tree(model={"hf": str(folder(config)), "preset": None})
    model = build_job(made, to_run=False).model
    assert (model.num_experts, model.experts_per_token) == (8, 2)
    assert count_parameters(model) == 46_702_792_704
    folder({key: value for key, value in config.items() if key != "rms_norm_eps"})
    assert build_job(made).model.norm_eps == 1e-5
    folder({**config, "router_jitter_noise": 0.1})
    with pytest.raises(UserError) as caught:
        build_job(made, to_run=False)
    assert [p.code for p in caught.value.problems] == ["model-hf-unsupported"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_parameter_count(hf_model, name):
    config, parameters = PUBLISHED[name]
    assert count_parameters(hf_model(config)) == parameters


def test_absent_keys_have_the_defaults_of_transformers(hf_model):
    plain = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    model = hf_model(plain)
    assert (model.num_kv_heads, model.norm_eps, model.tied_embeddings) == (4, 1e-6, False)
    assert hf_model({**LLAMA, "head_dim": 32}).head_size == 32
    assert hf_model({**LLAMA, "head_dim": 16}).head_dim is None, "hidden_size / num_heads is the default"


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5, "rope_scaling": {**STRETCH, "rope_type": "llama3"}},
        {"rope_theta": 500000, "rope_scaling": {**STRETCH, "type": "llama3"}},
        {"rope_parameters": {**STRETCH, "rope_type": "llama3", "rope_theta": 5e5}},
    ],
    ids=["old", "older", "new"],
)
def test_rope_scaling_is_read_in_all_three_formats(hf_model, form):
    model = hf_model({**LLAMA, **form})
    assert (model.rope_theta, model.rope_factor, model.rope_original_positions) == (5e5, 8.0, 512)
    inner = next(v for v in form.values() if isinstance(v, dict))
    model = hf_model(
        {**LLAMA, **form, "rope_scaling": {**inner, "original_max_position_embeddings": 32}}
        | {"rope_parameters": None}
    )
    assert model.rope_original_positions == 32


def test_gpt2_config_fields(hf_model):
    model = hf_model(GPT2)
    assert (model.positions, model.max_positions, model.norm) == ("learned", 128, "layer")
    assert (model.ffn_size, model.activation, model.tied_embeddings) == (256, "gelu_tanh", True)
    assert model.attention_bias
    assert model.ffn_bias
    assert hf_model({**GPT2, "n_inner": 100, "activation_function": "gelu"}).ffn_size == 100


def test_sliding_window_shorter_than_seq_len_is_refused(hf_model, problems):
    assert hf_model({**MISTRAL, "sliding_window": 32}).num_kv_heads == 2
    assert hf_model({**MISTRAL, "sliding_window": None}, data={"seq_len": 4096}).rope_theta == 1e4
    found = problems({**MISTRAL, "sliding_window": 16})
    assert [(p.code, p.path) for p in found] == [("model-hf-unsupported", "data.seq_len")]
    assert "sliding_window=16" in found[0].rule
    assert problems(MISTRAL, data={"seq_len": 8192})[0].path == "data.seq_len", "the default is 4096"


REFUSED = [
    (LLAMA, {"hidden_act": "gelu"}),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    (LLAMA, {"rope_theta": 1e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    (LLAMA, {"quantization_config": {"bits": 4}}),
    (LLAMA, {"rope_interleaved": True}),
    (LLAMA, {"layer_types": ["sliding_attention", "full_attention"]}),
    (LLAMA, {"partial_rotary_factor": 0.5}),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "own.Own"}}),
    (MISTRAL, {"attention_bias": True}),
    (GPT2, {"scale_attn_weights": False}),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}),
    (GPT2, {"add_cross_attention": True}),
    (GPT2, {"activation_function": "relu"}),
]


@pytest.mark.parametrize(("base", "change"), REFUSED, ids=[str(change) for _, change in REFUSED])
def test_unsupported_config_key_is_refused_by_name(problems, base, change):
    found = problems({**base, **change})
    assert {p.code for p in found} == {"model-hf-unsupported"}
    assert any(key in p.rule for key in change for p in found)


def test_neutral_values_of_unsupported_keys_are_accepted(hf_model):
    idle = {"quantization_config": None, "layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0}
    assert hf_model({**LLAMA, **idle, "rope_interleaved": False, "pretraining_tp": 2}).num_layers == 2


def test_notes_name_dropout_and_unknown_keys(folder):
    config = read_config(folder({**GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.0, "colour": "red", "_x": 1}))
    text = "\n".join(config.notes)
    assert "attn_pdrop=0.1" in text
    assert "resid_pdrop" not in text
    assert "colour" in text
    assert "_x" not in text


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_config_key_is_named(problems, key):
    found = problems({k: v for k, v in LLAMA.items() if k != key})
    assert [p.code for p in found] == ["model-hf-config"]
    assert key in found[0].rule


@pytest.mark.parametrize("value", ["64", 0, True, 1.5, -1])
def test_config_value_of_the_wrong_type_is_named(problems, value):
    found = problems({**LLAMA, "hidden_size": value})
    assert [p.code for p in found] == ["model-hf-config"]
    assert f"hidden_size={json.dumps(value)}" in found[0].rule


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["FalconForCausalLM"]},
        {"architectures": None, "model_type": "falcon"},
        {"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]},
        {"model_type": "granite"},
        {"architectures": None, "model_type": None},
        {"architectures": 7},
    ],
    ids=str,
)
def test_unknown_architecture_lists_the_supported_ones(problems, change):
    found = problems({**LLAMA, **change})
    assert [p.code for p in found] == ["model-hf-architecture"]
    assert "LlamaForCausalLM, MistralForCausalLM, GPT2LMHeadModel" in found[0].fix


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.sampled_from([LLAMA, MISTRAL, GPT2]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_config_gives_a_model_or_a_user_error(folder, base, change):
    """Arbitrary JSON values at the keys that are read raise nothing but a UserError."""
    path = folder({**base, **change})
    with contextlib.suppress(UserError):
        assert DecoderModel(**read_config(path).fields).head_size >= 0


def test_model_type_alone_selects_the_architecture(hf_model):
    assert hf_model({**LLAMA, "architectures": None}).num_layers == 2


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\x00"])
def test_config_that_is_not_a_json_object_is_refused(tree, folder, text):
    made = tree()
    made["model"] = {"hf": str(folder(text))}
    with pytest.raises(UserError) as caught:
        build_job(made)
    assert [p.code for p in caught.value.problems] == ["model-hf-config"]


def test_folder_without_config_lists_its_contents(refused, tmp_path):
    (tmp_path / "other.txt").write_text("")
    found = refused(model={"preset": None, "hf": str(tmp_path)})
    assert [p.code for p in found] == ["model-hf-missing"]
    assert "it has other.txt" in found[0].rule
    assert "does not exist" in refused(model={"preset": None, "hf": str(tmp_path / "nix")})[0].rule
    assert "is not a folder" in refused(model={"preset": None, "hf": str(tmp_path / "other.txt")})[0].rule


def test_missing_folder_hides_no_other_problem(refused, tmp_path):
    """The missing folder adds no problems about missing model keys, and other sections are still checked."""
    found = refused(model={"preset": None, "hf": str(tmp_path / "nix")}, train={"steps": 0})
    assert {p.code for p in found} == {"model-hf-missing", "job-out-of-range"}


def test_preset_and_hf_folder_together_are_refused(refused, folder):
    assert [p.code for p in refused(model={"hf": str(folder(LLAMA))})] == ["model-hf-preset"]


def test_model_keys_must_match_the_config(hf_model, problems):
    same = {"num_layers": 2, "head_dim": 16, "rope_theta": 10000, "tied_embeddings": False, "init_std": 0.5}
    assert hf_model(LLAMA, model=same).init_std == 0.5, "init_std may differ"
    found = problems(LLAMA, model={"num_layers": 3, "norm": "layer", "architecture": "resnet"})
    assert {(p.code, p.path) for p in found if p.code == "model-hf-conflict"} == {
        ("model-hf-conflict", "model.num_layers"),
        ("model-hf-conflict", "model.norm"),
        ("model-hf-conflict", "model.architecture"),
    }


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_init_std_beside_pretrained_weights_is_refused(hf_model, problems, folder, file):
    """init_std has no effect if weights are read. The value of the config is accepted."""
    (folder(LLAMA) / file).write_bytes(b"")
    (problem,) = problems(LLAMA, model={"init_std": 0.5})
    assert (problem.code, problem.path) == ("model-hf-init-std", "model.init_std")
    assert file in problem.rule
    assert hf_model(LLAMA, model={"init_std": 0.02}).init_std == 0.02


def test_plan_is_read_without_the_hf_folder(folder, tree, tmp_path, monkeypatch):
    """The path in the plan is absolute.

    Reading a plan needs no folder; overrides of model or sequence length do.
    """
    path = folder(LLAMA)
    monkeypatch.chdir(tmp_path)
    made = tree()
    made["model"] = {"hf": "hf"}
    job = build_job(made)
    assert job.model.hf == str(path)
    plan = tmp_path / "plan.toml"
    write_plan(build_plan(job)[0], plan)
    assert any("LlamaForCausalLM" in reason for reason in read_plan(plan).reasons)
    with pytest.raises(UserError) as caught:
        load_job(str(plan), ["model.num_layers=3"])
    assert [p.code for p in caught.value.problems] == ["model-hf-conflict"]
    folder({**LLAMA, "rms_norm_eps": 1e-5})
    assert read_plan(plan).job.model == job.model
    assert load_job(str(plan), ["train.steps=9"]).model == job.model
    with pytest.raises(UserError) as caught:
        check_config(job.model, 32)
    assert [p.path for p in caught.value.problems] == ["model.norm_eps"]
    (path / "config.json").unlink()
    assert read_plan(plan).job.model == job.model
    with pytest.raises(UserError) as caught:
        load_job(str(plan), ["data.seq_len=64"])
    assert [p.code for p in caught.value.problems] == ["model-hf-missing"]

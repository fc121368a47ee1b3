"""Weights of a Hugging Face folder are checked by their headers, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwright.checkpoint.hf.config import require_hf_form
from meshwright.checkpoint.hf.names import list_hf_locations, list_hf_shapes
from meshwright.checkpoint.hf.weights import find_weights
from meshwright.core.errors import UserError
from meshwright.core.tensor_header import TensorInfo, read_tensor_header
from meshwright.layout.parameters import list_parameters
from meshwright.spec.hf_config import INDEX_FILE, WEIGHTS_FILE
from meshwright.spec.model import DecoderModel
from model_shapes import GPT_PARTS

LLAMA = DecoderModel(
    num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, ffn_size=12, vocab_size=20, attention_bias=True
)
GPT2 = DecoderModel(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=4,
    ffn_size=12,
    vocab_size=20,
    max_positions=16,
    tied_embeddings=True,
    **GPT_PARTS,
)
MIXTRAL = DecoderModel(
    **{**LLAMA.__dict__, "attention_bias": False, "num_experts": 4, "experts_per_token": 2}
)


def tensors_of(model: DecoderModel) -> dict[str, Any]:
    return {name: np.zeros(shape, np.float32) for name, shape in list_hf_shapes(model).items()}


@pytest.fixture
def single_file(tmp_path) -> Path:
    """A folder with the weights of LLAMA in one file."""
    save_file(tensors_of(LLAMA), tmp_path / WEIGHTS_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A folder with the weights of LLAMA in two files with an index."""
    tensors = tensors_of(LLAMA)
    names = sorted(tensors)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def problems_of(folder: Path, model: DecoderModel = LLAMA):
    with pytest.raises(UserError) as caught:
        find_weights(folder, model)
    return caught.value.problems


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_parameter_has_a_location_and_locations_cover_every_tensor(model):
    """Parameters that share a tensor are adjacent slices without gap or overlap."""
    locations, shapes = list_hf_locations(model), list_hf_shapes(model)
    assert list(locations) == [p.name for p in list_parameters(model)]
    elements = dict.fromkeys(shapes, 0)
    for parameter in list_parameters(model):
        elements[locations[parameter.name].name] += parameter.count
    assert elements == {name: int(np.prod(shape)) for name, shape in shapes.items()}
    shared = [p for p in locations.values() if p.name.endswith("h.0.attn.c_attn.weight")]
    assert [(p.begin, p.end) for p in shared] == ([(0, 8), (8, 16), (16, 24)] if model is GPT2 else [])


def test_the_header_has_names_dtypes_and_shapes(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.float32)}, path, {"format": "np"})
    assert read_tensor_header(path) == {"a": TensorInfo("F16", (2, 3), 12), "b": TensorInfo("F32", (), 4)}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a safetensors"),
        (b"\x01", "not a safetensors"),
        (b"PK\x03\x04" * 10, "not a safetensors"),
        (struct.pack("<Q", 50) + b"{", "truncated"),
        (struct.pack("<Q", 2) + b"[]", "cannot be read"),
        (struct.pack("<Q", 4) + b"nope", "cannot be read"),
        (struct.pack("<Q", 9) + b'{"a":{}}\n', "cannot be read"),
        (struct.pack("<Q", 2) + b"{}x", "too long"),
    ],
)
def test_invalid_safetensors_files_are_refused(tmp_path, content, says):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_tensor_header(path)


def test_a_shape_that_does_not_match_its_bytes_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensor_header(tmp_path / "x")


def test_weights_in_one_file_are_found(single_file):
    found = find_weights(single_file, LLAMA)
    assert found.tensors.keys() == list_hf_shapes(LLAMA).keys()
    assert found.bytes == 4 * sum(p.count for p in list_parameters(LLAMA))


def test_weights_in_shards_with_an_index_are_found(sharded):
    found = find_weights(sharded, LLAMA)
    assert [p.name for p in found.files] == ["a.safetensors", "b.safetensors"]
    assert found.tensors.keys() == list_hf_shapes(LLAMA).keys()


def test_a_folder_with_only_a_config_has_no_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_weights(tmp_path, LLAMA) is None


def test_missing_and_extra_weights_are_listed_and_counted(single_file):
    """A model with more layers than the file, and one with fewer. Ten names and a count are listed."""
    longer = DecoderModel(**{**LLAMA.__dict__, "num_layers": 4})
    (missing,) = problems_of(single_file, longer)
    assert missing.code == "model-hf-weights-missing"
    assert "lacks 26 of" in missing.rule
    assert "model.layers.2.input_layernorm.weight" in missing.rule
    assert missing.rule.endswith("and 16 more")
    shorter = DecoderModel(**{**LLAMA.__dict__, "num_layers": 1})
    (extra,) = problems_of(single_file, shorter)
    assert extra.code == "model-hf-weights-extra"
    assert "13 tensors" in extra.rule
    assert "model.layers.1.input_layernorm.weight" in extra.rule


def test_weights_are_listed_under_the_names_of_the_file(tmp_path):
    """A bare GPT-2 omits the prefix of its names. Missing and extra tensors are named without it, too."""
    tensors = {name.removeprefix("transformer."): value for name, value in tensors_of(GPT2).items()}
    del tensors["ln_f.bias"]
    tensors["foo.bar"] = np.zeros(2, np.float32)
    tensors["wpe.weight"] = np.zeros((1, 8), np.float32)
    tensors["ln_f.weight"] = np.zeros(8, np.int8)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    listed = [p.rule.rpartition(": ")[2] for p in problems_of(tmp_path, GPT2)]
    assert listed == ["ln_f.bias", "foo.bar", "wpe.weight is 1x8, not 16x8", "ln_f.weight is I8"]


def test_one_name_without_prefix_does_not_change_the_prefix_of_others(single_file):
    tensors = tensors_of(LLAMA)
    del tensors["model.norm.weight"]
    save_file({**tensors, "foo.bar": np.zeros(2, np.float32)}, single_file / WEIGHTS_FILE)
    missing, extra = problems_of(single_file)
    assert missing.rule.endswith(": model.norm.weight")
    assert extra.rule.endswith(": foo.bar")


def test_mismatched_shapes_are_listed(single_file):
    wider = DecoderModel(**{**LLAMA.__dict__, "ffn_size": 16})
    (shape,) = problems_of(single_file, wider)
    assert shape.code == "model-hf-weights-shape"
    assert "6 tensors" in shape.rule
    assert "model.layers.0.mlp.down_proj.weight is 8x12, not 8x16" in shape.rule


def test_quantised_weights_are_refused(single_file):
    tensors = tensors_of(LLAMA)
    tensors["model.norm.weight"] = np.zeros(8, np.int8)
    save_file(tensors, single_file / WEIGHTS_FILE)
    (found,) = problems_of(single_file)
    assert (found.code, "model.norm.weight is I8" in found.rule) == ("model-hf-weights-dtype", True)


def test_the_head_of_a_tied_model_is_optional(tmp_path):
    tied = DecoderModel(**{**LLAMA.__dict__, "tied_embeddings": True})
    for name in (None, "lm_head.weight"):
        tensors = tensors_of(tied)
        if name:
            tensors[name] = tensors["model.embed_tokens.weight"]
        save_file(tensors, tmp_path / WEIGHTS_FILE)
        assert "lm_head.weight" not in find_weights(tmp_path, tied).tensors
    save_file(tensors_of(tied), tmp_path / WEIGHTS_FILE)
    assert "lm_head.weight" in problems_of(tmp_path, LLAMA)[0].rule, "an untied model needs it"


def test_buffers_are_skipped_and_biases_are_not(tmp_path):
    tensors = tensors_of(GPT2)
    tensors["transformer.h.0.attn.bias"] = np.zeros((1, 1, 4, 4), np.uint8)
    tensors["h.1.attn.masked_bias"] = np.zeros((), np.float32)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert find_weights(tmp_path, GPT2).tensors.keys() == list_hf_shapes(GPT2).keys()
    del tensors["transformer.h.0.attn.c_attn.bias"]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    assert "transformer.h.0.attn.c_attn.bias" in problems_of(tmp_path, GPT2)[0].rule


def test_a_missing_shard_is_refused(sharded):
    (sharded / "b.safetensors").unlink()
    (found,) = problems_of(sharded)
    assert found.code == "model-hf-weights-broken"
    assert found.path.endswith("b.safetensors")
    assert "not there" in found.rule


def test_a_truncated_shard_is_refused(sharded):
    path = sharded / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (found,) = problems_of(sharded)
    assert found.code == "model-hf-weights-broken"
    assert "truncated" in found.rule
    assert found.path == str(path)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_invalid_index_is_refused(sharded, text):
    (sharded / INDEX_FILE).write_text(text)
    assert [p.code for p in problems_of(sharded)] == ["model-hf-weights-broken"]


def test_an_index_with_a_path_outside_its_folder_is_refused(sharded):
    (sharded / INDEX_FILE).write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "outside" in problems_of(sharded)[0].rule


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file(tensors_of(LLAMA), sharded / "b.safetensors")
    found = problems_of(sharded)
    assert {p.code for p in found} == {"model-hf-weights-broken"}
    assert "holds too" in found[0].rule


def test_shards_without_an_index_are_refused(sharded):
    (sharded / INDEX_FILE).unlink()
    assert "a.safetensors, b.safetensors" in problems_of(sharded)[0].rule


def test_pickled_weights_are_refused_with_the_conversion(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (found,) = problems_of(tmp_path)
    assert (found.code, "save_pretrained" in found.fix) == ("model-hf-pickle", True)


@pytest.mark.parametrize(
    ("model", "change", "path"),
    [
        (LLAMA, {"norm": "layer"}, "model.norm"),
        (LLAMA, {"activation": "gelu"}, "model.activation"),
        (LLAMA, {"hidden_size": 10, "head_dim": 4}, "model.num_heads"),
        (GPT2, {"norm": "rms"}, "model.norm"),
        (GPT2, {"activation": "swiglu"}, "model.activation"),
        (GPT2, {"ffn_bias": False}, "model.ffn_bias"),
        (GPT2, {"num_kv_heads": 2}, "model.num_kv_heads"),
        (GPT2, {"head_dim": 4}, "model.head_dim"),
        (GPT2, {"num_experts": 4, "experts_per_token": 2}, "model.num_experts"),
        (MIXTRAL, {"router": "sigmoid"}, "model.router"),
        (MIXTRAL, {"shared_experts": 1}, "model.shared_experts"),
        (MIXTRAL, {"dense_layers": 1}, "model.dense_layers"),
    ],
    ids=str,
)
def test_a_setting_without_hugging_face_equivalent_is_named(model, change, path):
    with pytest.raises(UserError) as caught:
        require_hf_form(DecoderModel(**{**model.__dict__, **change}))
    assert [(p.code, p.path) for p in caught.value.problems] == [("export-no-hf-form", path)]
    assert require_hf_form(model) in ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")

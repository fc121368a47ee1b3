"""Translates a Hugging Face ``config.json`` to the fields of a decoder, without torch and weights.

A key that changes the mathematics and is not supported is an error. Dropout and unknown keys become notes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.spec.hf_config_reader import CONFIG_FILE, IDLE_VALUES, ROPE_KEYS, ConfigReader, bad_config
from meshwright.spec.model import DecoderModel, Model

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""GPT-2's names of activation functions, and ours."""
FREE_BESIDE_HF = frozenset({"hf", "init_std", "preset"})
"""Keys that may differ from the config without changing the shapes of the weights."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Tree = dict[str, Any]


@dataclass(frozen=True)
class HfConfig:
    """The contents of a config.json, translated."""

    architecture: str
    fields: Tree
    """Fields of a :class:`DecoderModel`; the others have their defaults."""
    sliding_window: int | None
    """Sliding window in tokens; None for full attention."""
    notes: tuple[str, ...]


def merge_hf_config(model: Tree, seq_len: Any) -> tuple[Tree, list[Problem]]:
    """The model's table with the fields of the folder's config, and the problems.

    Args:
        model: The table ``[model]`` with the key ``hf``; the path becomes absolute.
        seq_len: ``data.seq_len``; it must fit into the sliding window.
    """
    if model.get("preset") is not None:
        rule = "cannot be combined with model.preset: both define the model"
        return model, [
            Problem("model-hf-preset", rule, path="model.hf", value=model["hf"], fix="Leave one out")
        ]
    folder = Path(os.path.abspath(model["hf"]))  # noqa: PTH100  (links stay: caches are full of them)
    try:
        config = read_config(folder)
    except UserError as error:
        return model, list(error.problems)
    problems = _find_conflicts(folder, config.fields, model)
    weights, drawn_with = find_weights_file(folder), config.fields["init_std"]
    if weights is not None and (std := model.get("init_std", drawn_with)) != drawn_with:
        rule = f"has no effect: the initial weights are loaded from {folder} ({weights.name})"
        fix = "Leave model.init_std out, or use a folder with only the config"
        problems.append(Problem("model-hf-init-std", rule, path="model.init_std", value=std, fix=fix))
    window = config.sliding_window
    if window is not None and isinstance(seq_len, int) and seq_len > window:
        where = folder / CONFIG_FILE
        rule = f"is more than sliding_window={window} in {where}, and sliding windows are not implemented"
        fix = f"Use {window} or less"
        problems.append(Problem("model-hf-unsupported", rule, path="data.seq_len", value=seq_len, fix=fix))
    return {**config.fields, **model, "hf": str(folder)}, problems


def is_settled(model: Any) -> bool:
    """Whether a table has every field, as in a plan; the folder is then not read."""
    always = {f.name for f in dataclasses.fields(DecoderModel) if f.default is not None}
    return isinstance(model, dict) and always <= model.keys()


def find_weights_file(folder: Path) -> Path | None:
    """The weights of a folder: the single file, which wins as in transformers, or the index of shards.

    None for a folder with only a config.
    """
    return next((folder / name for name in (WEIGHTS_FILE, INDEX_FILE) if (folder / name).exists()), None)


def check_config(model: DecoderModel, seq_len: int) -> None:
    """Check that the config still agrees with the job, before its weights are loaded."""
    assert model.hf is not None, "called for models with a folder"
    given = dataclasses.asdict(model)
    _, problems = merge_hf_config(given, seq_len)
    if problems:
        raise UserError(*problems)


def notes_on(model: Model) -> list[str]:
    """Notes on the model's config for the plan; empty if the folder is gone."""
    if not isinstance(model, DecoderModel) or model.hf is None:
        return []
    try:
        config = read_config(Path(model.hf))
    except UserError:
        return []
    return [f"model: {config.architecture} of {model.hf}", *config.notes]


def read_config(folder: Path) -> HfConfig:
    """Read and translate a folder's config.json.

    Raises:
        UserError: With everything in it that is not supported.
    """
    content = _read_json(folder)
    architecture = _find_architecture(folder, content)
    reader = ConfigReader(folder, content)
    fields = _ARCHITECTURES[architecture][1](reader)
    window = reader.count("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    reader.finish()
    if reader.problems:
        raise UserError(*reader.problems)
    return HfConfig(architecture, fields, window, tuple(reader.notes))


def _read_json(folder: Path) -> Tree:
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_missing(folder)) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            bad_config(folder, f"has a {CONFIG_FILE} that cannot be read as JSON: {reason}")
        ) from None
    if not isinstance(content, dict):
        raise UserError(bad_config(folder, f"has a {CONFIG_FILE} that is not a JSON object"))
    return content


def _missing(folder: Path) -> Problem:
    fix = "Give the folder of a downloaded model; nothing is fetched from the Hub"
    if not folder.exists():
        rule = "does not exist"
    elif not folder.is_dir():
        rule = "is not a folder"
    else:
        names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []  # noqa: PTH208
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        rule = f"has no {CONFIG_FILE}; it has {shown or 'no files'}"
    return Problem("model-hf-missing", rule, path="model.hf", value=str(folder), fix=fix)


def _find_architecture(folder: Path, content: Tree) -> str:
    """The class name of the architecture; `model_type` must agree, and decides if there is no class name."""
    named, kind = content.get("architectures"), content.get("model_type")
    by_kind = {model_type: name for name, (model_type, _) in _ARCHITECTURES.items()}
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not name and isinstance(kind, str):
        name = by_kind.get(kind, kind)
    if isinstance(name, str) and name in _ARCHITECTURES and kind in (None, _ARCHITECTURES[name][0]):
        return name
    described = f"architectures={named}, model_type={kind}"
    rule = f"has an unsupported architecture: {CONFIG_FILE} has {described}"
    fix = f"Supported: {', '.join(_ARCHITECTURES)}"
    raise UserError(Problem("model-hf-architecture", rule, path="model.hf", value=str(folder), fix=fix))


def _find_conflicts(folder: Path, fields: Tree, model: Tree) -> list[Problem]:
    """Keys of the job that contradict the config."""
    defaults = {f.name: f.default for f in dataclasses.fields(DecoderModel)}
    problems = []
    for key, value in model.items():
        if key in FREE_BESIDE_HF or key not in defaults:
            continue
        there = fields.get(key, defaults[key])
        if key == "head_dim":  # left out of the fields where it is the default
            there = there or fields["hidden_size"] // fields["num_heads"]
            value = value or there  # noqa: PLW2901
        if value != there:
            rule = f"contradicts {folder / CONFIG_FILE}, which has {there}; the weights would not fit"
            fix = f"Leave model.{key} out"
            problems.append(Problem("model-hf-conflict", rule, path=f"model.{key}", value=value, fix=fix))
    return problems


def _read_llama(reader: ConfigReader) -> Tree:
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    head_dim = reader.count("head_dim", None)
    reader.choice("hidden_act", ("silu", "swish"), "silu")
    reader.dropout("attention_dropout")
    reader.taken.add("layer_types")
    kinds = reader.content.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(k == "full_attention" for k in kinds)):
        reader.refuse("layer_types", kinds, "supported: full_attention")
    max_positions = reader.count("max_position_embeddings", 2048)
    return {
        "architecture": "llama",
        "num_layers": reader.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": reader.count("num_key_value_heads", heads),
        "ffn_size": reader.count("intermediate_size"),
        "vocab_size": reader.count("vocab_size"),
        **({} if head_dim is None or head_dim * heads == hidden else {"head_dim": head_dim}),
        "max_positions": max_positions,
        **_read_rope(reader, max_positions),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "attention_bias": reader.flag("attention_bias", False),
        "ffn_bias": reader.flag("mlp_bias", False),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "init_std": reader.number("initializer_range", 0.02),
    }


def _read_mistral(reader: ConfigReader) -> Tree:
    """Llama with a sliding window; the class has no biases, whatever the config says."""
    if "num_key_value_heads" not in reader.content:
        reader.count("num_key_value_heads")  # missing: transformers' own default is 8, not the heads
    fields = _read_llama(reader)
    for key, field in (("attention_bias", "attention_bias"), ("mlp_bias", "ffn_bias")):
        if fields[field]:
            reader.refuse(key, True, "supported: false")
    return fields


def _read_mixtral(reader: ConfigReader) -> Tree:
    """Mistral with experts in every layer, without capacity limits and jitter."""
    if reader.content.get("router_jitter_noise"):
        reader.refuse("router_jitter_noise", reader.content["router_jitter_noise"], "supported: 0.0")
    reader.taken |= {"router_jitter_noise", "router_aux_loss_coef", "output_router_logits"}
    reader.content = {"rms_norm_eps": 1e-5, **reader.content}  # its class's own default
    experts = {
        "num_experts": reader.count("num_local_experts", 8),
        "experts_per_token": reader.count("num_experts_per_tok", 2),
    }
    return {**_read_mistral(reader), **experts}


def _read_rope(reader: ConfigReader, max_positions: int) -> Tree:
    """RoPE in both forms: `rope_theta` with `rope_scaling`, or all in `rope_parameters`."""
    content = reader.content
    reader.taken |= {"rope_scaling", "rope_parameters", "original_max_position_embeddings"}
    old, new = content.get("rope_scaling") or {}, content.get("rope_parameters") or {}
    key = "rope_scaling" if old else "rope_parameters"
    given = old or new
    if not isinstance(given, dict):
        reader.refuse(key, given, "it must be a table")
        given = {}
    if old and new and old != new:
        reader.refuse("rope_scaling", old, f"rope_parameters={json.dumps(new)} contradicts it")
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        reader.refuse(f"{key}.rope_type", kind, f"supported: {', '.join(ROPE_KEYS)}")
        return {}
    for unknown in sorted(given.keys() - ROPE_KEYS[kind]):
        if given[unknown] is not None and given[unknown] not in IDLE_VALUES.get(unknown, ()):
            reader.refuse(f"{key}.{unknown}", given[unknown], f"type {kind!r} has no such key")
    inner = ConfigReader(reader.folder, given)
    inner.problems = reader.problems
    inside = inner.number("rope_theta", 0.0)
    theta = reader.number("rope_theta", inside or 10000.0)
    if inside and inside != theta:
        reader.refuse("rope_theta", theta, f"{key} says {inside}")
    if kind == "default":
        return {"rope_theta": theta}
    original = inner.count("original_max_position_embeddings", max_positions)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if not low < high:
        reader.refuse(f"{key}.high_freq_factor", high, f"it must be above low_freq_factor={low}")
    return {
        "rope_theta": theta,
        "rope_factor": inner.number("factor"),
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_positions": reader.count("original_max_position_embeddings", original),
    }


def _read_gpt2(reader: ConfigReader) -> Tree:
    width, heads = reader.count("n_embd"), reader.count("n_head")
    activation = reader.choice("activation_function", tuple(ACTIVATIONS), "gelu_new")
    reader.dropout("attn_pdrop", "embd_pdrop", "resid_pdrop")
    return {
        "architecture": "llama",
        "num_layers": reader.count("n_layer"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_size": reader.count("n_inner", 4 * width),
        "vocab_size": reader.count("vocab_size"),
        "positions": "learned",
        "max_positions": reader.count("n_positions"),
        "norm": "layer",
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
        "activation": ACTIVATIONS[activation],
        "attention_bias": True,
        "ffn_bias": True,
        "tied_embeddings": reader.flag("tie_word_embeddings", True),
        "init_std": reader.number("initializer_range", 0.02),
    }


_ARCHITECTURES: dict[str, tuple[str, Callable[[ConfigReader], Tree]]] = {
    "LlamaForCausalLM": ("llama", _read_llama),
    "MistralForCausalLM": ("mistral", _read_mistral),
    "GPT2LMHeadModel": ("gpt2", _read_gpt2),
    "MixtralForCausalLM": ("mixtral", _read_mixtral),
}
"""Class name in transformers: its model_type, and how its config is read."""

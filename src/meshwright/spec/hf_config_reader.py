"""Reads keys of a Hugging Face ``config.json``, and checks those that are not fields of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem

CONFIG_FILE = "config.json"

HARMLESS = frozenset(
    {
        "architectures",
        "bad_words_ids",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cls_token_id",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "label2id",
        "max_length",
        "min_length",
        "model_type",
        "n_ctx",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys about tokens, generation, labels or implementation, which do not change the model: ignored."""

IDLE_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "auto_map": ({},),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "quantization_config": ({},),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rotary_pct": (1.0,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Keys that change the mathematics, with the values (besides null) that have no effect."""

ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset({"rope_type", "type", "rope_theta"}),
    "llama3": frozenset(
        {
            "factor",
            "high_freq_factor",
            "low_freq_factor",
            "original_max_position_embeddings",
            "rope_theta",
            "rope_type",
            "type",
        }
    ),
}
"""Supported kinds of RoPE, and their keys."""


def bad_config(folder: Path, rule: str, fix: str = "") -> Problem:
    """The problem of a config that cannot be used."""
    return Problem("model-hf-config", rule, path="model.hf", value=str(folder), fix=fix)


class ConfigReader:
    """Reads keys of a config, and checks at the end those that were not read."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.taken: set[str] = set()

    def count(self, key: str, *default: int | None) -> Any:
        """A whole number, at least 1; required without a default."""
        return self._take(key, default, lambda v: type(v) is int and v >= 1, "a whole number, at least 1")

    def number(self, key: str, *default: float) -> Any:
        """A number above 0, as a float."""
        found = self._take(key, default, _is_positive, "a number above 0")
        return float(found) if _is_positive(found) else found

    def flag(self, key: str, default: bool) -> Any:
        """True or false."""
        return self._take(key, (default,), lambda v: isinstance(v, bool), "true or false")

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of the supported strings."""
        self.taken.add(key)
        value = self.content.get(key)
        if value is not None and value not in choices:
            self.refuse(key, value, f"supported: {', '.join(choices)}")
        return value if value in choices else default

    def dropout(self, *keys: str) -> None:
        """Dropout probabilities, which are not applied."""
        set_keys = [f"{key}={self.content[key]}" for key in keys if self.content.get(key)]
        self.taken.update(keys)
        if set_keys:
            self.notes.append(f"dropout is not applied: {CONFIG_FILE} says {', '.join(set_keys)}")

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Record that a value is not supported."""
        rule = f"has a {CONFIG_FILE} with {key}={json.dumps(value)}, which is not supported; {why}"
        self.problems.append(Problem("model-hf-unsupported", rule, path="model.hf", value=str(self.folder)))

    def finish(self) -> None:
        """Check the keys that were not read."""
        unread = []
        for key in sorted(self.content.keys() - self.taken - HARMLESS):
            value = self.content[key]
            if key in IDLE_VALUES:
                if value is not None and value not in IDLE_VALUES[key]:
                    idle = " or ".join(json.dumps(v) for v in IDLE_VALUES[key]) or "null"
                    self.refuse(key, value, f"supported: {idle}")
            elif value is not None and not key.startswith("_"):
                unread.append(key)
        if unread:
            self.notes.append(f"keys of {CONFIG_FILE} that are ignored: {', '.join(unread)}")

    def _take(self, key: str, default: tuple[Any, ...], good: Callable[[Any], bool], expected: str) -> Any:
        self.taken.add(key)
        value = self.content.get(key)
        if value is None and default:
            return default[0]
        if value is None:
            self.problems.append(
                bad_config(self.folder, f"has a {CONFIG_FILE} without {key}", f"Add {key} to it")
            )
        elif not good(value):
            rule = f"has a {CONFIG_FILE} with {key}={json.dumps(value)}; it must be {expected}"
            self.problems.append(bad_config(self.folder, rule))
        else:
            return value
        return 1  # not used: there is a problem


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e300

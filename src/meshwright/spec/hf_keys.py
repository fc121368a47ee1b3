"""Keys of a Hugging Face ``config.json`` that are not fields of a model, and what each may say."""

from __future__ import annotations

from typing import Any

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
"""About tokens, text generation, labels or how the same numbers are computed: not told."""

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
"""Keys that change the mathematics, and the values (beside null) with which they do not."""

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
"""Kinds of rotary positions that are built, and the keys of each."""

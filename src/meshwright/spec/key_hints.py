"""Keys of other frameworks, with the job key that does the same.

The names are those of Hugging Face Trainer, Accelerate, torchtitan, Megatron-LM, DeepSpeed, Lightning and
nanoGPT. A name with a dot is matched against the whole path that the user wrote, any other one against its
last part.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from meshwright.spec.job_keys import list_keys, list_tables


@dataclass(frozen=True)
class KeyHint:
    """The replacement for some names."""

    names: str
    """Names that people know, separated by spaces."""
    keys: str = ""
    """Our keys, separated by spaces; empty if there is none."""
    note: str = ""
    """What differs, or why there is no key."""

    @property
    def fix(self) -> str:
        """The instruction of an error."""
        if not self.keys:
            return f"{self.note[:1].upper()}{self.note[1:]}"
        return f"Use {' or '.join(self.keys.split())}{f' ({self.note})' if self.note else ''}"


HINTS = (
    # model
    KeyHint("model_name_or_path pretrained_model_name_or_path hf_model base_model", "model.hf"),
    KeyHint("model.name model.flavor model_name", "model.preset"),
    KeyHint("num_hidden_layers n_layers n_layer", "model.num_layers"),
    KeyHint("d_model n_embd embed_dim dim", "model.hidden_size"),
    KeyHint("num_attention_heads n_heads n_head", "model.num_heads"),
    KeyHint("num_key_value_heads n_kv_heads num_query_groups", "model.num_kv_heads"),
    KeyHint("intermediate_size ffn_hidden_size ffn_dim", "model.ffn_size"),
    KeyHint("max_position_embeddings", "model.max_positions"),
    KeyHint("tie_word_embeddings weight_tying", "model.tied_embeddings"),
    KeyHint("rms_norm_eps layernorm_epsilon layer_norm_eps", "model.norm_eps"),
    KeyHint("num_local_experts n_routed_experts num_moe_experts moe_num_experts", "model.num_experts"),
    KeyHint(
        "moe_router_topk num_experts_per_tok num_experts_per_token moe_top_k moe_topk top_k",
        "model.experts_per_token",
    ),
    KeyHint("moe_ffn_hidden_size moe_intermediate_size", "model.expert_ffn_size"),
    KeyHint("n_shared_experts num_shared_experts", "model.shared_experts"),
    KeyHint("moe_expert_capacity_factor expert_capacity_factor", "model.capacity_factor"),
    KeyHint("moe_aux_loss_coeff router_aux_loss_coef aux_loss_coef", "train.balance_loss"),
    KeyHint("moe_z_loss_coeff router_z_loss_coef", "train.z_loss"),
    KeyHint("kv_channels head_size", "model.head_dim"),
    KeyHint("sliding_window window_size", "model.window"),
    KeyHint("kv_lora_rank", "model.latent_size"),
    KeyHint("q_lora_rank", "model.query_latent_size"),
    KeyHint("qk_rope_head_dim", "model.rope_head_dim"),
    KeyHint("v_head_dim", "model.value_head_dim"),
    KeyHint("hidden_act activation_function", "model.activation"),
    KeyHint("normalization norm_type", "model.norm"),
    KeyHint("rotary_base rope_base", "model.rope_theta"),
    KeyHint("initializer_range init_method_std", "model.init_std"),
    KeyHint("padded_vocab_size n_vocab", "model.vocab_size"),
    KeyHint(
        "attn_implementation use_flash_attn use_flash_attention use_flash_attention_2 flash_attention "
        "flash_attn",
        "",
        "the fastest attention kernel is used",
    ),
    KeyHint("dropout hidden_dropout attention_dropout resid_pdrop", "", "dropout is not built"),
    KeyHint("label_smoothing label_smoothing_factor", "", "label smoothing is not built"),
    KeyHint("ema ema_decay use_ema", "", "an average of the weights (EMA) is not built"),
    # fine-tuning
    KeyHint(
        "lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules qlora peft peft_config adapter",
        "",
        "LoRA is not built; fine-tuning updates all weights",
    ),
    KeyHint("load_in_4bit load_in_8bit quantization_config", "", "quantized training is not built"),
    # cluster
    KeyHint("num_nodes nnodes num_machines", "cluster.nodes"),
    KeyHint(
        "gpus num_gpus n_gpu gpus_per_node nproc_per_node num_processes world_size devices",
        "cluster.devices_per_node",
    ),
    KeyHint("use_cpu no_cuda accelerator device_map", "cluster.device"),
    # data
    KeyHint(
        "seq_length max_seq_length max_seq_len sequence_length context_length max_length block_size "
        "cutoff_len encoder_seq_length",
        "data.seq_len",
    ),
    KeyHint("data_path train_file train_files dataset dataset_path dataset_name data_files", "data.path"),
    KeyHint(
        "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path tokenizer_type vocab_file",
        "data.tokenizer",
    ),
    KeyHint("dataset_text_field text_column text_column_name text_key", "data.text_field"),
    KeyHint("valid_data_path validation_file eval_dataset", "data.eval"),
    KeyHint("validation_split val_split test_size split", "data.eval_fraction"),
    KeyHint("packing group_by_length reset_attention_mask", "data.mask", "samples are always packed"),
    KeyHint("shuffle shuffle_seed", "train.seed", "samples are always shuffled"),
    KeyHint(
        "num_workers dataloader_num_workers dataloader_pin_memory pin_memory",
        "",
        "data are tokenized before training; there are no loader processes",
    ),
    KeyHint("completion_only_loss", "data.prompt_masking"),
    KeyHint("train_on_inputs train_on_prompts", "data.prompt_masking", "the opposite: it masks prompts"),
    KeyHint("chat_template prompt_template", "data.template"),
    # steps and batch
    KeyHint(
        "max_steps train_iters num_steps total_steps max_iters iterations num_train_steps", "train.steps"
    ),
    KeyHint("train_samples max_samples", "train.steps", "samples / train.global_batch"),
    KeyHint("train_tokens max_tokens", "train.steps", "tokens / (train.global_batch x data.seq_len)"),
    KeyHint(
        "num_train_epochs num_epochs epochs max_epochs",
        "train.steps",
        "a run has a number of steps; one epoch is samples / train.global_batch",
    ),
    KeyHint("batch_size train_batch_size global_batch_size", "train.global_batch"),
    KeyHint(
        "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
        "micro_batch_size local_batch_size device_batch_size",
        "layout.micro_batch",
    ),
    KeyHint(
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches gradient_accumulation",
        "layout.micro_batch",
        "accumulation steps are train.global_batch / (data-parallel ranks x layout.micro_batch)",
    ),
    KeyHint(
        "per_device_eval_batch_size eval_batch_size eval_iters",
        "train.eval_samples",
        "samples in all, not a batch",
    ),
    # optimizer
    KeyHint("learning_rate max_lr base_lr peak_lr optimizer.params.lr", "train.lr"),
    KeyHint("optim optimizer.name optimizer.type optimizer_type", "train.optimizer"),
    KeyHint("adam_beta1 beta_1", "train.beta1"),
    KeyHint("adam_beta2 beta_2", "train.beta2"),
    KeyHint("betas", "train.beta1 train.beta2"),
    KeyHint("adam_epsilon adam_eps epsilon", "train.eps"),
    KeyHint("wd decay", "train.weight_decay"),
    KeyHint("max_grad_norm max_norm clip_grad grad_clip gradient_clipping gradient_clip_val", "train.clip"),
    KeyHint("lr_scheduler lr_scheduler_type lr_decay_style scheduler", "train.schedule"),
    KeyHint("warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters", "train.warmup"),
    KeyHint("warmup_ratio lr_warmup_fraction", "train.warmup", "a number of steps"),
    KeyHint("min_lr min_lr_factor eta_min", "train.min_lr_ratio", "a fraction of train.lr"),
    KeyHint("decay_ratio lr_wsd_decay_iters", "train.decay_fraction", "with train.schedule=wsd"),
    # precision and execution
    KeyHint(
        "bf16 fp16 fp8 fp32 tf32 amp mixed_precision mixed_precision_param torch_dtype dtype params_dtype "
        "param_dtype fp8_format enable_float8_linear",
        "train.precision",
    ),
    KeyHint("mixed_precision_reduce grad_reduce_in_fp32 reduce_dtype", "compression.kind train.grad_dtype"),
    KeyHint("compile torch_compile use_torch_compile compile.enable kernels", "train.block_backend"),
    KeyHint("initial_scale_power init_scale initial_loss_scale", "train.loss_scale"),
    KeyHint("use_deterministic_algorithms full_determinism deterministic_mode", "train.deterministic"),
    KeyHint("random_seed data_seed", "train.seed"),
    KeyHint("max_restarts max_failures fault_tolerance", "elastic.restarts"),
    # parallelism
    KeyHint(
        "dp dp_size data_parallel data_parallel_size data_parallel_degree strategy",
        "layout.dp_replicate layout.dp_shard",
        "DDP or ZeRO (FSDP)",
    ),
    KeyHint(
        "ddp data_parallel_replicate_degree num_replicas num_distributed_optimizer_instances",
        "layout.dp_replicate",
    ),
    KeyHint(
        "fsdp fsdp_size fsdp_config fsdp_sharding_strategy sharding_strategy data_parallel_shard_degree "
        "hybrid_shard",
        "layout.dp_shard",
        "with layout.zero=3 for FSDP; add layout.dp_replicate for hybrid sharding",
    ),
    KeyHint("zero_stage zero_optimization stage deepspeed sharding_stage zero3", "layout.zero"),
    KeyHint("use_distributed_optimizer distributed_optimizer", "layout.zero", "1 shards the optimizer state"),
    KeyHint("reshard_after_forward", "layout.zero", "3 reshards, 2 does not"),
    KeyHint(
        "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tensor_parallel",
        "layout.tp",
    ),
    KeyHint(
        "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size "
        "pipeline_parallel num_stages",
        "layout.pp",
    ),
    KeyHint(
        "context_parallel_size context_parallel_degree cp_size sequence_parallel_size context_parallel",
        "layout.cp",
    ),
    KeyHint("expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size", "layout.ep"),
    KeyHint("expert_tensor_parallel_size expert_tensor_parallel_degree expert_tensor_parallel", "layout.etp"),
    KeyHint("pipeline_parallel_schedule pipeline_schedule pp_schedule", "layout.schedule"),
    KeyHint(
        "virtual_pipeline_model_parallel_size num_virtual_stages",
        "layout.virtual_stages",
    ),
    KeyHint("num_layers_per_virtual_pipeline_stage", "layout.virtual_stages", "stages per rank, not layers"),
    KeyHint("cp_comm_type context_parallel_method ulysses", "layout.context"),
    KeyHint(
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations "
        "recompute_granularity recompute_method recompute_num_layers selective_ac_option "
        "checkpoint_activations gradient_checkpointing_kwargs",
        "layout.recompute",
    ),
    KeyHint(
        "cpu_offload offload_optimizer offload_optimizer_device offload_param optimizer_cpu_offload "
        "enable_cpu_offload",
        "layout.offload",
    ),
    KeyHint("ddp_bucket_cap_mb bucket_cap_mb ddp_bucket_size allgather_bucket_size", "layout.bucket_mb"),
    KeyHint("forward_prefetch limit_all_gathers stage3_prefetch_bucket_size", "layout.prefetch"),
    KeyHint(
        "overlap_comm overlap_grad_reduce overlap_param_gather",
        "",
        "no key: DDP, FSDP and pipeline sends overlap where the backend allows it",
    ),
    # evaluation, checkpoints, logs
    KeyHint("eval_steps eval_interval eval_freq eval_strategy evaluation_strategy", "train.eval_every"),
    KeyHint("save_steps save_interval checkpoint_interval checkpoint.interval", "checkpoint.every_steps"),
    KeyHint("save_strategy", "checkpoint.every_steps checkpoint.every_minutes"),
    KeyHint("save_total_limit keep_latest_k max_checkpoints", "checkpoint.keep_last"),
    KeyHint("load_best_model_at_end metric_for_best_model", "checkpoint.on_best"),
    KeyHint("checkpoint.folder checkpoint.path checkpoint_dir save_dir", "checkpoint.dir"),
    KeyHint("output_dir dump_folder out_dir", "run_dir"),
    KeyHint("resume resume_from_checkpoint load_checkpoint init_from", "", "start the command with --resume"),
    KeyHint("report_to log_with", "train.tensorboard train.wandb train.mlflow"),
    KeyHint("enable_tensorboard tensorboard_dir", "train.tensorboard"),
    KeyHint("enable_wandb wandb_project", "train.wandb"),
    KeyHint(
        "logging_steps log_interval log_freq steps_per_print",
        "",
        "every step is written to events.jsonl in the run's folder",
    ),
    KeyHint("push_to_hub hub_model_id", "", "meshwright checkpoint export writes a Hugging Face folder"),
    KeyHint("early_stopping early_stopping_patience", "", "early stopping is not built"),
    KeyHint("nccl_timeout ddp_timeout distributed_timeout_minutes timeout", "elastic.collective_timeout_s"),
    # tables
    KeyHint("training", "train"),
    KeyHint("parallelism parallel", "layout"),
)


BY_NAME = {name: hint for hint in HINTS for name in hint.names.split()}


def suggest_key(path: str, owner: Any = None) -> str:
    """The replacement for an unknown key: from the table, a key of the same name, or a similar one.

    Args:
        path: The dotted path that the user wrote.
        owner: Dataclass of the path's table; None if there is no such table.
    """
    *parents, leaf = path.lower().replace("-", "_").split(".")
    hint = BY_NAME.get(".".join((*parents, leaf))) or BY_NAME.get(leaf)
    if hint is not None:
        return hint.fix
    if elsewhere := [key for key in list_keys() if key.rpartition(".")[2] == leaf]:
        return f"Use {elsewhere[0]}"
    keys = [field.name for field in dataclasses.fields(owner)] if owner else []
    near = [key for key in keys if leaf.startswith(f"{key}_") or key.startswith(f"{leaf}_")]
    near = near or difflib.get_close_matches(leaf, keys, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {'.'.join((*parents, near[0]))}?"
    table = ".".join(parents)
    if owner is None:
        renamed = BY_NAME.get(table)
        return f"Tables of a job: {', '.join(list_tables())}" if renamed is None else renamed.fix
    return f"Keys of {f'[{table}]' if table else 'a job'}: {', '.join(keys)}"

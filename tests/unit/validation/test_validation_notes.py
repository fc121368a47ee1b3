"""What a row's note says it did not have is not read as something that it had; what it does say is."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.sizes import count_rank_parameters
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.rates import rates_of
from meshwright.validation.evaluate import evaluate
from meshwright.validation.published import Case

LLAMA = {"model_name": "LLaMA-7B", "framework": "transformers", "tp": "1", "dp": "64", "zero_stage": "3"}
TITAN = {"model_name": "LLaMA-7B", "framework": "torchtitan", "tp": "1", "dp": "64", "zero_stage": "3"}
EXPERTS = {
    "model_name": "Qwen3-30B-A3B", "params_b": "30.5", "layers": "48", "hidden": "2048", "heads": "32",
    "kv_heads": "4", "ffn_hidden": "6144", "vocab": "151936", "experts": "128", "top_k": "8",
    "moe_ffn": "768",
    "gpu": "B200", "num_gpus": "8", "tp": "1", "dp": "8", "zero_stage": "3", "framework": "torchtitan",
    "global_batch": "64", "micro_batch": "8", "recompute": "selective",
}  # fmt: skip


def settings(case: Case) -> tuple[object, object]:
    """What the note changed: kernels and overlap, and the types of state."""
    return case.workload.profile.time, case.workload.profile.memory


@pytest.mark.parametrize(
    "note",
    [
        "full logits (no Liger)",
        "without Liger",
        "no LoRA",
        "not fused RoPE",
        "no A2A overlap",
        "no fused linear cross entropy",
        "no chunked loss",
        "Liger disabled",
        "Liger: off",
        "liger=False",
        "does not use Liger",
        "without using Liger",
        "un-fused RoPE",
        "no Liger or FA2",
        "bf16 params, fp32 master weights and moments",
        "bf16 weights, float32 optimizer states",
        "bf16 parameters and gradients, AdamW states in fp32",
        "layernorm is not recomputed",
        "no recomputation of layernorm",
    ],
)
def test_a_negated_setting_changes_nothing(case, note):
    assert settings(case(**LLAMA, note=note)) == settings(case(**LLAMA))


def test_a_setting_that_is_named_twice_counts_where_it_is_not_negated(case):
    found = case(**LLAMA, note="baseline without Liger; this row with Liger kernels")
    assert found.workload.profile.time.fused_norms


def test_adapters_that_others_trained_do_not_refuse_a_row(read):
    assert read(note="all parameters are trained, no LoRA").case is not None
    assert read(note="without adapters").case is not None
    assert read(note="LoRA of rank 8, no QLoRA").case is None


@pytest.mark.parametrize(
    "note",
    [
        "chunked cross entropy",
        "loss computed in chunks (chunked_nll)",
        "policy loss, no full logits",
        "logits are never materialized",
        "chunked-cross-entropy",
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_in_chunks_keeps_no_logits(read, note, compiled):
    """Also where torch.compile covers the loss."""
    cells = {**TITAN, "gpu": "B200", "vocab": "151936", "micro_batch": "8", "recompute": "full"}
    how = "; torch.compile" if compiled else ""
    plain, chunked = (evaluate([read(**cells, note=text + how)])[0] for text in ("", note))
    tokens = 8 * 2048
    assert plain.predicted_memory_bytes - chunked.predicted_memory_bytes > 3 * tokens * 151936


def test_state_in_16_bits_is_read(case):
    note = "bfloat16 for params, gradients and both AdamW moments"
    memory = case(**TITAN, note=note).workload.profile.memory
    assert (memory.gradient_bytes, memory.moment_bytes, memory.master_bytes) == (2, 2, 0)
    plain, small = case(**TITAN).workload.profile.time, case(**TITAN, note=note).workload.profile.time
    assert (plain.optimizer_bytes, small.optimizer_bytes) == (28, 14), "read 8, written 6"


@pytest.mark.parametrize(
    ("note", "modules"),
    [
        ("recomputes router and rest. Gate and up projection in one GEMM", ()),
        ("counted with recomputation (so hardware FLOPs). GELU, fused norms", ()),
        ("recompute of layernorm. Gate and up projection in one GEMM", ("layernorm",)),
    ],
)
def test_recomputed_modules_are_those_of_the_same_sentence(case, note, modules):
    assert case(recompute="selective", note=note).workload.profile.memory.recomputed_modules == modules


@pytest.mark.parametrize(
    ("note", "compiled"),
    [
        ("Activation checkpointing, compile and precision not stated", False),
        ("torch.compile per block", True),
        ("Eager (no compile)", False),
        ("torch.compile not used", False),
        ("does not use torch.compile", False),
        ("uncompiled", False),
        ("torch compiled from source", False),
        ("torch.compile per block, micro-batch not stated", True),
    ],
)
def test_a_compilation_that_is_not_stated_is_none(case, note, compiled):
    assert case(**TITAN, note=note).workload.compiled == compiled


@pytest.mark.parametrize(
    ("gpu", "note", "kernel"),
    [
        ("H100", "SDPA attention", "native"),
        ("H100", "", "flash-2"),
        ("A100", "SDPA attention", "flash-2"),
        ("B200", "torch context parallel", "native"),
    ],
)
def test_context_parallelism_of_torch_runs_cudnn_where_torch_prefers_it(case, gpu, note, kernel):
    cells = {**LLAMA, "dp": "8", "cp": "8", "gpu": gpu, "note": note}
    assert case(**cells).workload.profile.time.attention_kernel == kernel


@pytest.mark.parametrize(("gpu", "year"), [("H100", "torchtitan"), ("B200", "torchtitan-2025")])
def test_torchtitan_on_blackwell_is_recent(case, gpu, year):
    assert case(**{**TITAN, "gpu": gpu}).workload.profile.name == year


def test_a_framework_like_torchtitan_has_its_kernels_but_not_its_compiled_loss(case):
    own, other = (
        case(**{**TITAN, "gpu": "B200", "framework": name}).workload.profile
        for name in ("torchtitan", "FSDP2")
    )
    assert own.time == other.time
    assert (own.memory.compiled_logit_bytes, other.memory.compiled_logit_bytes) == (4, None)


def test_flash_attention_2_is_no_faster_on_blackwell_than_on_hopper(case):
    """It uses the tensor-core instructions of Ampere: 348 TFLOP/s measured on an H200."""

    def rate(gpu: str) -> float:
        workload = case(**{**TITAN, "gpu": gpu}).workload
        rates = rates_of(workload)
        return workload.cluster.bf16_flops_per_s * rates.attention * rates.flash_2 / 1e12

    assert rate("H200") == pytest.approx(348, rel=0.01)
    assert rate("B200") == pytest.approx(rate("H200"), rel=0.1)


def test_parameters_that_stay_gathered_are_zero_2(case):
    found = case(**TITAN, note='fsdp_reshard_after_forward="never"')
    assert found.layout.zero == 2
    assert case(**{**TITAN, "zero_stage": ""}, note="no reshard_after_forward").layout.zero == 2
    assert case(**TITAN, note="reshard_after_forward=True").layout.zero == 3


def test_fp8_in_attention_alone_is_predicted_as_bf16(case):
    cells = {**EXPERTS, "precision": "mxfp8"}
    assert case(**cells, note="MXFP8 on the attention linears only").workload.precision == "bf16"
    assert (
        case(**cells, note="MXFP8 on attention and experts, bf16 for the head only").workload.precision
        == "fp8"
    )
    assert case(**cells).workload.precision == "fp8"


@pytest.mark.parametrize(
    ("note", "offload"),
    [
        ("CPU offload of parameters, gradients and optimizer", "all"),
        ("CPU offload (parameters, gradients and optimizer)", "all"),
        ("CPU offload of optimizer and parameters", "all"),
        ("offload all activations", "none"),
        ("without parameter offload; optimizer offload", "optimizer"),
        ("no offload of activations; optimizer offloaded", "optimizer"),
        ("offload of the optimizer", "optimizer"),
        ("no offload assumed", "none"),
    ],
)
def test_what_is_offloaded_is_read(case, note, offload):
    assert case(**TITAN, note=note).layout.offload == offload


def test_torchtitan_keeps_the_results_of_expert_dispatch_and_combine(read):
    """Its selective activation checkpointing saves the outputs of both all-to-alls."""
    alone, spread = (evaluate([read(**{**EXPERTS, "ep": ep})])[0] for ep in ("1", "8"))
    full = evaluate([read(**{**EXPERTS, "ep": "8", "recompute": "full"})])[0]
    copies = 8 * 2048 * 8
    results = 48 * copies * 2 * 2048 * 2
    assert spread.predicted_memory_bytes - full.predicted_memory_bytes > results
    assert spread.predicted_memory_bytes > alone.predicted_memory_bytes


def test_selective_checkpointing_recomputes_experts_unless_they_are_compiled(read):
    """Grouped GEMMs are not on torchtitan's list; measured compiled steps leave no time for them."""
    notes = {(kind, note): evaluate([read(**{**EXPERTS, "recompute": kind}, note=note)])[0].predicted_step_s
             for kind in ("none", "selective") for note in ("eager", "torch.compile")}  # fmt: skip
    added = {note: notes["selective", note] - notes["none", note] for note in ("eager", "torch.compile")}
    assert added["eager"] > 1.5 * added["torch.compile"] > 0


def test_copies_of_fsdp_2_take_time_where_ranks_share_a_block(case):
    """Out of the gathered buffer and into the reduced one, per block: 2 x 2 and 2 + 4 bytes per parameter."""
    cells = {**TITAN, "gpu": "H100", "layers": "32", "recompute": "none", "micro_batch": "1"}
    found = case(**{**cells, "num_gpus": "8", "dp": "8"})
    without = dataclasses.replace(
        found.workload.profile, time=dataclasses.replace(found.workload.profile.time, copies_shards=False)
    )
    steps = [
        float(estimate_step(workload, Grid.of([found.layout]), rates_of(workload)).step_s[0])
        for workload in (found.workload, dataclasses.replace(found.workload, profile=without))
    ]
    counts = count_rank_parameters(found.workload.model, Grid.of([found.layout]))
    moved = 32 * counts.block[0] * (2 * 2 * 2 + 2 + 4)
    rates = rates_of(found.workload)
    passes = found.workload.global_batch / 8
    expected = passes * moved / (found.workload.cluster.memory_bytes_per_s * rates.memory)
    assert steps[0] - steps[1] == pytest.approx(expected, rel=0.01)
    alone = Grid.of([case(**{**cells, "num_gpus": "1", "dp": "1"}).layout])
    assert not count_rank_parameters(found.workload.model, alone).gathered_block(alone)


def test_experts_that_no_other_rank_shards_are_not_copied(case):
    spread = case(**EXPERTS, ep="8")
    grid = Grid.of([spread.layout])
    counts = count_rank_parameters(spread.workload.model, grid)
    assert counts.gathered_block(grid) == pytest.approx(counts.block)
    alone = Grid.of([case(**EXPERTS, ep="1").layout])
    counts = count_rank_parameters(spread.workload.model, alone)
    assert counts.gathered_block(alone) == pytest.approx(counts.block + counts.expert_block)


@pytest.mark.parametrize(
    ("framework", "gpu", "zero", "profile"),
    [
        ("Pax (JAX/XLA)", "A100", "3", "torchtitan"),
        ("prime-rl", "H100", "", "torchtitan"),
        ("torch_xla", "H100", "3", "torchtitan"),
        ("PyTorch DDP", "H100", "0", "torchtitan"),
        ("own script (DDP)", "H100", "0", "torchtitan"),
        ("HF Trainer DDP", "A6000", "0", "huggingface"),
        ("Megatron-Core DDP", "H100", "1", "megatron-core"),
        ("NeMo DDP", "H100", "1", "megatron-bridge"),
        ("Megatron-LM with HF tokenizer", "H100", "1", "megatron-core"),
        ("Meshwright DDP", "H100", "0", "meshwright"),
    ],
)
def test_frameworks_like_fsdp_are_predicted_as_such(case, framework, gpu, zero, profile):
    cells = {**TITAN, "framework": framework, "gpu": gpu, "zero_stage": zero}
    assert case(**cells).workload.profile.name == profile


MEGATRON = {"framework": "Megatron-LM core 0.12", "gpu": "H100"}


@pytest.mark.parametrize(
    ("note", "replayed"),
    [
        ("CUDA graphs", True),
        ("cuda graph on; no recomputation", True),
        ("no CUDA graphs stated", False),
        ("CUDA graphs off", False),
        ("TE CUDA graphs for attention/router", False),
        ("CUDA graph scope attn, moe_router", False),
        ("partial CUDA graphs (moe_router)", False),
        ("CUDA graphs: none", False),
        ("CUDA graphs n/a", False),
        ("", False),
    ],
)
def test_cuda_graphs_of_whole_blocks_are_read(case, note, replayed):
    """Graphs of attention and router leave the launches of the experts."""
    assert case(**MEGATRON, note=note).workload.profile.time.cuda_graphs == replayed


@pytest.mark.parametrize(
    ("note", "deduplicated"),
    [
        ("alltoall dispatcher", False),
        ("plain all-to-all dispatcher", False),
        ("dispatcher alltoall", False),
        ("alltoall replaced by DeepEP", True),
        ("HybridEP, not the alltoall dispatcher", True),
        ("", True),
    ],
)
def test_a_plain_all_to_all_sends_every_copy_of_a_token(case, note, deduplicated):
    cells = {**EXPERTS, **MEGATRON, "ep": "8", "note": note}
    assert case(**cells).workload.profile.time.one_copy_per_node == deduplicated


def test_copies_of_the_optimizer_state_are_read(case):
    """Megatron's `--num-distributed-optimizer-instances`; HSDP alone needs more than one rank of a node."""
    layout = case(num_gpus="64", tp="2", dp="32", zero_stage="1", note="4 optimizer instances (HSDP4)").layout
    assert (layout.dp_shard, layout.dp_replicate) == (8, 4)
    flag = case(
        num_gpus="64", tp="2", dp="32", zero_stage="1", note="--num-distributed-optimizer-instances 2"
    )
    assert (flag.layout.dp_shard, flag.layout.dp_replicate) == (16, 2)
    odd = case(
        num_gpus="40", tp="2", dp="20", zero_stage="1", global_batch="320", note="12 optimizer instances"
    )
    assert (odd.layout.dp_shard, odd.layout.dp_replicate) == (20, 1), "12 do not divide 20"
    whole = case(num_gpus="64", tp="8", dp="8", zero_stage="1", note="HSDP").layout
    assert (whole.dp_shard, whole.dp_replicate) == (8, 1)


def test_parameters_and_states_in_16_bits_are_read(case):
    memory = case(**TITAN, note="parameters AND optimizer states bf16").workload.profile.memory
    assert (memory.master_weights, memory.master_bytes, memory.moment_bytes) == (True, 0, 2)


def test_a_fused_cross_entropy_holds_the_logits_once(case):
    """Transformer Engine's; the recipes' default, `native`, has float32 copies."""
    bridge = {"framework": "Megatron-Bridge 0.1.0", "gpu": "H100"}
    for note, size, moved in (
        ("", 16, 28),
        ("cross-entropy fusion native", 16, 28),
        ("cross-entropy fusion TE", 2, 12),
    ):
        profile = case(**bridge, note=note).workload.profile
        assert (profile.memory.logit_bytes, profile.time.loss_bytes) == (size, moved), note

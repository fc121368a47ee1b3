"""Reading a published row: its cells, its note, and a listed default for each empty cell."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.validation.devices import ALIASES, device_name, known_devices
from meshwright.validation.evaluate import evaluate
from meshwright.validation.limits import fits, read_failed
from meshwright.validation.published import REQUIRED_COLUMNS, family_of, ran_out_of_memory, read_rows

NOTHING_PUBLISHED = {"tp": "", "pp": "", "dp": ""}


def test_complete_row_needs_no_defaults(case):
    found = case()
    layout, work = found.layout, found.workload
    assert found.filled == ()
    assert (layout.tp, layout.pp, layout.dp_shard, layout.zero, layout.micro_batch) == (2, 1, 32, 1, 4)
    assert (work.cluster.devices_per_node, work.cluster.nodes, work.global_batch) == (8, 8, 512)
    assert work.profile.name == "megatron-core"
    assert found.step_s == 2.5
    assert found.is_counted


# Invalid cells


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tp", "two"),
        ("layers", "-3"),
        ("hidden", "0"),
        ("seq_len", "20.5"),
        ("step_time_s", "nan"),
        ("step_time_s", "inf"),
        ("memory_gb_per_gpu", "lots"),
        ("precision", "int3"),
        ("recompute", "perhaps"),
        ("sequence_parallel", "maybe"),
        ("zero_stage", "4"),
    ],
)
def test_invalid_cell_names_its_line_and_column(read, column, value):
    row = read(**{column: value})
    assert row.case is None
    assert row.reason.startswith(f"bad cell in line 7, column {column}: {value!r}")


@pytest.mark.parametrize("blank", ["-", "n/a", "N/A", "\N{EM DASH}", "?", "unknown"])
def test_a_placeholder_is_a_blank_cell(case, blank):
    """Tables write them for axes that a run does not have."""
    found = case(cp=blank, ep=blank, interleave=blank, params_b=blank, kv_heads=blank)
    assert (found.layout.cp, found.layout.ep) == (1, 1)
    assert found.workload.model.num_kv_heads == 32


@pytest.mark.parametrize(
    ("column", "written", "plain"),
    [
        ("params_b", "3.6B", "3.6"),
        ("params_b", "3600M", "3.6"),
        ("seq_len", "2K", "2048"),
        ("step_time_s", "2500 ms", "2.5"),
        ("step_time_s", "2.5s", "2.5"),
        ("memory_gb_per_gpu", "30 GiB", "32.212254720"),
        ("memory_gb_per_gpu", "30GB", "30"),
        ("zero_stage", "ZeRO-1", "1"),
        ("zero_stage", "stage 1", "1"),
        ("recompute", "Full AC", "full"),
        ("recompute", "activation checkpointing", "full"),
        ("recompute", "selective activation checkpointing", "selective"),
        ("recompute", "no recompute", "none"),
    ],
)
def test_a_cell_may_state_its_unit_or_setting_in_words(case, column, written, plain):
    first, second = case(**{column: written}), case(**{column: plain})
    assert (first.workload, first.layout) == (second.workload, second.layout)
    assert first.step_s == second.step_s
    assert first.memory_bytes == (second.memory_bytes and pytest.approx(second.memory_bytes))


@pytest.mark.parametrize(("column", "value"), [("tp", "2s"), ("layers", "30K"), ("seq_len", "2 cups")])
def test_a_unit_of_another_column_is_refused(read, column, value):
    assert read(**{column: value}).reason.startswith(f"bad cell in line 7, column {column}: {value!r}")


def test_fsdp_and_ddp_name_zero_stages(case):
    cells = {"framework": "torchtitan", "tp": "1", "dp": "64"}
    assert [case(**cells, zero_stage=name).layout.zero for name in ("FSDP2", "DDP")] == [3, 0]


@pytest.mark.parametrize(
    ("framework", "note", "zero"),
    [
        ("DeepSpeed ZeRO-2", "", 2),
        ("accelerate", "ZeRO stage 1", 1),
        ("PyTorch DDP", "", 0),
        ("accelerate", "faster than without ZeRO-2", 3),
        ("accelerate", "", 3),
    ],
)
def test_zero_stage_is_also_read_from_framework_and_note(case, framework, note, zero):
    found = case(framework=framework, note=note, zero_stage="", tp="1", dp="64")
    assert found.layout.zero == zero


def test_nodes_times_devices_is_a_number_of_devices(case):
    assert case(num_gpus="8x8").layout.world_size == 64


def test_a_number_before_the_device_counts_the_devices(case):
    found = case(gpu="8xH100", num_gpus="", dp="")
    assert (found.layout.world_size, found.workload.cluster.device_name) == (8, "H100-80GB-SXM")
    assert "assumed num_gpus=8 (from gpu)" in found.filled
    assert case(gpu="8xH100").layout.world_size == 64


def test_a_pipeline_without_a_batch_has_two_micro_batches_per_stage(case):
    """One micro-batch in all would leave every stage but one idle."""
    found = case(global_batch="", pp="4", dp="8")
    assert found.workload.global_batch == 4 * 8 * 8
    assert "assumed global_batch=256 (from the micro-batch, 8 micro-batches)" in found.filled
    assert case(global_batch="", pp="4", dp="8", note="grad_accum=3").workload.global_batch == 4 * 8 * 3


def test_invalid_cell_skips_its_row_only(table):
    rows = read_rows(table({}, {"tp": "x"}, {"id": "made-up-003"}))
    assert [row.case is not None for row in rows] == [True, False, True]
    assert "line 3, column tp" in rows[1].reason
    assert rows[2].id == "made-up-003"


def test_layouts_that_ran_out_of_memory_are_no_runs(tmp_path, table):
    path = table({}, {"id": "made-up-002"})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},result", f"{lines[1]},", f"{lines[2]},OOM"]) + "\n")
    assert [row.id for row in read_rows(path)] == ["made-up-001"]
    assert [row.id for row in read_failed(path)] == ["made-up-002"]
    assert read_failed(table({})) == []


@pytest.mark.parametrize(
    "cells",
    [
        {"result": "OOM (backward)"},
        {"result": "out of memory"},
        {"step_time_s": "OOM"},
        {"memory_gb_per_gpu": "CUDA OOM", "step_time_s": ""},
    ],
)
def test_out_of_memory_may_stand_in_the_place_of_a_measurement(read, cells):
    assert ran_out_of_memory(cells)
    row = read(**cells)
    assert row.case is not None, row.reason
    assert row.memory_bytes is None


def test_a_run_is_not_out_of_memory():
    assert not ran_out_of_memory({"result": "ok", "step_time_s": "2.5", "memory_gb_per_gpu": "70"})
    assert not ran_out_of_memory({"result": "", "note": "OOM with micro-batch 8"})


def test_a_column_that_a_table_lacks_is_blank(tmp_path):
    """Tables of layouts that ran out of memory have no times; a row without an id has its line number."""
    path = tmp_path / "oom.csv"
    path.write_text(
        "model_name,params_b,layers,hidden,seq_len,gpu,num_gpus,tp,pp,global_batch,result\n"
        "GPT-3.6B,3.6,30,3072,2048,A100-80GB-SXM,8,1,1,512,OOM\n"
        "GPT-3.6B,3.6,30,3072,2048,A100-80GB-SXM,64,2,1,512,\n"
    )
    (ran,), (failed,) = read_rows(path), read_failed(path)
    assert (ran.id, failed.id) == ("line 3", "line 2")
    assert ran.case is not None, ran.reason
    assert failed.case is not None, failed.reason
    assert (ran.step_s, ran.case.layout.tp, failed.case.layout.tp) == (None, 2, 1)


@pytest.mark.parametrize("text", [b"", b"id,step_time_s\na,1\n"])
def test_table_without_the_columns_is_refused(tmp_path, text):
    path = tmp_path / "runs.csv"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert [problem.code for problem in caught.value.problems] == ["validate-columns"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_unreadable_table_is_refused(tmp_path, content):
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_bytes(",".join(REQUIRED_COLUMNS).encode() + b"\n" + content)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert [problem.code for problem in caught.value.problems] == ["validate-unreadable"]


def test_family_is_the_id_without_its_number():
    assert [family_of(i) for i in ("bloom-001", "megatron-2020-003", "opt175-001", "a_7", "12")] == [
        "bloom", "megatron-2020", "opt175", "a", "12",
    ]  # fmt: skip


CELLS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "3", "8", "7.5", "-1", "1e3", "1e30", "nan", "inf", "1,024", "y", "full", "mla", "x"]
    ),
    st.text(max_size=8),
)


OTHER_COLUMNS = (
    "id", "heads", "num_gpus", "tp", "pp", "dp", "cp", "ep", "micro_batch", "global_batch", "step_time_s",
    "experts", "top_k", "attention", "note",
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*REQUIRED_COLUMNS, *OTHER_COLUMNS]), CELLS))
def test_evaluation_accepts_any_cell(read, cells):
    outcome = evaluate([read(**cells)])[0]
    assert outcome.case is not None or outcome.reason
    assert outcome.predicted_step_s is None or outcome.predicted_step_s > 0


# Devices


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("H100", "H100-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("H100 PCIe", "H100-80GB-PCIe"),
        ("h100-96gb-hbm2e", "H100-96GB-HBM2e"),
        ("H200", "H200-141GB-SXM"),
        ("H20", "H20-96GB-SXM"),
        ("H800", "H800-80GB-SXM"),
        ("A800 80GB", "A800-80GB-SXM"),
        ("A100", "A100-80GB-SXM"),
        ("A100-SXM4-40GB", "A100-40GB-SXM"),
        ("V100", "V100-32GB-SXM"),
        ("GB200", "GB200-NVL72"),
        ("B200", "B200-180GB-SXM"),
        ("B300", "B300-SXM"),
        ("L40S", "L40S-48GB"),
        ("RTX 4090", "4090-24GB-PCIe"),
        ("V100-SXM2-16GB", "V100-16GB-SXM"),
        ("AMD MI300X", "MI300X-192GB"),
        ("GH200", "GH200-96GB"),
        ("A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("Leonardo A100 64GB", "A100-64GB-SXM"),
        ("H100 NVL", "H100-94GB-NVL"),
        ("H100-64GB", "H100-64GB-SXM"),
        ("V100-PCIe-32GB", "V100-32GB-PCIe"),
        ("MI250X", "MI250X-64GB"),
        ("MI325X", "MI325X-256GB"),
        ("A10G", "A10G-24GB-PCIe"),
        ("A10", "A10-24GB-PCIe"),
        ("A40", "A40-48GB-PCIe"),
        ("RTX A6000", "A6000-48GB-PCIe"),
        ("L40", "L40-48GB-PCIe"),
        ("NVIDIA L4", "L4-24GB-PCIe"),
        ("RTX 3090", "3090-24GB-PCIe"),
        ("RTX 5090", "5090-32GB-PCIe"),
        ("H100 80GB NVLink", "H100-80GB-SXM"),
        ("H100 SXM5 (64 GPUs)", "H100-80GB-SXM"),
        ("H100 x 64", "H100-80GB-SXM"),
        ("A100-80GB x64", "A100-80GB-SXM"),
        ("H100 64GB HBM2", "H100-64GB-SXM"),
    ],
)
def test_common_device_names_are_recognized(case, written, meant):
    found = case(gpu=written, precision="bf16")
    assert found.workload.cluster.device_name == meant
    assert f"gpu {written}: predicted as {meant}" in found.filled


@pytest.mark.parametrize(
    "name", ["TPU v4", "A100-PCIe", "V100-PCIe", "RTX 3090 Ti", "RTX A6000 Ada", "MI100", "H200 NVL"]
)
def test_unknown_device_is_named(read, name):
    row = read(gpu=name)
    assert (row.case, row.reason) == (None, f"no figures for the device {name!r}")


def test_every_device_alias_has_a_preset():
    assert {name for _, name in ALIASES} <= set(known_devices())
    assert all(device_name(name) == name for name in known_devices())


def test_network_rate_is_from_column_note_or_preset(case):
    note = "4x200Gb IB per node (800 Gbps in all)"
    given = case(note=note, nic_gbytes_per_s_per_gpu="6.25").workload.cluster.nic_bytes_per_s
    noted = case(note=note).workload.cluster.nic_bytes_per_s
    assert (given, noted) == (6.25e9, 12.5e9)
    assert case(note="500GB of data per node").workload.cluster.nic_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("note", "gbytes"),
    [
        ("3.2 Tb/s RoCE per node", 50),
        ("1600Gbps per server", 25),
        ("400 Gbps per GPU", 50),
        ("InfiniBand 8x50 GB/s", 50),
        ("NIC 25 GB/s per GPU", 25),
        ("400Gbps inter-node interconnect", 50),
        ("NVLink 900 GB/s per GPU", 50),
        ("reads 3 GB/s per GPU from the network disk", 50),
    ],
)
def test_network_rate_of_a_node_or_a_device_is_read_from_the_note(case, note, gbytes):
    """The preset's 50 GB/s where the note does not say whose network it is."""
    assert case(note=note).workload.cluster.nic_bytes_per_s == gbytes * 1e9


def test_nvl72_racks_are_split_evenly(case):
    shares = {}
    for devices in (8, 72, 256, 1152):
        cluster = case(gpu="GB200-NVL72", num_gpus=str(devices), dp=str(devices // 2)).workload.cluster
        shares[devices] = (cluster.devices_per_node, cluster.nodes)
    assert shares == {8: (8, 1), 72: (72, 1), 256: (64, 4), 1152: (72, 16)}


# Frameworks


@pytest.mark.parametrize(
    ("framework", "gpu", "profile"),
    [
        ("megatron", "A100-80GB-SXM", "megatron-lm"),
        ("megatron", "B200-180GB-SXM", "megatron-core"),
        ("megatron-deepspeed", "A100-80GB-SXM", "megatron-deepspeed"),
        ("gpt-neox", "A100-80GB-SXM", "megatron-deepspeed"),
        ("deepspeed", "V100-32GB-SXM", "deepspeed-zero"),
        ("DeepSpeed", "H100 SXM5 80GB", "huggingface"),
        ("megatron", "NVIDIA A100-SXM4-80GB", "megatron-lm"),
        ("OLMo", "H100", "torchtitan"),
        ("torchtune", "H100", "torchtitan"),
        ("composer-fsdp1", "A100-80GB-SXM", "composer-fsdp"),
        ("torchtitan-fsdp2", "A100-80GB-SXM", "torchtitan"),
        ("nanotron", "H100-80GB-SXM", "megatron-like"),
        ("aa-scaling", "A100-80GB-SXM", "aleph-alpha-scaling"),
        ("internevo (as megatron-core)", "A100-80GB-SXM", "megatron-like"),
        ("transformers accelerate", "A100-80GB-SXM", "huggingface"),
        ("metaseq-fsdp", "A100-80GB-SXM", "composer-fsdp"),
        ("fairscale", "A100-80GB-SXM", "composer-fsdp"),
        ("ms-swift", "H100", "huggingface"),
        ("Megatron-SWIFT", "H100", "megatron-core"),
        ("llama-recipes", "H100", "torchtitan"),
    ],
)
def test_framework_selects_its_profile(case, framework, gpu, profile):
    assert case(framework=framework, gpu=gpu).workload.profile.name == profile


def test_megatron_profile_on_a100_depends_on_the_source(case):
    names = [
        case(gpu="A100-80GB-SXM", source=source).workload.profile.name
        for source in (
            "arXiv 2205.05198 Table 5",
            "arXiv 2402.15627",
            "NVIDIA/NeMo performance_summary.md",
            "",
        )
    ]
    assert names == ["megatron-lm-2022", "megatron-core", "megatron-core", "megatron-lm"]


def test_kernels_and_state_are_read_from_the_note(case):
    llama = {"framework": "llama-factory", "model_name": "LLaMA-7B", "tp": "1", "dp": "64", "zero_stage": "3"}
    plain, liger = case(**llama), case(**llama, note="liger, fa2, pure bf16")
    assert not plain.workload.profile.time.fused_norms
    assert liger.workload.profile.time.fused_norms
    assert liger.workload.profile.time.attention_kernel == "flash-2"
    assert liger.workload.profile.memory.moment_bytes == 2
    assert any("fused_norms=True" in text for text in liger.filled)
    assert any("moment_bytes=2" in text for text in liger.filled)


def test_single_fused_kernels_are_read_from_the_note(case):
    fsdp = {"framework": "torchtitan", "tp": "1", "dp": "64", "zero_stage": "3"}
    note = "fused layernorm, fused rotary embedding, fused SwiGLU, fused cross entropy loss"
    plain, fused, negated = (case(**fsdp, note=text).workload.profile for text in ("", note, "no fused rope"))
    assert (plain.time.fused_norms, plain.time.fused_rope, plain.time.fused_activation) == (False,) * 3
    assert (fused.time.fused_norms, fused.time.fused_rope, fused.time.fused_activation) == (True,) * 3
    assert fused.time.loss_bytes < plain.time.loss_bytes
    assert fused.memory.logit_bytes < plain.memory.logit_bytes
    assert negated == plain


@pytest.mark.parametrize(
    ("note", "fused"),
    [
        ("", False),
        ("FA2", True),
        ("flash_attention=True", True),
        ("FlashAttention", True),
        ("flash_attention=False", False),
        ("without flash attention", False),
    ],
)
def test_fused_attention_is_read_from_the_note_of_any_framework(case, note, fused):
    """Megatron-DeepSpeed of 2022 had none; a run of 2023 says so."""
    found = case(framework="megatron-deepspeed", gpu="A100", note=note).workload.profile
    assert (found.time.flash_attention, found.memory.fused_attention) == (fused, fused)


def test_unfused_attention_is_read_from_the_note(case):
    found = case(framework="deepspeed", gpu="H800", note="no flash attention").workload.profile
    assert (found.time.flash_attention, found.memory.fused_attention) == (False, False)


def test_a_kernel_that_is_off_is_not_read_as_on(case):
    fsdp = {"framework": "torchtitan", "tp": "1", "dp": "64", "zero_stage": "3"}
    on, off = (
        case(**fsdp, note=f"use_fused_rms_norm={word}").workload.profile.time for word in ("True", "False")
    )
    assert (on.fused_norms, off.fused_norms) == (True, False)


@pytest.mark.parametrize(
    ("framework", "ep", "etp", "expected"),
    [
        ("megatron-core", "", "", 2),
        ("megatron-core", "8", "", 2),
        ("megatron-core", "8", "1", 1),
        ("NeMo 25.02", "8", "", 1),
        ("NeMo 25.02", "1", "", 2),
        ("torchtitan", "8", "", 1),
    ],
)
def test_experts_of_megatron_core_are_sharded_over_tp(case, framework, ep, etp, expected):
    """Without it every tensor-parallel rank would hold whole experts."""
    experts = {"experts": "8", "top_k": "2", "params_b": ""}
    assert case(framework=framework, **experts, ep=ep, etp=etp).layout.etp == expected
    assert case(framework=framework, ep=ep, etp="").layout.etp == 1


@pytest.mark.parametrize(
    ("note", "compiled"),
    [
        ("torch.compile", True),
        ("no torch.compile", False),
        ("without torch compile", False),
        ("w/o compile", False),
        ("torch.compile off", False),
        ("compile=False", False),
        ("no offload; compile", True),
        ("", False),
    ],
)
def test_compilation_is_read_from_the_note(case, note, compiled):
    assert case(framework="torchtitan", tp="1", dp="64", note=note).workload.compiled is compiled


@pytest.mark.parametrize(
    ("cells", "masked"),
    [({"framework": "XTuner"}, True), ({"framework": "transformers"}, False),
     ({"framework": "transformers", "cp": "8", "dp": "8"}, True)],
)  # fmt: skip
def test_xtuner_and_context_parallelism_run_flash_attention(case, cells, masked):
    """They pass no mask tensor."""
    found = case(**{"tp": "1", "dp": "64", "zero_stage": "3", **cells})
    rules = found.workload.profile.time
    assert (rules.skips_masked, rules.attention_kernel == "flash-2") == (masked, masked)
    assert any(text.startswith("flash-attn 2, that of") for text in found.filled) is masked


@pytest.mark.parametrize(
    ("note", "kernel"),
    [
        ("FA2", "flash-2"),
        ("SDPA flash v2", "flash-2"),
        ("FA3", "native"),
        ("flash-attention 4", "native"),
        ("FA4", "native"),
        ("attention cudnn_flash_te", "native"),
    ],
)
def test_a_named_attention_kernel_passes_no_mask_tensor(case, note, kernel):
    """At 256K tokens a mask tensor would make a step 20 times as long."""
    found = case(framework="transformers", tp="1", dp="64", zero_stage="3", note=note).workload.profile.time
    assert (found.attention_kernel, found.skips_masked, found.flash_attention) == (kernel, True, True)


@pytest.mark.parametrize(("gpu", "skips"), [("A100", False), ("H100", False), ("B200", True), ("B300", True)])
def test_transformers_of_blackwell_pass_no_mask_tensor(case, gpu, skips):
    found = case(framework="transformers", gpu=gpu, tp="1", dp="64", zero_stage="3").workload.profile.time
    assert found.skips_masked is skips


def test_ligers_cross_entropy_keeps_logits_unless_it_is_fused_with_the_head(case):
    """Its kernel writes the 16-bit gradients over the logits."""
    fsdp = {"framework": "torchtitan", "tp": "1", "dp": "64", "zero_stage": "3"}
    notes = ("liger", "liger CE", "liger CE; fused linear cross entropy")
    found = [case(**fsdp, note=note).workload.profile.memory.logit_bytes for note in notes]
    assert found == [0.5, 2.0, 0.5]


def test_attention_within_packed_documents_is_not_predicted_at_length(read):
    """Their lengths are not published; at 3 widths the whole sequence would be 25% more work."""
    note = "variable-length attention over packed samples"
    short, long = (read(note=note, seq_len=str(size)) for size in (8192, 32768))
    assert short.case is not None
    assert "attention within packed documents: predicted over the whole sequence" in short.reason
    assert long.reason == "attention within packed documents: their lengths are not published"
    assert read(note="documents are packed", seq_len="32768").case is not None


def test_a_named_dispatcher_means_expert_parallelism(case):
    experts = {"experts": "32", "top_k": "4", "tp": "1", "dp": "64", "zero_stage": "3", "ep": ""}
    found = case(**experts, note="DeepEP")
    assert found.layout.ep == 32
    assert any(text.startswith("assumed ep=32") for text in found.filled)
    assert case(**experts).layout.ep == 1
    assert case(**{**experts, "ep": "8"}, note="DeepEP").layout.ep == 8


@pytest.mark.parametrize(("gpu", "precision"), [("V100 16GB", "fp16"), ("A100", "bf16")])
def test_mixed_precision_without_a_type_is_one_that_the_device_has(case, gpu, precision):
    assert case(gpu=gpu, precision="AMP").workload.precision == precision


@pytest.mark.parametrize(
    ("framework", "profile"),
    [
        ("maxtext (as fsdp)", "torchtitan"),
        ("levanter (as megatron-core)", "megatron-like"),
        ("NeMo 25.02", "megatron-bridge"),
        ("NeMo 26.06.01", "megatron-bridge-2026"),
    ],
)
def test_likeness_and_release_are_read_from_the_framework(case, framework, profile):
    found = case(framework=framework, zero_stage="1").workload.profile
    assert found.name == profile
    assert found.time.overlap_ep is (profile == "megatron-bridge-2026")


def test_release_is_also_read_from_the_source(case):
    source = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md (26.08 NeMo Container)"
    assert case(framework="megatron", source=source).workload.profile.name == "megatron-bridge-2026"


@pytest.mark.parametrize(
    ("gpu", "framework", "attention", "fused"),
    [
        ("GB200-NVL72", "NeMo 25.02", "mla", False),
        ("GB200-NVL72", "NeMo 25.07", "mla", True),
        ("GB200-NVL72", "NeMo 25.02", "mha", True),
        ("H100-80GB-SXM", "NeMo 25.02", "mla", True),
        ("GB200-NVL72", "megatron", "mla", True),
    ],
)
def test_latent_attention_on_blackwell_needs_a_recent_cudnn(case, gpu, framework, attention, fused):
    found = case(gpu=gpu, framework=framework, attention=attention, params_b="").workload.profile
    assert (found.time.flash_attention, found.memory.fused_attention) == (fused, fused)


def test_expert_dispatch_is_read_from_the_note(case):
    rules = case(note="EP overlap; fp8 dispatch; tokens go to at most 4 nodes").workload.profile.time
    assert (rules.overlap_ep, rules.fp8_dispatch, rules.max_nodes_per_token) == (True, True, 4)
    plain = case(note="DeepEP; experts balanced").workload.profile.time
    assert (plain.overlap_ep, plain.fp8_dispatch) == (False, False)
    assert plain.max_nodes_per_token == float("inf")


def test_blocking_launches_are_read_from_the_note(case):
    assert case(note="tuning run; CUDA_LAUNCH_BLOCKING=1").workload.profile.time.blocking_launches
    assert not case(note="CUDA_LAUNCH_BLOCKING=0").workload.profile.time.blocking_launches


def test_deepseek_v3_s_own_run_is_sensible_and_fits(read):
    """2.664M H800 hours for 14.8T tokens on 2,048 devices: 19.9 s per step (arXiv 2412.19437)."""
    row = read(
        model_name="DeepSeek-V3", params_b="", layers="61", hidden="7168", heads="128", kv_heads="128",
        ffn_hidden="18432", vocab="129280", experts="256", top_k="8", moe_ffn="2048", shared_experts="1",
        dense_layers="3", attention="mla", seq_len="4096", gpu="H800-80GB-SXM", num_gpus="2048", tp="1",
        pp="16", dp="128", ep="64", micro_batch="1", global_batch="15360", recompute="", precision="fp8",
        framework="hai-llm", note="DualPipe; with MTP", step_time_s="19.9",
    )  # fmt: skip
    found = evaluate([row])[0]
    assert abs(found.step_error) < 0.15
    assert fits(found.case)


@pytest.mark.parametrize(
    ("recompute", "note", "modules"),
    [
        ("mla_up_proj,layernorm", "", ("mla_up_proj", "layernorm")),
        ("selective", "RMSNorm and MLA up-projection recomputed; bf16", ("mla_up_proj", "layernorm")),
        ("selective", "recompute of moe_act; fused norms", ("act",)),
        ("selective", "fused RMSNorm", ()),
        ("full", "", ()),
    ],
)
def test_recomputed_modules_are_read_from_cell_and_note(case, recompute, note, modules):
    found = case(recompute=recompute, note=note)
    assert found.workload.profile.memory.recomputed_modules == modules


def test_offloaded_activations_leave_the_device(read):
    """They are not offloaded optimizer state; copies that compute does not hide take time."""
    cells = {"micro_batch": "4", "seq_len": "8192", "recompute": "none"}
    notes = ("", "no activation offload", "activation offload", "activation offload; optimizer offload")
    plain, negated, moved, both = (evaluate([read(**cells, note=note)])[0] for note in notes)
    assert [one.case.layout.offload for one in (plain, negated, moved, both)] == ["none"] * 3 + ["optimizer"]
    assert negated.predicted_memory_bytes == plain.predicted_memory_bytes
    assert both.predicted_memory_bytes < moved.predicted_memory_bytes < 0.5 * plain.predicted_memory_bytes
    assert plain.predicted_step_s < moved.predicted_step_s < both.predicted_step_s


def test_a_tensor_mask_is_computed_unless_the_kernel_is_named(case):
    llama = {"framework": "transformers", "model_name": "LLaMA-7B", "tp": "1", "dp": "64", "zero_stage": "3"}
    plain, named = (case(**llama, note=note).workload.profile.time for note in ("", "FA2"))
    assert (plain.skips_masked, named.skips_masked) == (False, True)


@pytest.mark.parametrize("cells", [{"note": "LoRA rank 16"}, {"model_name": "Llama-3-8B QLoRA"}])
def test_adapters_are_refused_by_name(read, cells):
    """They are never predicted as full training."""
    row = read(**cells)
    assert row.case is None
    assert "lora: training of adapters is not planned" in row.reason.lower()


def test_a_narrow_network_does_not_change_the_links_inside_a_node(case):
    """Only a note names the machine; 6.25 GB/s per device are common."""
    wide = known_devices()["A100-80GB-SXM"].link_bytes_per_s
    slow = case(gpu="A100-80GB-SXM", nic_gbytes_per_s_per_gpu="6.25")
    assert slow.workload.cluster.link_bytes_per_s == wide
    named = case(gpu="A100-80GB-SXM", note="4x Omni-Path 100Gb per node")
    assert named.workload.cluster.link_bytes_per_s < wide


def test_zero_3_with_old_megatron_selects_deepspeed(case):
    found = case(gpu="A100-80GB-SXM", zero_stage="3", tp="1", dp="64")
    assert found.workload.profile.name == "deepspeed-zero"
    assert any("deepspeed-zero" in text for text in found.filled)


def test_unknown_framework_gets_the_nearest_profile(case):
    found = case(framework="homegrown", zero_stage="3", tp="1", dp="64")
    assert found.workload.profile.name == "torchtitan"
    assert "framework homegrown: predicted as torchtitan, the nearest profile" in found.filled


@pytest.mark.parametrize(
    ("note", "overlaps"),
    [
        ("2D compile+float8+AsyncTP", True),
        ("async TP; fp8 rowwise", True),
        ("vanilla TP; bf16", False),
        ("", False),
    ],
)
def test_tensor_parallel_overlap_is_read_from_the_note(case, note, overlaps):
    found = case(framework="torchtitan-fsdp2", note=note)
    assert found.workload.profile.time.overlap_tp is overlaps
    assert found.workload.profile.name == "torchtitan"


@pytest.mark.parametrize(
    ("note", "precision", "recipe"),
    [
        ("recipe mxfp8", "fp8", "mxfp8"),
        ("recipe fp8-mx", "fp8", "mxfp8"),
        ("recipe fp8-cs (fp8-mx)", "fp8", "current"),
        ("fp8 rowwise", "fp8", "rowwise"),
        ("fp8 tensorwise", "fp8", "current"),
        ("recipe nvfp4", "fp4", "nvfp4"),
        ("", "fp4", "nvfp4"),
        ("", "mxfp8", "mxfp8"),
        ("recipe mxfp8", "bf16", ""),
    ],
)
def test_low_precision_recipe_is_read_from_the_note(case, note, precision, recipe):
    work = case(note=note, precision=precision, gpu="B200-180GB-SXM").workload
    assert work.recipe == recipe
    assert work.precision in ("bf16", "fp8", "fp4")


def test_missing_recipe_is_the_framework_default(case):
    found = case(precision="fp8", framework="composer-fsdp1")
    assert found.workload.recipe == "delayed"
    assert "assumed recipe=delayed" in found.filled


@pytest.mark.parametrize(
    ("cells", "compiled"),
    [
        ({"note": "FSDP+compile"}, True),
        ({"note": "FSDP"}, False),
        ({"note": "no compile"}, False),
        ({"note": "FSDP", "precision": "fp8"}, True),
        ({"source": "benchmarks/asyncTP_llama3.md", "note": "vanilla TP"}, True),
    ],
)
def test_torchtitan_compile_is_read_from_the_note(case, cells, compiled):
    assert case(framework="torchtitan-fsdp2", **cells).workload.compiled is compiled


# Layouts


def test_unpublished_layout_is_not_expressed(read):
    assert read(**NOTHING_PUBLISHED).reason == "layout not published"
    assert read(pp="", dp="").reason == "pp not published"
    assert read(num_gpus="", dp="").reason == "num_gpus not published"


def test_degrees_must_multiply_to_the_devices(read, case):
    assert read(dp="16").reason == "the product of the degrees is 32, not 64 devices"
    assert case(dp="").filled == ("assumed dp=32 (devices over the other degrees)",)
    assert case(num_gpus="").workload.cluster.world_size == 64
    assert case(cp="4").layout.dp_shard == 8, "a published dp that includes cp is divided by it"


def test_micro_batch_is_at_most_the_samples_per_rank(case):
    found = case(global_batch="64", micro_batch="8", dp="32")
    assert found.layout.micro_batch == 2
    assert "micro_batch=8: predicted with 2, the samples per rank" in found.filled


def test_ep_that_does_not_divide_is_listed(case):
    cells = {"experts": "8", "top_k": "2", "moe_ffn": "4096", "params_b": ""}
    assert "ep=3 does not divide dp x cp x tp=64" in case(**cells, ep="3").filled
    assert not any("does not divide" in text for text in case(**cells, ep="8").filled)


@pytest.mark.parametrize("written", ["mixed", "AMP", "16-mixed"])
def test_mixed_precision_is_read_as_bf16(case, written):
    found = case(precision=written)
    assert found.workload.precision == "bf16"
    assert f"precision {written.lower()}: predicted as bf16" in found.filled


def test_fsdp_framework_needs_no_degrees(case):
    layout = case(framework="torchtitan", zero_stage="", **NOTHING_PUBLISHED).layout
    assert (layout.tp, layout.pp, layout.dp_shard, layout.zero) == (1, 1, 64, 3)


@pytest.mark.parametrize(
    ("note", "shard", "replicate"),
    [
        ("FSDP=64", 32, 1),
        ("FSDP=16", 16, 2),
        ("HSDP", 4, 8),
        ("hybrid sharding", 4, 8),
        ("dp_shard=8", 8, 4),
        ("sharded over 8 ranks", 8, 4),
        ("FSDP2; selective op AC", 32, 1),
        ("FSDP FULL_SHARD; grad_accum=2", 32, 1),
    ],
)
def test_hybrid_sharding_is_read_from_the_note(case, note, shard, replicate):
    layout = case(zero_stage="3", note=note, framework="torchtitan").layout
    assert (layout.dp_shard, layout.dp_replicate) == (shard, replicate)


@pytest.mark.parametrize(
    ("framework", "gpu", "zero", "recompute", "parallel"),
    [
        ("torchtitan", "H100-80GB-SXM", 3, "selective", True),
        ("megatron", "H100-80GB-SXM", 1, "none", True),
        ("megatron", "A100-80GB-SXM", 0, "none", False),
        ("composer-fsdp1", "A100-80GB-SXM", 3, "none", False),
    ],
)
def test_empty_cells_get_the_framework_defaults(case, framework, gpu, zero, recompute, parallel):
    found = case(framework=framework, gpu=gpu, zero_stage="", recompute="", sequence_parallel="")
    assert (found.layout.zero, found.layout.recompute, found.layout.sequence_parallel) == (
        zero,
        recompute,
        parallel,
    )
    assumed = {text.removeprefix("assumed ").partition("=")[0] for text in found.filled}
    assert assumed >= {"zero_stage", "recompute", "sequence_parallel"}


def test_schedule_is_read_from_columns_and_note(case):
    four = {"pp": "4", "dp": "8"}
    assert case(**four).layout.schedule == "1f1b"
    assert case(**four, interleave="5").layout.virtual_stages == 5
    assert case(**four, interleave="").filled == ("assumed interleave=1",)
    assert case(**{**four, "interleave": ""}, note="Interleaved 1F1B").layout.virtual_stages == 2
    assert case(**{**four, "interleave": ""}, note="before interleaved schedule").layout.virtual_stages == 1
    assert case(**four, note="zero bubble").layout.schedule == "zb-h1"


def test_missing_micro_batch_is_chosen(case):
    blank = {"micro_batch": "", "pp": "8", "tp": "1", "dp": "8", "interleave": "1"}
    assert case(**blank, framework="torchtitan").layout.micro_batch == 512 // 8 // 8
    assert case(**blank, note="grad_accum=32").layout.micro_batch == 2
    ours = case(**blank)
    assert ours.layout.micro_batch in (1, 2, 4), "at least two micro-batches per stage"
    assert any(text.startswith("assumed micro_batch=") for text in ours.filled)


@pytest.mark.parametrize(("gpu", "heads", "samples"), [
    ("A100-80GB-SXM", "64", 1), ("A100-80GB-SXM", "48", 2), ("H100-80GB-SXM", "48", 1),
])  # fmt: skip
def test_old_megatron_micro_batch_suits_the_softmax_kernel(case, gpu, heads, samples):
    """6 heads per rank are not a multiple of 4; 12 are. Fused attention has no such kernel."""
    cells = {"micro_batch": "", "tp": "8", "dp": "8", "hidden": "6144", "heads": heads, "kv_heads": heads}
    assert case(framework="megatron", gpu=gpu, **cells).layout.micro_batch == samples


def test_missing_global_batch_is_read_from_the_note(read, case):
    assert case(global_batch="", note="local batch 16").workload.global_batch == 16 * 32
    assert case(global_batch="", note="grad_accum=4").workload.global_batch == 4 * 4 * 32
    assert case(global_batch="", micro_batch="", note="4M tokens per batch").workload.global_batch == 2048
    assert read(global_batch="", micro_batch="").reason == "global_batch not published"


def test_tokens_per_second_give_the_step_time(case):
    found = case(step_time_s="", tokens_per_s_per_gpu="4096")
    assert found.step_s == pytest.approx(512 * 2048 / (4096 * 64))
    assert "step time from tokens per second" in found.filled
    assert case(step_time_s="", tflops_per_gpu="400").step_s is None


@pytest.mark.parametrize(
    ("note", "framework", "kind"),
    [
        ("memory = peak ALLOCATED (reserved 40 GiB)", "megatron", "allocated"),
        ("theoretical, not allocator peak", "megatron", "formula"),
        ("", "megatron-deepspeed", "device"),
        ("", "torchtitan", "reserved"),
    ],
)
def test_memory_kind_is_read_from_note_and_framework(case, note, framework, kind):
    assert case(note=note, framework=framework, gpu="H100-80GB-SXM").memory_kind == kind


@pytest.mark.parametrize(
    ("note", "size"),
    [
        ("Alps, 4 GH200 per node, Slingshot", 4),
        ("JUPITER, 4 GH200 (95 GiB usable of 96) per node, 4xNDR200", 4),
        ("Nebius, 2 nodes x 8 H100 SXM 80 GB, 8x400 Gb/s IB per node", 8),
        ("nodes of 2 A100 SXM", 2),
        ("4 GPUs per node", 4),
        ("2 nodes x 4 RTX 5090 32 GB", 4),
        ("4 H100s per node", 4),
        ("4 h100/node", 4),
        ("4 GPUs per Node", 4),
        ("64 H100 with 4 GPUs per node", 4),
        ("64 H100 (8 per node)", 8),
        ("32 H100 (400 Gb/s per node)", 8),
        ("64 H100 80GB with 4x400 Gb/s IB per node", 8),
        ("512 A100 80GB with 4x200Gb IB per node", 8),
        ("4x200Gb IB per node", 8),
        ("2 nodes, 4xNDR400 per node", 8),
        ("1.6 Tb/s per node", 8),
    ],
)
def test_devices_of_a_node_are_read_from_the_note(case, note, size):
    """Adapters and the devices of all nodes are not those of a node: the last seven keep the preset's 8."""
    assert case(note=note).workload.cluster.devices_per_node == size

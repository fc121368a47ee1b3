"""The legality table: every rule has a case that breaks it, an error code and a fix."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.legality.nearest import nearest_legal_layout
from meshwright.spec.legality.table import RULES, find_problems, with_layout
from meshwright.spec.load import SpecError, build_job, job_tree, require_runnable
from meshwright.spec.model import READ_WITH
from meshwright.spec.numbers import divisors

RESNET = {"preset": None, "architecture": "resnet", "blocks": [1, 1], "num_classes": 10, "image_size": 32}
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
LATENT = {"attention": "latent", "latent_size": 32, "rope_head_dim": 8, "num_kv_heads": 4}
CASES = {
    "model-heads-width": {"model": {"num_heads": 6}},
    "model-head-dim-odd": {"model": {"head_dim": 7}},
    "model-kv-heads": {"model": {"num_kv_heads": 3}},
    "layout-tp-heads": {"layout": {"tp": 3}},
    "layout-tp-kv-heads": {
        "layout": {"tp": 6},
        "model": {"num_heads": 12, "num_kv_heads": 4, "head_dim": 16},
    },
    "layout-tp-ffn": {"layout": {"tp": 2}, "model": {"ffn_size": 129}},
    "layout-pp-layers": {"layout": {"pp": 4}},
    "layout-interleaved": {"layout": {"pp": 2, "schedule": "interleaved"}},
    "layout-virtual-stages": {"layout": {"pp": 2, "virtual_stages": 2}, "model": {"num_layers": 4}},
    "layout-schedule-pp": {"layout": {"schedule": "zb-h1", "dp_replicate": 2}},
    "layout-stage-layers": {"layout": {"pp": 2, "stage_layers": [1, 2]}},
    "layout-schedule-file": {"layout": {"pp": 2, "schedule_file": "own.csv", "schedule": "gpipe"}},
    "layout-dualpipe": {
        "layout": {"pp": 2, "schedule": "dualpipe-v", "micro_batch": 4},
        "model": {"num_layers": 4},
    },
    "layout-ep-experts": {"layout": {"ep": 3, "dp_shard": 3}, "model": EXPERTS},
    "layout-ep-ranks": {"layout": {"ep": 4, "dp_replicate": 4}, "model": EXPERTS},
    "layout-etp-ffn": {"layout": {"etp": 3, "dp_shard": 3}, "model": EXPERTS},
    "layout-ulysses-heads": {"layout": {"cp": 8, "context": "ulysses"}},
    "layout-sequence-parallel-len": {
        "layout": {"tp": 4, "sequence_parallel": True},
        "data": {"seq_len": 30},
    },
    "layout-zero-dp-shard": {"layout": {"dp_shard": 2, "zero": 0}},
    "layout-zero-unsharded": {"layout": {"dp_replicate": 2, "zero": 1}},
    "layout-context-cp": {"layout": {"context": "ulysses", "dp_replicate": 2}},
    "layout-tp-routed": {"layout": {"tp": 4}, "model": EXPERTS, "data": {"seq_len": 30}},
    "layout-cp-seq-len": {"layout": {"cp": 2}, "data": {"seq_len": 30}},
    "layout-ep-dense": {"layout": {"ep": 2}},
    "layout-sequence-parallel-tp": {"layout": {"dp_replicate": 2, "sequence_parallel": True}},
    "layout-virtual-stages-pp": {"layout": {"dp_replicate": 2, "virtual_stages": 2}},
    "layout-placement-auto": {"layout": {"placement": [0, 1]}},
    "layout-placement-length": {"layout": {"dp_replicate": 2, "placement": [0, 1, 2]}},
    "layout-placement-slots": {"layout": {"dp_replicate": 2, "placement": [1, 1]}},
    "layout-backup-auto": {"layout": {"backup_replicas": 1}},
    "layout-backup-replicas": {"layout": {"dp_replicate": 2, "backup_replicas": 2}},
    "layout-backup-not-built": {"layout": {"dp_replicate": 3, "backup_replicas": 1, "offload": "optimizer"}},
    "train-all-reduce-auto": {"train": {"all_reduce": "hierarchical"}},
    "train-all-reduce-axis": {"train": {"all_reduce": "hierarchical"}, "layout": {"tp": 2}},
    "train-all-reduce-not-built": {"train": {"all_reduce": "hierarchical"}, "layout": {"dp_shard": 2}},
    "layout-world-size": {"layout": {"dp_replicate": 9}},
    "layout-micro-batch": {"layout": {"micro_batch": 9}},
    "model-experts-per-token": {"model": {"num_experts": 4, "experts_per_token": 5}},
    "model-dense-layers": {"model": {**EXPERTS, "dense_layers": 2}},
    "model-experts-per-token-unused": {"model": {"experts_per_token": 2}},
    "model-expert-ffn-size-unused": {"model": {"expert_ffn_size": 64}},
    "model-shared-experts-unused": {"model": {"shared_experts": 1}},
    "model-dense-layers-unused": {"model": {"dense_layers": 1}},
    "model-router-unused": {"model": {"router": "sigmoid"}},
    "model-capacity-factor-unused": {"model": {"capacity_factor": 1.25}},
    "train-balance-loss-unused": {"train": {"balance_loss": 0.01}},
    "train-balance-rate-unused": {"train": {"balance_rate": 0.001}},
    "train-z-loss-unused": {"train": {"z_loss": 0.001}},
    "model-latent": {"model": {**LATENT, "num_kv_heads": 2}},
    "model-latent-size-unused": {"model": {"latent_size": 32}},
    "model-query-latent-size-unused": {"model": {"query_latent_size": 32}},
    "model-rope-head-dim-unused": {"model": {"rope_head_dim": 8}},
    "model-value-head-dim-unused": {"model": {"value_head_dim": 8}},
    "model-window-every": {"model": {"window": 8, "window_every": 3}},
    "model-window-every-unused": {"model": {"window_every": 2}},
    "cluster-spine-oversubscription-unused": {"cluster": {"spine_oversubscription": 2.0}},
    "cluster-spine-latency-unused": {"cluster": {"spine_latency_s": 1e-4}},
    "model-max-positions": {"model": {"positions": "learned", "max_positions": 16}},
    "model-rope-factors": {"model": {"rope_factor": 8.0, "rope_low_freq_factor": 4.0}},
    "model-rope-low-freq-factor-unused": {"model": {"rope_low_freq_factor": 2.0}},
    "model-rope-high-freq-factor-unused": {"model": {"rope_high_freq_factor": 8.0}},
    "model-rope-original-positions-unused": {"model": {"rope_original_positions": 4096}},
    "model-rope-theta-unused": {"model": {"positions": "learned", "max_positions": 64, "rope_theta": 5e5}},
    "model-rope-factor-unused": {"model": {"positions": "learned", "max_positions": 64, "rope_factor": 8.0}},
    "model-norm-groups": {"model": {**RESNET, "norm_groups": 7}},
    "model-norm-groups-unused": {"model": {**RESNET, "norm": "batch", "norm_groups": 8}},
    "data-not-for-images": {"model": RESNET, "data": {"seq_len": 32}},
    "data-not-for-text": {"data": {"path": "builtin:synthetic-images"}},
    "data-already-split": {
        "model": RESNET,
        "data": {"path": "builtin:synthetic-images", "eval_fraction": 0.1},
    },
    "layout-image-axes": {"model": RESNET, "layout": {"tp": 2}},
    "layout-recompute-images": {"model": RESNET, "layout": {"recompute": "selective"}},
    "layout-batch-norm": {"model": {**RESNET, "norm": "batch"}, "layout": {"dp_replicate": 3}},
    "train-not-for-images": {"model": RESNET, "train": {"optimizer": "muon"}},
    "train-loss-scale": {"train": {"loss_scale": 8.0}},
    "train-compile-backend": {"train": {"compile_backend": "aot_eager"}},
    "train-transport": {"train": {"transport": "gloo"}, "cluster": {"device": "cuda"}},
    "train-fp8-weight-grads": {"train": {"fp8_weight_grads": True}},
    "train-gemm-autotune": {"train": {"gemm_autotune": True}},
    "train-grad-dtype": {"train": {"grad_dtype": "bf16"}},
    "train-lr-base-batch": {"train": {"lr_scaling": "linear"}},
    "store-url": {"checkpoint": {"dir": "gs://bucket/x"}},
    "checkpoint-store-twice": {"checkpoint": {"dir": "s3://bucket/x", "stores": ["s3://bucket/x/"]}},
    "checkpoint-quorum": {"checkpoint": {"stores": ["s3://bucket/x"], "quorum": 3}},
    "train-rollback-restarts": {"train": {"on_bad_step": "rollback"}, "elastic": {"restarts": 0}},
    "elastic-straggler-restarts": {"elastic": {"straggler": "replace", "restarts": 0}},
    "elastic-straggler-may-change": {"elastic": {"straggler": "exclude"}},
    "train-beta1-unused": {"train": {"optimizer": "sgd", "beta1": 0.9}},
    "train-beta2-unused": {"train": {"optimizer": "sgd", "beta2": 0.95}},
    "train-eps-unused": {"train": {"optimizer": "lion", "eps": 1e-8}},
    "train-momentum-unused": {"train": {"momentum": 0.0}},
    "train-nesterov-unused": {"train": {"nesterov": False}},
    "train-min-lr-ratio-unused": {"train": {"schedule": "constant", "min_lr_ratio": 0.1}},
    "train-decay-fraction-unused": {"train": {"decay_fraction": 0.2}},
    "train-residual-dtype": {
        "train": {"residual_dtype": "bf16", "precision": "bf16", "block_backend": "eager"}
    },
    "data-eval-name": {"data": {"eval": [{"name": "old", "path": "a"}, {"name": "old", "path": "b"}]}},
    "train-nesterov-momentum": {"train": {"optimizer": "sgd", "momentum": 0.0, "nesterov": True}},
    "train-wsd-room": {"train": {"schedule": "wsd", "warmup": 3, "decay_fraction": 0.5}},
    "train-noise-scale-parts": {"train": {"noise_scale_every": 1}, "layout": {"micro_batch": 8}},
    "layout-accumulate-zero": {"layout": {"accumulate": "deferred", "dp_shard": 2, "zero": 1}},
    "layout-prefetch-zero": {"layout": {"prefetch": 2, "dp_shard": 2, "zero": 2}},
    "layout-offload-fp16": {
        "layout": {"offload": "all", "dp_shard": 2, "zero": 3},
        "train": {"precision": "fp16"},
    },
    "layout-accumulate-compression": {
        "layout": {"accumulate": "deferred", "dp_shard": 2},
        "compression": {"kind": "bf16"},
    },
    "model-attention-not-built": {"model": LATENT},
    "model-window-not-built": {"model": {"window": 8}},
    "train-runtime-not-built": {"train": {"runtime": "megatron-core"}},
    "layout-offload-not-built": {"layout": {"offload": "all"}},
    "train-fp8-not-built": {"train": {"precision": "fp8", "block_backend": "eager"}},
    "train-precision-device": {"train": {"precision": "fp4"}},
    "train-precision-not-built": {"train": {"precision": "fp4"}, "cluster": {"preset": "b200"}},
    "train-muon-not-built": {"train": {"optimizer": "muon"}, "layout": {"tp": 2}},
    "train-noise-scale-not-built": {"train": {"noise_scale_every": 1}, "layout": {"pp": 2}},
    "data-template-needed": {"data": {"answer_field": "output"}},
    "data-path-or-sources": {"data": {"sources": [{"name": "a", "path": "a"}]}},
    "data-source-names": {"data": {"path": "", "sources": [{"name": "a", "path": p} for p in "ab"]}},
    "data-weights-zero": {"data": {"path": "", "sources": [{"name": "a", "path": "a", "weight": 0.0}]}},
    "consistency-mode-not-built": {"consistency": {"mode": "gossip"}},
    "compression-kind-not-built": {"compression": {"kind": "topk"}},
}
"""For each rule: changes to the valid job that break it."""
PLAN_CASES = {
    "cluster-links-missing": {"cluster": {"preset": "local", "device": "cuda", "nodes": 2}},
}
"""For each rule that only planning checks: changes to the valid job that break it."""


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.code for rule in RULES if not rule.plan_only}
    assert set(PLAN_CASES) == {rule.code for rule in RULES if rule.plan_only}


def test_error_codes_of_rules_are_unique():
    found = [rule.code for rule in RULES]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("code", CASES)
def test_each_rule_is_reported_with_a_fix(refused, code):
    problem = next(p for p in refused(**CASES[code]) if p.code == code)
    assert problem.fix, "a rule names the nearest fix"
    assert problem.path, "a rule names the key"
    assert str(problem).endswith(f"[{code}]")


@pytest.mark.parametrize("code", PLAN_CASES)
def test_each_planning_rule_is_reported_and_hides_no_unsupported_setting(tree, refused, code):
    """A run of the same job is refused too, here or by its command, under another code."""
    made = tree(**PLAN_CASES[code])
    with pytest.raises(SpecError) as caught:
        build_job(made, to_run=False)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.fix
    assert build_job(made).cluster.nodes == 2, "the train command checks the machine"


@pytest.mark.parametrize(
    "other",
    [
        {"block_backend": "eager"},
        {"block_backend": "compile"},
        {"precision": "fp16"},
        {"optimizer": "lion"},
        {"grad_noise": 0.1},
    ],
    ids=str,
)
def test_bf16_grad_dtype_needs_a_supported_recipe(tree, refused, other):
    """Each case changes one setting of a supported recipe. The layout has no influence."""
    train = {"grad_dtype": "bf16", "precision": "bf16", "block_backend": "triton"}
    for layout in ({}, {"dp_replicate": 2}, {"micro_batch": 1}, {"tp": 2}):
        assert build_job(tree(train=train, layout=layout)).train.grad_dtype == "bf16"
    (problem,) = (p for p in refused(train=train | other) if p.code == "train-grad-dtype")
    assert problem.fix.startswith("Leave train.grad_dtype out, or")


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"train": {"block_backend": "eager"}}, "needs train.block_backend=compile"),
        ({"train": {"block_backend": "compile"}, "model": EXPERTS}, "model.num_experts=4"),
        ({"train": {"block_backend": "compile"}, "layout": {"pp": 2}}, "layout.pp=2"),
        ({"train": {"block_backend": "compile"}, "layout": {"tp": 2}}, "layout.tp=2"),
        ({"model": RESNET}, "convolution"),
    ],
)
def test_unsupported_fp8_names_the_reason_and_bf16(refused, tables, reason):
    problems = refused(**tables | {"train": {**tables.get("train", {}), "precision": "fp8"}})
    (problem,) = (p for p in problems if p.code == "train-fp8-not-built")
    assert reason in problem.rule
    assert "train.precision=bf16" in problem.fix


def test_fp8_of_a_compiled_dense_decoder_is_legal(tree, refused):
    """It runs on CPUs and on GPUs with fp8 units. An A100 is refused."""
    train = {"precision": "fp8", "block_backend": "compile"}
    for layout in ({"dp_replicate": 2}, {"dp_shard": 2}, {"cp": 2}):
        assert build_job(tree(train=train, layout=layout)).train.precision == "fp8"
    assert build_job(tree(train=train, cluster={"preset": "h200-sxm"})).cluster.device == "cuda"
    assert "train-precision-device" in [
        p.code for p in refused(train=train, cluster={"preset": "a100-80g-sxm"})
    ]


UNPLANNED = {
    "layout-backup-not-built",
    "train-all-reduce-not-built",
    "consistency-mode-not-built",
    "compression-kind-not-built",
}
IDLE = {"layout-context-not-built"}
"""Their case has no effect at all, so planning refuses it under another code."""


@pytest.mark.parametrize("code", [c for c in CASES if c.endswith("-not-built") and c not in IDLE])
def test_unsupported_settings_can_be_planned_if_they_are_predicted(tree, code):
    """A setting that no formula reads would be ignored silently, so planning refuses it too."""
    made = tree(**CASES[code])
    if code in UNPLANNED:
        with pytest.raises(SpecError) as caught:
            build_job(made, to_run=False)
        assert [p.code for p in caught.value.problems] == [code]
        return
    job = build_job(made, to_run=False)
    assert code in [p.code for p in find_problems(job)]
    assert find_problems(job, to_run=False) == []


def test_plan_only_job_is_refused_for_runs_with_the_job_attached(tree):
    """The error carries the job, so that a command can still predict it."""
    job = build_job(tree(model={"window": 8}), to_run=False)
    with pytest.raises(SpecError) as caught:
        require_runnable(job)
    assert [p.code for p in caught.value.problems] == ["model-window-not-built"]
    assert caught.value.job is job
    require_runnable(build_job(tree()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_has_a_documented_statement(rule):
    assert rule.statement.endswith(".")
    assert "`" in rule.statement or rule.code == "layout-world-size"


def test_codes_of_unsupported_settings_end_in_not_built():
    assert all((not rule.built) == rule.code.endswith("-not-built") for rule in RULES)


def test_rules_for_unsupported_settings_come_last():
    built = [rule.built for rule in RULES]
    assert built == sorted(built, reverse=True)


def test_a_legal_job_breaks_no_rule(tree):
    assert find_problems(build_job(tree())) == []


def test_tp_heads_message_is_the_documented_one(refused):
    (problem,) = refused(model={"preset": "llama3-8b"}, layout={"tp": 6})
    assert str(problem) == (
        "layout.tp=6 does not divide model.num_heads=32; heads split evenly over tp. "
        "Use 1, 2, 4, 8, 16 or 32. [layout-tp-heads]"
    )


def test_illegal_value_hides_the_unsupported_rule_of_its_key(refused):
    assert [p.code for p in refused(layout={"tp": 3})] == ["layout-tp-heads"]


def test_several_illegal_settings_are_all_reported(refused):
    problems = refused(layout={"tp": 3, "pp": 4, "cp": 2}, data={"seq_len": 30}, train={"precision": "fp8"})
    assert {p.path for p in problems} >= {"layout.tp", "layout.pp", "layout.cp", "train.precision"}


def test_more_ranks_than_devices_is_legal_on_cpu_but_not_on_gpus(tree, refused):
    local = {"preset": "local", "device": "cpu", "devices_per_node": 2}
    assert build_job(tree(cluster=local, layout={"dp_replicate": 4})).layout.world_size == 4
    assert "layout-world-size" in [p.code for p in refused(layout={"dp_replicate": 9})]


@pytest.mark.parametrize("degree", range(1, 9))
def test_data_degree_need_not_divide_the_global_batch(tree, degree):
    """Ranks with fewer samples run zero-weight micro-batches."""
    assert (
        build_job(tree(layout={"dp_replicate": degree}, train={"global_batch": 5})).layout.dp_replicate
        == degree
    )


def test_explicit_head_dim_need_not_divide_hidden_size(tree):
    assert build_job(tree(model={"num_heads": 6, "head_dim": 16})).model.query_size == 96


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_lr_base_batch_needs_lr_scaling(tree, refused, scaling):
    build_job(tree(train={"lr_scaling": scaling, "lr_base_batch": 4}))
    assert [p.path for p in refused(train={"lr_base_batch": 4})] == ["train.lr_base_batch"]


def test_all_keys_unused_by_the_optimizer_are_reported(refused):
    """The fix names the optimizers that use the key. An explicit default value is refused as well."""
    problems = refused(train={"optimizer": "sgd", "beta1": 0.9, "eps": 1e-8, "decay_fraction": 0.1})
    assert {p.code for p in problems} == {
        "train-beta1-unused",
        "train-eps-unused",
        "train-decay-fraction-unused",
    }
    assert str(problems[0]) == (
        "train.beta1=0.9 has no effect with train.optimizer=sgd. "
        "Leave it out, or use train.optimizer=adamw, lion or muon. [train-beta1-unused]"
    )


@pytest.mark.parametrize(
    ("train", "layout"),
    [
        ({"global_batch": 1}, {"dp_replicate": 2}),
        ({"global_batch": 8}, {"micro_batch": 8}),
        ({"global_batch": 8}, {"micro_batch": 8, "dp_replicate": 1}),
    ],
    ids=str,
)
def test_noise_scale_needs_two_parts_of_the_batch(tree, refused, train, layout):
    """The estimate compares a part of the batch with the whole. One micro-batch per step has no part."""
    (problem,) = refused(train={**train, "noise_scale_every": 5}, layout=layout)
    assert problem.code == "train-noise-scale-parts"
    smaller = {"layout": {**layout, "micro_batch": 4}, "train": {"noise_scale_every": 5}}
    assert build_job(tree(**smaller)).train.noise_scale_every == 5


def test_wsd_decay_and_warmup_must_fit_in_the_steps(tree, refused):
    wsd = {"schedule": "wsd", "steps": 10, "decay_fraction": 0.7}
    build_job(tree(train={**wsd, "warmup": 3}))
    (problem,) = refused(train={**wsd, "warmup": 4})
    assert "Use a warm-up of 3 steps or less" in str(problem)


def test_rope_frequency_factors_must_differ(tree, refused):
    """Equal factors would divide by zero. Without rope_factor neither is read."""
    stretch = {"rope_factor": 8.0, "rope_low_freq_factor": 2.0}
    assert build_job(tree(model={**stretch, "rope_high_freq_factor": 2.5})).model.rope_factor == 8.0
    for high in (2.0, 1.0):
        (problem,) = refused(model={**stretch, "rope_high_freq_factor": high})
        assert str(problem).startswith(
            f"model.rope_low_freq_factor=2.0 is not below model.rope_high_freq_factor={high:g}"
        )


def test_preset_keys_are_dropped_if_another_choice_makes_them_unused(tree, refused):
    """Keys of the user are refused instead. An override of a plan behaves like one of a job."""
    images = {"data": {"path": "builtin:synthetic-images"}, "layout": {"dp_replicate": 1}}
    made = tree(**images, model={"preset": "resnet-tiny", "norm": "batch"})
    del made["data"]["seq_len"]
    job = build_job(made)
    assert (job.model.norm_groups, job.model.norm) == (None, "batch")
    made["model"] = {"preset": "resnet-tiny"}
    planned = job_tree(build_job(made))
    assert planned["model"]["norm_groups"] == 4
    assert build_job({**planned, "model": {**planned["model"], "norm": "batch"}}).model == job.model
    learned = {"preset": "llama3-8b", "positions": "learned", "max_positions": 64}
    assert build_job(tree(model=learned)).model.rope_theta == 10000.0
    assert [p.code for p in refused(model={**learned, "rope_theta": 7.0})] == ["model-rope-theta-unused"]


def test_every_key_dropped_from_presets_has_a_rule():
    """Each key of READ_WITH has a rule that names the setting it needs."""
    for key, (other, needed) in READ_WITH.items():
        assert any(f"`model.{key}` needs `model.{other} = {needed}`" in rule.statement for rule in RULES), key


@pytest.mark.parametrize(
    ("model", "legal"),
    [
        ({"image_size": 1, "stem": "small", "width": 4, "norm_groups": 4}, False),
        ({"image_size": 1, "stem": "small", "width": 4, "norm_groups": 2}, True),
        ({"image_size": 2, "stem": "small", "width": 4, "norm_groups": 4}, True),
        ({"image_size": 4, "width": 1, "norm_groups": 1}, False),
        ({"image_size": 5, "width": 1, "norm_groups": 1}, True),
        ({"image_size": 1, "width": 32}, False),
    ],
)
def test_group_norm_needs_more_than_one_value_per_group(tree, model, legal):
    """With one value per group, torch raises for a micro-batch of one and returns zeros otherwise."""
    made = tree(model={**RESNET, **model}, data={"path": "builtin:synthetic-images"})
    del made["data"]["seq_len"]
    if legal:
        assert build_job(made)
        return
    with pytest.raises(SpecError) as caught:
        build_job(made)
    assert [p.code for p in caught.value.problems] == ["model-norm-groups"]


def test_divisors_are_exact():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 3},
        {"pp": 2, "cp": 3},
        {"pp": 4},
        {"pp": 2, "schedule": "interleaved"},
        {"dp_shard": 4, "micro_batch": 2, "zero": 2, "prefetch": 2},
        {"tp": 64},
        {"dp_replicate": 2, "zero": 1},
        {"dp_replicate": 9},
        {"cp": 3, "micro_batch": 8},
        {"cp": 5, "micro_batch": 3, "bucket_mb": 1.0},
        {"micro_batch": 99},
    ],
)
def test_nearest_layout_of_illegal_layouts_is_legal(tree, layout):
    with pytest.raises(SpecError) as caught:
        build_job(tree(layout=layout))
    asked = caught.value.job
    nearest = nearest_legal_layout(asked)
    assert find_problems(with_layout(asked, nearest)) == []
    assert nearest.world_size == min(asked.layout.world_size, 8)


degree = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=60, deadline=None)
@given(
    degrees=st.fixed_dictionaries(dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), degree)),
    micro_batch=st.none() | st.integers(1, 12),
    global_batch=st.integers(1, 24),
)
def test_nearest_layout_of_any_degrees_is_legal(degrees, micro_batch, global_batch):
    tables = {
        "model": {"preset": "tiny"},
        "cluster": {"preset": "h100-sxm"},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": global_batch},
        "layout": {k: v for k, v in {**degrees, "micro_batch": micro_batch}.items() if v is not None},
    }
    try:
        asked = build_job(tables)
    except SpecError as error:
        asked = error.job
    assert find_problems(with_layout(asked, nearest_legal_layout(asked))) == []


def test_nearest_layout_keeps_bucket_mb_and_micro_batch(tree):
    job = build_job(tree(layout={"dp_replicate": 2, "micro_batch": 2, "bucket_mb": 3.0}))
    nearest = nearest_legal_layout(job)
    assert (nearest.mode, nearest.micro_batch, nearest.bucket_mb) == ("given", 2, 3.0)


@pytest.mark.parametrize(
    ("model", "asked", "kept"),
    [
        ({"preset": "tiny"}, "full", "full"),
        ({"preset": "tiny"}, "selective", "selective"),
        ({"preset": "resnet-tiny"}, "full", "full"),
        ({"preset": "resnet-tiny"}, "selective", "none"),
        ({"preset": "resnet-tiny", "norm": "batch"}, "full", "none"),
    ],
)
def test_nearest_layout_keeps_recompute_if_the_model_supports_it(tree, model, asked, kept):
    data = (
        {"path": "builtin:synthetic-images"}
        if "resnet" in model["preset"]
        else {"path": "text", "seq_len": 32}
    )
    tables = {**tree(layout={"cp": 3, "recompute": asked}), "model": model, "data": data}
    with pytest.raises(SpecError) as caught:
        build_job(tables)
    nearest = nearest_legal_layout(caught.value.job)
    assert nearest.recompute == kept
    assert find_problems(with_layout(caught.value.job, nearest)) == []


def test_two_illegal_degrees_are_both_reported(refused):
    """No illegal degree hides another one."""
    for one, other in itertools.combinations({"pp": 3, "cp": 3, "tp": 3, "ep": 2}.items(), 2):
        paths = {p.path for p in refused(layout=dict([one, other]))}
        assert {f"layout.{one[0]}", f"layout.{other[0]}"} <= paths, (one, other)


def test_named_degrees_are_overrides():
    assert Layout(dp_replicate=2, tp=4).named_degrees() == "layout.dp_replicate=2 layout.tp=4"
    assert "one process" in Layout().named_degrees()


def test_illegal_layout_exits_with_status_2(tree):
    with pytest.raises(UserError) as caught:
        build_job(tree(layout={"tp": 3}))
    assert caught.value.exit_status == 2


def test_a_preset_that_can_only_be_planned_says_so(tree):
    """Its window is its own key: without it, it would be another model."""
    with pytest.raises(SpecError) as refused:
        build_job(tree(model={"preset": "gpt-oss-120b"}, layout={}), to_run=True)
    fixes = [p.fix for p in refused.value.problems if p.code == "model-window-not-built"]
    assert fixes == ["The preset gpt-oss-120b can be planned, not trained: choose another model to train"]

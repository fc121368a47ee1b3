"""The legality table: which settings go together, and why not.

One row is one rule. A row with ``built=False`` is a combination that is sound but that this version does
not run yet: planning it is allowed, running it is not. The others can never run. No rule raises: each returns
the problem it found, so that a job gets all of them at once. ``nearest.py`` finds what would run instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem
from meshwright.spec.job import Job, Train
from meshwright.spec.layout import Layout
from meshwright.spec.legality.axes import AXIS_ROWS
from meshwright.spec.legality.cluster import PLAN_CLUSTER_ROWS, check_precision_device
from meshwright.spec.legality.experts import MODEL_ROWS, UNUSED_ROWS
from meshwright.spec.legality.images import (
    check_batch_norm,
    check_image_data,
    check_image_layout,
    check_image_recompute,
    check_image_split,
    check_image_training,
    check_norm_groups,
    check_text_data,
)
from meshwright.spec.legality.pipeline import (
    check_schedule_file,
    check_stage_layers,
)
from meshwright.spec.legality.training import (
    OPTIONAL_KEYS,
    check_compile_backend,
    check_decay_room,
    check_fp8,
    check_gemm_autotune,
    check_grad_dtype,
    check_muon_whole,
    check_nesterov,
    check_noise_scale,
    check_noise_scale_layout,
    check_residual_dtype,
    check_unused,
    unused_code,
    unused_statement,
)
from meshwright.spec.legality.zero import check_deferred_compression, check_offload_all, check_offload_scale
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.spec.numbers import divisors, list_choices

SET = object()
"""Stands for any value that a key is set to."""
DEGREE_RULES = frozenset(
    f"layout-{what}"
    for what in (
        "accumulate-zero", "context-cp", "interleaved", "prefetch-zero", "schedule-pp",
        "sequence-parallel-tp", "virtual-stages", "virtual-stages-pp", "zero-unsharded",
    )
)  # fmt: skip
"""Rules of settings that need a degree. Where the planner chooses the degrees, it keeps to them itself."""


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    code: str
    statement: str
    """The rule in words, for the documentation."""
    check: Callable[[Job], Problem | None]
    built: bool = True
    """False: sound, but not built yet. It is planned, not run."""
    planned: bool = True
    """False: not built and not predicted either, so that not even a plan is made."""
    plan_only: bool = False
    """True: a matter of predicting alone; a run of it is refused as not built, or not for this machine."""

    def holds_for(self, to_run: bool) -> bool:
        """Whether it is asked of a job that is to run, or of one that is only planned."""
        return not self.plan_only if to_run else self.built or not self.planned


def find_problems(job: Job, to_run: bool = True) -> list[Problem]:
    """Every rule that the job breaks; for one key, what can never run hides what is not built yet.

    Args:
        job: The job.
        to_run: False for a job that is only planned: what is not built yet is no problem then, nor is a
            setting whose degree the planner has still to choose.
    """
    searched = not to_run and job.layout.mode == "auto"
    found: dict[str, Problem] = {}
    for rule in _BUILT_FIRST:
        problem = rule.check(job) if rule.holds_for(to_run) else None
        if problem is not None and not (searched and problem.code in DEGREE_RULES):
            found.setdefault(problem.path, problem)
    return list(found.values())


def _read(job: Job, path: str) -> Any:
    value: Any = job
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _divides(code: str, degree: str, whole: str, why: str) -> Rule:
    """``degree`` must divide ``whole`` (dotted paths)."""

    def check(job: Job) -> Problem | None:
        if not isinstance(job.model, DecoderModel):
            return None
        small, large = _read(job, degree), _read(job, whole)
        if large % small == 0:
            return None
        rule = f"does not divide {whole}={large}; {why}"
        return Problem(code, rule, path=degree, value=small, fix=f"Use {list_choices(divisors(large))}")

    return Rule(code, f"`{degree}` divides `{whole}`: {why}.", check)


def _needs(code: str, path: str, idle: Any, needed: str, why: str) -> Rule:
    """A setting other than ``idle`` needs the degree ``needed`` above one."""

    def check(job: Job) -> Problem | None:
        value = _read(job, path)
        if value == idle or _read(job, needed) > 1:
            return None
        fix = f"Set {needed} above 1, or leave {path} out"
        return Problem(code, f"has no effect with {needed}=1: {why}", path=path, value=value, fix=fix)

    return Rule(code, f"`{path}` other than `{_toml(idle)}` needs `{needed}` > 1: {why}.", check)


def _only_with(code: str, section: type, path: str, other: str, needed: Any, why: str) -> Rule:
    """A setting other than its default has an effect only where ``other`` is ``needed``.

    Args:
        code: Of the rule.
        section: The table that has the key; a job with another one is not checked.
        path: The key, with its table.
        other: The key that decides.
        needed: Its value, or ``SET`` for any.
        why: Why it has none otherwise.
    """
    table, _, key = path.partition(".")
    idle = getattr(section, key)
    wanted = other if needed is SET else f"{other}={_toml(needed)}"

    def check(job: Job) -> Problem | None:
        if not isinstance(getattr(job, table), section) or (value := _read(job, path)) == idle:
            return None
        there = _read(job, other)
        if there is not None if needed is SET else there == needed:
            return None
        rule, fix = f"has an effect only with {wanted}: {why}", f"Set {wanted}, or leave {path} out"
        return Problem(code, rule, path=path, value=value, fix=fix)

    return Rule(code, f"`{path}` needs `{wanted.replace('=', ' = ')}`: {why}.", check)


def _not_built(path: str, built: tuple[Any, ...], what: str, planned: bool = True) -> Rule:
    """Values of ``path`` outside ``built`` are planned, not built; or not even planned."""
    code = f"{path.replace('.', '-').replace('_', '-')}-not-built"

    def check(job: Job) -> Problem | None:
        if path.startswith("model.") and not isinstance(job.model, DecoderModel):
            return None  # keys of decoders
        value = _read(job, path)
        if value in built:
            return None
        used = "Use " + " or ".join(f"{path}={_toml(b)}" for b in built)
        fix = "Leave it out" if built == (None,) else used
        return Problem(code, f"asks for {what}, which is not built yet", path=path, value=value, fix=fix)

    return Rule(code, f"{what[0].upper()}{what[1:]} (`{path}`).", check, built=False, planned=planned)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_pp_layers(job: Job) -> Problem | None:
    if not isinstance(job.model, DecoderModel):
        return None
    stages = job.layout.pp * job.layout.virtual_stages
    if stages <= job.model.num_layers:
        return None
    rule = f"times layout.virtual_stages={job.layout.virtual_stages} gives {stages} stages for "
    rule += f"model.num_layers={job.model.num_layers}; every stage holds at least one layer"
    return Problem("layout-pp-layers", rule, path="layout.pp", value=job.layout.pp, fix="Use fewer stages")


def _check_zero_shard(job: Job) -> Problem | None:
    layout = job.layout
    if layout.dp_shard > 1 and layout.zero == 0:
        rule = f"shards nothing over layout.dp_shard={layout.dp_shard}; ZeRO stage 0 is plain replication"
        fix = f"Use layout.dp_replicate={layout.dp_shard} instead, or layout.zero=1, 2 or 3"
        return Problem("layout-zero-dp-shard", rule, path="layout.zero", value=0, fix=fix)
    return None


def _check_cp_seq(job: Job) -> Problem | None:
    ring = job.layout.context == "ring"
    pieces = 2 * job.layout.cp if ring else job.layout.cp
    if job.layout.cp == 1 or job.data.seq_len % pieces == 0:
        return None
    rule = f"needs data.seq_len={job.data.seq_len} to split into {pieces} equal pieces"
    rule += " (two a rank, for balance)" if ring else ""
    fix = f"Use a data.seq_len that is a multiple of {pieces}"
    return Problem("layout-cp-seq-len", rule, path="layout.cp", value=job.layout.cp, fix=fix)


def _check_ep(job: Job) -> Problem | None:
    if isinstance(job.model, DecoderModel) and job.model.num_experts is not None:
        return None
    for name in ("ep", "etp"):
        value = getattr(job.layout, name)
        if value > 1:
            rule = "splits experts, but the model is dense: it has none"
            return Problem(
                "layout-ep-dense", rule, path=f"layout.{name}", value=value, fix=f"Leave layout.{name} out"
            )
    return None


def _check_world(job: Job) -> Problem | None:
    """More ranks than cores is a warning elsewhere; more than GPUs cannot run."""
    world, devices = job.layout.world_size, job.cluster.world_size
    if world <= devices or (job.cluster.device == "cpu" and job.cluster.preset == "local"):
        return None
    rule = f"needs {world} devices, the cluster has {devices} ({job.cluster.device_name})"
    return Problem("layout-world-size", rule, path="layout", fix="Use fewer ranks or more nodes")


def _check_micro_batch(job: Job) -> Problem | None:
    micro, batch = job.layout.micro_batch, job.train.global_batch
    share = -(-batch // job.layout.data_degree)
    if micro is None or micro <= share:
        return None
    rule = f"is more than a rank's share of train.global_batch={batch}, which is {share}"
    return Problem(
        "layout-micro-batch", rule, path="layout.micro_batch", value=micro, fix=f"Use {share} or less"
    )


def _check_heads(job: Job) -> Problem | None:
    model = job.model
    if not isinstance(model, DecoderModel):
        return None
    if model.head_dim is None and model.hidden_size % model.num_heads:
        rule = f"does not divide model.hidden_size={model.hidden_size}; heads share the width evenly"
        near = [d for d in divisors(model.hidden_size) if d <= 2 * model.num_heads]
        fix = f"Use {list_choices(near[-4:])}, or set model.head_dim"
        return Problem("model-heads-width", rule, path="model.num_heads", value=model.num_heads, fix=fix)
    if model.head_size % 2 and model.positions == "rope":
        rule = "is odd; rotary embedding turns pairs"
        return Problem(
            "model-head-dim-odd", rule, path="model.head_dim", value=model.head_size, fix="Use an even one"
        )
    return None


def _check_positions(job: Job) -> Problem | None:
    model = job.model
    if not isinstance(model, DecoderModel) or model.positions == "rope":
        return None
    if model.max_positions is None:
        rule = "needs the number of positions to learn"
        fix = f"Set model.max_positions={job.data.seq_len} or more"
        return Problem("model-max-positions", rule, path="model.positions", value="learned", fix=fix)
    if job.data.seq_len <= model.max_positions:
        return None
    rule = f"is more than model.max_positions={model.max_positions}, the learned positions"
    fix = f"Use {model.max_positions} or less"
    return Problem("model-max-positions", rule, path="data.seq_len", value=job.data.seq_len, fix=fix)


def _check_rope_factors(job: Job) -> Problem | None:
    model = job.model
    if not isinstance(model, DecoderModel) or model.rope_factor is None:
        return None
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if low < high:
        return None
    rule = (
        f"is not below model.rope_high_freq_factor={high:g}; rotations between the two are stretched in part"
    )
    fix = f"Use less than {high:g}, or a higher model.rope_high_freq_factor"
    return Problem("model-rope-factors", rule, path="model.rope_low_freq_factor", value=low, fix=fix)


def _check_lr_base(job: Job) -> Problem | None:
    train = job.train
    if (train.lr_scaling == "none") == (train.lr_base_batch is None):
        return None
    if train.lr_base_batch is None:
        rule = "needs the batch that train.lr was tuned for"
        fix = "Set train.lr_base_batch, or train.lr_scaling=none"
        return Problem("train-lr-base-batch", rule, path="train.lr_scaling", value=train.lr_scaling, fix=fix)
    return Problem(
        "train-lr-base-batch",
        "has no effect with train.lr_scaling=none",
        path="train.lr_base_batch",
        value=train.lr_base_batch,
        fix="Set train.lr_scaling to linear or sqrt, or leave it out",
    )


def _check_fields(job: Job) -> Problem | None:
    for key in ("prompt_field", "answer_field"):
        value = getattr(job.data, key)
        if value is not None and job.data.template is None:
            rule = "has no effect without data.template: only a template joins prompts and answers"
            fix = "Set data.template, for example to chatml, or leave it out"
            return Problem("data-template-needed", rule, path=f"data.{key}", value=value, fix=fix)
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "model-heads-width",
        "`model.num_heads` divides `model.hidden_size`, unless `head_dim` is set.",
        _check_heads,
    ),
    Rule("model-head-dim-odd", "`model.head_dim` is even: rotary embedding turns pairs.", _check_heads),
    _divides("model-kv-heads", "model.num_kv_heads", "model.num_heads", "query heads share key heads evenly"),
    Rule(
        "model-max-positions",
        '`positions = "learned"` needs `max_positions`, at least `data.seq_len`.',
        _check_positions,
    ),
    Rule(
        "model-rope-factors",
        "`model.rope_low_freq_factor` is below `rope_high_freq_factor`: those between are stretched in part.",
        _check_rope_factors,
    ),
    _only_with(
        "model-rope-low-freq-factor-unused",
        DecoderModel,
        "model.rope_low_freq_factor",
        "model.rope_factor",
        SET,
        "without it nothing is stretched",
    ),
    _only_with(
        "model-rope-high-freq-factor-unused",
        DecoderModel,
        "model.rope_high_freq_factor",
        "model.rope_factor",
        SET,
        "without it nothing is stretched",
    ),
    _only_with(
        "model-rope-original-positions-unused",
        DecoderModel,
        "model.rope_original_positions",
        "model.rope_factor",
        SET,
        "without it nothing is stretched",
    ),
    _only_with(
        "model-rope-theta-unused",
        DecoderModel,
        "model.rope_theta",
        "model.positions",
        "rope",
        "learned positions do not rotate",
    ),
    _only_with(
        "model-rope-factor-unused",
        DecoderModel,
        "model.rope_factor",
        "model.positions",
        "rope",
        "learned positions do not rotate",
    ),
    _only_with(
        "model-norm-groups-unused",
        ResNetModel,
        "model.norm_groups",
        "model.norm",
        "group",
        "a batch norm has no groups",
    ),
    Rule(
        "model-norm-groups",
        "`model.norm_groups` divides `model.width`, and leaves a group more than one value.",
        check_norm_groups,
    ),
    *(Rule(*row) for row in MODEL_ROWS),
    *(Rule(*row) for row in UNUSED_ROWS),
    Rule(
        "data-not-for-images",
        "A ResNet reads images, and takes no setting of text: `seq_len`, `tokenizer`, `mask`, ...",
        check_image_data,
    ),
    Rule(
        "data-not-for-text",
        "A decoder reads text, not `builtin:synthetic-images` or a folder of arrays.",
        check_text_data,
    ),
    Rule("data-already-split", "`eval_fraction` is for data that are not split already.", check_image_split),
    Rule(
        "layout-image-axes", "A ResNet is replicated: no `pp`, `dp_shard`, `cp` or `tp`.", check_image_layout
    ),
    Rule(
        "layout-recompute-images",
        'A ResNet recomputes `"none"` or `"full"`, and with batch norm nothing.',
        check_image_recompute,
    ),
    Rule(
        "train-not-for-images",
        "A ResNet takes no `block_backend`, no `muon` and no `decay_embeddings`.",
        check_image_training,
    ),
    Rule(
        "layout-batch-norm",
        'With `norm = "batch"`, ranks x `micro_batch` divides `train.global_batch`: no padding is counted.',
        check_batch_norm,
    ),
    _divides("layout-tp-heads", "layout.tp", "model.num_heads", "heads split evenly over tp"),
    *(Rule(*row) for row in AXIS_ROWS),
    Rule("layout-pp-layers", "`pp` x `virtual_stages` is at most `model.num_layers`.", _check_pp_layers),
    Rule(
        "layout-stage-layers",
        "`stage_layers` has a number for each of the `pp` x `virtual_stages` stages, all layers in all.",
        check_stage_layers,
    ),
    Rule(
        "layout-schedule-file",
        "`schedule_file` needs `pp` > 1, and takes the place of `schedule` and `virtual_stages`.",
        check_schedule_file,
    ),
    Rule("layout-zero-dp-shard", "`dp_shard` > 1 needs ZeRO stage 1, 2 or 3.", _check_zero_shard),
    Rule(
        "layout-accumulate-compression",
        'Under ZeRO-2 and 3 a `compression.kind` needs `accumulate = "sharded"`.',
        check_deferred_compression,
    ),
    Rule(
        "layout-offload-fp16",
        '`offload = "all"` takes no fp16: the host would not wait for what the device finds of overflows.',
        check_offload_scale,
    ),
    Rule(
        "layout-cp-seq-len",
        "`data.seq_len` splits into 2 x `cp` equal pieces; with `ulysses` into `cp`.",
        _check_cp_seq,
    ),
    Rule("layout-ep-dense", "`ep` and `etp` split experts; a dense model has none.", _check_ep),
    _needs(
        "layout-sequence-parallel-tp", "layout.sequence_parallel", False, "layout.tp", "it shards within tp"
    ),
    _needs("layout-virtual-stages-pp", "layout.virtual_stages", 1, "layout.pp", "only pipelines have stages"),
    Rule("layout-world-size", "The degrees multiply to at most the cluster's devices.", _check_world),
    Rule("layout-micro-batch", "`micro_batch` is at most a rank's share of the batch.", _check_micro_batch),
    Rule(
        "data-template-needed", "`data.prompt_field` and `answer_field` need `data.template`.", _check_fields
    ),
    _only_with(
        "train-loss-scale", Train, "train.loss_scale", "train.precision", "fp16", "the others need no scale"
    ),
    Rule(
        "train-compile-backend",
        "`compile_backend` needs `block_backend` compile or triton: eager blocks are not compiled.",
        check_compile_backend,
    ),
    _only_with(
        "train-fp8-weight-grads",
        Train,
        "train.fp8_weight_grads",
        "train.precision",
        "fp8",
        "elsewhere all GEMMs have one precision",
    ),
    Rule(
        "train-gemm-autotune",
        '`gemm_autotune = true` needs `block_backend = "triton"`, and no `deterministic`.',
        check_gemm_autotune,
    ),
    Rule(
        "train-grad-dtype",
        '`grad_dtype = "bf16"` needs `block_backend = "triton"`, bf16 or fp8, `adamw` and no `grad_noise`.',
        check_grad_dtype,
    ),
    Rule(
        "train-residual-dtype",
        '`residual_dtype = "bf16"` needs `precision` bf16 or fp8, and `block_backend` compile or triton.',
        check_residual_dtype,
    ),
    Rule("train-lr-base-batch", "`lr_scaling` and `lr_base_batch` come together.", _check_lr_base),
    *(Rule(unused_code(key), unused_statement(key), check_unused(key)) for key in OPTIONAL_KEYS),
    Rule("train-nesterov-momentum", "`nesterov` needs a `momentum` above 0.", check_nesterov),
    Rule("train-wsd-room", "With `wsd`, warm-up and final fall fit into `train.steps`.", check_decay_room),
    Rule(
        "train-noise-scale-parts",
        "`noise_scale_every` needs two ranks or two micro-batches: it compares a part with the whole.",
        check_noise_scale,
    ),
    Rule(
        "train-precision-device",
        "`precision` fp8 or fp4 needs `peak_fp8_flops_per_s` or `peak_fp4_flops_per_s` of a GPU.",
        check_precision_device,
    ),
    *(Rule(*row, plan_only=True) for row in PLAN_CLUSTER_ROWS),
    _not_built("model.attention", ("heads",), "latent attention"),
    _not_built("model.window", (None,), "attention in a sliding window"),
    Rule(
        "layout-offload-not-built",
        'Parameters on the host (`offload = "all"`) without ZeRO-2 or 3.',
        check_offload_all,
        built=False,
    ),
    Rule(
        "train-fp8-not-built",
        '`precision = "fp8"` with eager blocks, of experts or a ResNet, or with `pp` or `tp`.',
        check_fp8,
        built=False,
    ),
    _not_built("train.precision", ("fp32", "bf16", "fp16", "fp8"), "fp4 training"),
    _not_built("train.runtime", ("meshwright",), "a run by another framework"),
    Rule(
        "train-muon-not-built",
        "Muon on cut matrices (`tp`, or ZeRO over `dp_shard` or `cp`).",
        check_muon_whole,
        built=False,
    ),
    Rule(
        "train-noise-scale-not-built",
        "The gradient noise scale in layouts other than replicas (`noise_scale_every`).",
        check_noise_scale_layout,
        built=False,
    ),
    _not_built("consistency.mode", ("synchronous",), "relaxed consistency", planned=False),
    _not_built("compression.kind", ("none", "bf16", "fp16"), "this compression", planned=False),
)
"""The table. Rows that can never run come first, then what is not built yet."""


_BUILT_FIRST = tuple(sorted(RULES, key=lambda rule: not rule.built))


def with_layout(job: Job, layout: Layout) -> Job:
    """The same job with another layout."""
    return dataclasses.replace(job, layout=layout)

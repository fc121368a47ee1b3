"""Rules of ``[train]``: optimizer, learning rate, precision, block backend and held-out sets."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.execution import uses_eager_blocks, wanted_block_backend
from meshwright.spec.job import Job, Train
from meshwright.spec.legality.rule import Rule, name_unused, needs_setting, not_built
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import list_choices
from meshwright.spec.train_defaults import OPTIMIZERS, count_decay_steps, defaults, readers, setting

OPTIONAL_KEYS = ("beta1", "beta2", "eps", "momentum", "nesterov", "min_lr_ratio", "decay_fraction")
"""Keys that only some optimizers or schedules read."""


def _needs_reader(key: str) -> Rule:
    """A key has an effect with the optimizers or schedules that read it."""
    path, code = f"train.{key}", name_unused(f"train.{key}")
    chooser = "optimizer" if any(key in keys for keys in OPTIMIZERS.values()) else "schedule"

    def check(job: Job) -> Problem | None:
        value = getattr(job.train, key)
        if value is None or key in defaults(job.train):
            return None
        rule = f"has no effect with train.{chooser}={getattr(job.train, chooser)}"
        fix = f"Leave it out, or use train.{chooser}={list_choices(readers(key))}"
        return Problem(code, rule, path=path, value=value, fix=fix)

    return Rule(code, f"Only the {chooser} {list_choices(readers(key))} reads `{path}`.", check)


def check_rollback(job: Job) -> Problem | None:
    """A rollback is a recovery: the ranks regroup."""
    if job.train.on_bad_step != "rollback" or job.elastic.restarts > 0:
        return None
    rule, fix = (
        "needs ranks that regroup; elastic.restarts=0 forbids it",
        "Raise elastic.restarts, or use skip or stop",
    )
    return Problem("train-rollback-restarts", rule, path="train.on_bad_step", value="rollback", fix=fix)


def check_straggler_replacement(job: Job) -> Problem | None:
    """A replacement is a recovery: the ranks regroup."""
    if job.elastic.straggler == "warn" or job.elastic.restarts > 0:
        return None
    rule, fix = (
        "needs ranks that regroup; elastic.restarts=0 forbids it",
        "Raise elastic.restarts, or use warn",
    )
    path = "elastic.straggler"
    return Problem("elastic-straggler-restarts", rule, path=path, value=job.elastic.straggler, fix=fix)


def check_straggler_exclusion(job: Job) -> Problem | None:
    """Without the device of a straggler the run needs another layout."""
    if job.elastic.straggler != "exclude" or job.elastic.may_change != "nothing":
        return None
    rule, fix = (
        "continues without one device; elastic.may_change=nothing forbids it",
        "Use elastic.may_change=data, or any",
    )
    path = "elastic.straggler"
    return Problem("elastic-straggler-may-change", rule, path=path, value="exclude", fix=fix)


def check_lr_scaling(job: Job) -> Problem | None:
    """The learning rate scales relative to a base batch."""
    train = job.train
    if (train.lr_scaling == "none") == (train.lr_base_batch is None):
        return None
    code = "train-lr-base-batch"
    if train.lr_base_batch is None:
        rule = "needs the batch that train.lr was tuned for"
        fix = "Set train.lr_base_batch, or train.lr_scaling=none"
        return Problem(code, rule, path="train.lr_scaling", value=train.lr_scaling, fix=fix)
    rule, path = "has no effect with train.lr_scaling=none", "train.lr_base_batch"
    fix = "Set train.lr_scaling to linear or sqrt, or leave it out"
    return Problem(code, rule, path=path, value=train.lr_base_batch, fix=fix)


def check_nesterov(job: Job) -> Problem | None:
    """Nesterov momentum needs a momentum."""
    train = job.train
    if not train.nesterov or "momentum" not in defaults(train) or setting(train, "momentum") > 0:
        return None
    rule, fix = "needs a momentum; train.momentum=0 is none", "Raise train.momentum, or leave it out"
    return Problem("train-nesterov-momentum", rule, path="train.nesterov", value=True, fix=fix)


def check_eval_names(job: Job) -> Problem | None:
    """Curves and figures of held-out sets go by name."""
    names = [one.name for one in job.data.eval]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return None
    rule, fix = "names two held-out sets", "Give each set of data.eval its own name"
    return Problem("data-eval-name", rule, path="data.eval.name", value=twice, fix=fix)


def check_compile_backend(job: Job) -> Problem | None:
    """Eager blocks do not go through torch.compile."""
    value = job.train.compile_backend
    if value == "inductor" or not uses_eager_blocks(job):
        return None
    rule = "has an effect only with train.block_backend=compile or triton: eager blocks are not compiled"
    fix = "Set train.block_backend=compile, or leave train.compile_backend out"
    return Problem("train-compile-backend", rule, path="train.compile_backend", value=value, fix=fix)


def check_residual_dtype(job: Job) -> Problem | None:
    """A bf16 residual stream goes with bf16 or fp8 GEMMs; eager norms would keep a float32 copy of it."""
    train = job.train
    fused = not uses_eager_blocks(job) and train.precision in ("bf16", "fp8")
    if train.residual_dtype == "fp32" or fused:
        return None
    rule = "needs compiled or Triton blocks in bf16 or fp8: eager norms keep a float32 copy of it"
    backends = "compile or triton" if job.cluster.device == "cuda" else "compile (triton needs a GPU)"
    fix = f"Set train.precision=bf16 and train.block_backend={backends}, or omit train.residual_dtype"
    return Problem(
        "train-residual-dtype", rule, path="train.residual_dtype", value=train.residual_dtype, fix=fix
    )


def check_grad_dtype(job: Job) -> Problem | None:
    """Triton blocks write bf16 gradients, and the fused AdamW reads them."""
    train = job.train
    if train.grad_dtype == "fp32":
        return None
    triton = wanted_block_backend(job) == "triton" and train.precision in ("bf16", "fp8")
    if triton and train.optimizer == "adamw" and not train.grad_noise:
        return None
    rule = "needs Triton blocks in bf16 or fp8, and AdamW without gradient noise"
    needs = "train.block_backend=triton, train.precision=bf16 and train.optimizer=adamw"
    fix = f"Leave train.grad_dtype out, or set {needs}, and leave train.grad_noise out"
    return Problem("train-grad-dtype", rule, path="train.grad_dtype", value=train.grad_dtype, fix=fix)


def check_gemm_autotune(job: Job) -> Problem | None:
    """Autotuning covers the GEMMs of Triton blocks, and may choose other algorithms in the next run."""
    train = job.train
    if not train.gemm_autotune:
        return None
    if train.deterministic:
        rule = "may choose other algorithms in each run; train.deterministic=true needs the same ones"
        fix = "Leave train.gemm_autotune or train.deterministic out"
    elif wanted_block_backend(job) != "triton":
        rule = "tunes the GEMMs of Triton blocks"
        fix = "Set train.block_backend=triton, or leave train.gemm_autotune out"
    else:
        return None
    return Problem("train-gemm-autotune", rule, path="train.gemm_autotune", value=True, fix=fix)


def check_decay_steps(job: Job) -> Problem | None:
    """Warm-up and final decay of ``wsd`` fit into the run."""
    train = job.train
    if train.schedule != "wsd":
        return None
    decay = count_decay_steps(train)
    if decay <= train.steps - train.warmup:
        return None
    rule = f"plus {decay} steps of final decay are more than train.steps={train.steps}"
    fix = f"Use a warm-up of {train.steps - decay} steps or less, or a smaller train.decay_fraction"
    return Problem("train-wsd-room", rule, path="train.warmup", value=train.warmup, fix=fix)


def check_fp8(job: Job) -> Problem | None:
    """fp8 GEMMs are implemented for compiled or Triton blocks of a dense decoder with unsharded matrices."""
    if job.train.precision != "fp8":
        return None
    model, layout = job.model, job.layout
    fix = "Use train.precision=bf16"
    if not isinstance(model, DecoderModel):
        rule = "is for GEMMs; torch has no fp8 convolution"
    elif model.num_experts is not None:
        rule = f"is not implemented for the experts of model.num_experts={model.num_experts} yet"
    elif layout.pp > 1:
        rule = f"computes weight gradients at once; a schedule of layout.pp={layout.pp} may defer them"
        fix += ", or leave layout.pp out"
    elif layout.tp > 1:
        rule = f"needs unsharded matrices; layout.tp={layout.tp} shards them"
        fix += ", or leave layout.tp out"
    elif uses_eager_blocks(job):
        rule = "needs train.block_backend=compile or triton: casts not fused with the op before them cost "
        rule += "more than the GEMMs save"
        fix = "Set train.block_backend=compile, or use train.precision=bf16"
    else:
        return None
    return Problem("train-fp8-not-built", rule, path="train.precision", value="fp8", fix=fix)


def check_muon_unsharded(job: Job) -> Problem | None:
    """Newton-Schulz needs whole matrices, not shards. AdamW updates experts."""
    layout = job.layout
    sharding = ("dp_shard", "tp", "cp") if layout.zero else ("tp",)
    axes = [name for name in sharding if getattr(layout, name) > 1]
    if job.train.optimizer != "muon" or not axes:
        return None
    rule = f"needs whole matrices; layout.{axes[0]}={getattr(layout, axes[0])} shards them"
    fix = "Use layout.dp_replicate, or train.optimizer=adamw"
    return Problem("train-muon-not-built", rule, path="train.optimizer", value="muon", fix=fix)


def check_noise_scale(job: Job) -> Problem | None:
    """The gradient noise scale compares the gradient of a part of the batch with that of the whole batch."""
    train, layout = job.train, job.layout
    one_part = layout.data_degree == 1 and (layout.micro_batch or 1) >= train.global_batch
    if not train.noise_scale_every or (train.global_batch > 1 and not one_part):
        return None
    rule = "compares a part of the batch with the whole; one rank with one micro-batch has no part"
    fix = "Use a smaller layout.micro_batch, two ranks or more, or leave it out"
    path, value = "train.noise_scale_every", train.noise_scale_every
    return Problem("train-noise-scale-parts", rule, path=path, value=value, fix=fix)


def check_noise_scale_layout(job: Job) -> Problem | None:
    """Only plain replicas hold their own gradient before the all-reduce."""
    layout = job.layout
    axes = [name for name in ("dp_shard", "tp", "pp", "cp") if getattr(layout, name) > 1]
    if not job.train.noise_scale_every or not axes:
        return None
    rule = f"is measured with layout.dp_replicate only, not with layout.{axes[0]}={getattr(layout, axes[0])}"
    fix = "Use layout.dp_replicate, or leave it out"
    value = job.train.noise_scale_every
    return Problem("train-noise-scale-not-built", rule, path="train.noise_scale_every", value=value, fix=fix)


RULES: tuple[Rule, ...] = (
    needs_setting(
        Train,
        "train.loss_scale",
        "train.precision",
        "fp16",
        "other precisions need no loss scaling",
        "train-loss-scale",
    ),
    Rule(
        "train-compile-backend",
        "`compile_backend` needs `block_backend` compile or triton: eager blocks are not compiled.",
        check_compile_backend,
    ),
    needs_setting(
        Train,
        "train.fp8_weight_grads",
        "train.precision",
        "fp8",
        "other precisions have no fp8 GEMMs",
        "train-fp8-weight-grads",
    ),
    needs_setting(
        Train,
        "train.transport",
        "cluster.device",
        "cpu",
        "ranks on GPUs use NCCL",
        "train-transport",
    ),
    Rule(
        "train-gemm-autotune",
        '`gemm_autotune = true` needs `block_backend = "triton"`, and excludes `deterministic`.',
        check_gemm_autotune,
    ),
    Rule(
        "train-grad-dtype",
        '`grad_dtype = "bf16"` needs `block_backend = "triton"` in bf16 or fp8, and `adamw` without noise.',
        check_grad_dtype,
    ),
    Rule(
        "train-residual-dtype",
        '`residual_dtype = "bf16"` needs `precision` bf16 or fp8, and `block_backend` compile or triton.',
        check_residual_dtype,
    ),
    Rule(
        "train-rollback-restarts",
        '`on_bad_step = "rollback"` needs `elastic.restarts` above 0.',
        check_rollback,
    ),
    Rule(
        "elastic-straggler-restarts",
        "`elastic.straggler` above `warn` needs `elastic.restarts` above 0.",
        check_straggler_replacement,
    ),
    Rule(
        "elastic-straggler-may-change",
        '`elastic.straggler = "exclude"` needs `elastic.may_change`.',
        check_straggler_exclusion,
    ),
    Rule("train-lr-base-batch", "`lr_scaling` and `lr_base_batch` need each other.", check_lr_scaling),
    *(_needs_reader(key) for key in OPTIONAL_KEYS),
    Rule("data-eval-name", "Every set of `data.eval` has its own name.", check_eval_names),
    Rule("train-nesterov-momentum", "`nesterov` needs a `momentum` above 0.", check_nesterov),
    Rule("train-wsd-room", "With `wsd`, warm-up and final decay fit into `train.steps`.", check_decay_steps),
    Rule(
        "train-noise-scale-parts",
        "`noise_scale_every` needs two ranks or two micro-batches: it compares a part of the batch with all.",
        check_noise_scale,
    ),
    Rule(
        "train-fp8-not-built",
        '`precision = "fp8"` with eager blocks, with experts, a ResNet, `pp` or `tp`.',
        check_fp8,
        built=False,
    ),
    not_built("train.precision", ("fp32", "bf16", "fp16", "fp8"), "fp4 training"),
    not_built("train.runtime", ("meshwright",), "a run by another framework"),
    Rule(
        "train-muon-not-built",
        "Muon on sharded matrices (`tp`, or ZeRO over `dp_shard` or `cp`).",
        check_muon_unsharded,
        built=False,
    ),
    Rule(
        "train-noise-scale-not-built",
        "The gradient noise scale in layouts other than `dp_replicate` (`noise_scale_every`).",
        check_noise_scale_layout,
        built=False,
    ),
    not_built("consistency.mode", ("synchronous",), "relaxed consistency", planned=False),
    not_built("compression.kind", ("none", "bf16", "fp16"), "this compression", planned=False),
)

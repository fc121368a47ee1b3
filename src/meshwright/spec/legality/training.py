"""Checks of the ``[train]`` keys that belong together; the rows are in the legality table."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import list_choices
from meshwright.spec.train_defaults import OPTIMIZERS, count_decay_steps, defaults, readers, setting

OPTIONAL_KEYS = ("beta1", "beta2", "eps", "momentum", "nesterov", "min_lr_ratio", "decay_fraction")
"""Keys that not every optimizer or schedule reads."""


def unused_code(key: str) -> str:
    """The code of the rule that refuses a key which nothing reads."""
    return f"train-{key.replace('_', '-')}-unused"


def unused_statement(key: str) -> str:
    """The rule in words."""
    return f"`train.{key}` is read by the {_chooser(key)} {list_choices(readers(key))} alone."


def check_unused(key: str) -> Callable[[Job], Problem | None]:
    """Refuse a key that the chosen optimizer or schedule does not read."""

    def check(job: Job) -> Problem | None:
        value = getattr(job.train, key)
        if value is None or key in defaults(job.train):
            return None
        chooser = _chooser(key)
        code, rule = unused_code(key), f"has no effect with train.{chooser}={getattr(job.train, chooser)}"
        fix = f"Leave it out, or use train.{chooser}={list_choices(readers(key))}"
        return Problem(code, rule, path=f"train.{key}", value=value, fix=fix)

    return check


def check_nesterov(job: Job) -> Problem | None:
    """Looking ahead along the momentum needs one."""
    train = job.train
    if not train.nesterov or "momentum" not in defaults(train) or setting(train, "momentum") > 0:
        return None
    rule, fix = (
        "looks ahead along the momentum, and train.momentum=0",
        "Raise train.momentum, or leave it out",
    )
    return Problem("train-nesterov-momentum", rule, path="train.nesterov", value=True, fix=fix)


def check_compile_backend(job: Job) -> Problem | None:
    """Only compiled blocks have a backend of torch.compile."""
    value = job.train.compile_backend
    if value == "inductor" or job.train.block_backend != "eager":
        return None
    rule = "has an effect only with train.block_backend=compile or triton: eager blocks are not compiled"
    fix = "Set train.block_backend=compile, or leave train.compile_backend out"
    return Problem("train-compile-backend", rule, path="train.compile_backend", value=value, fix=fix)


def check_residual_dtype(job: Job) -> Problem | None:
    """A stream in 16 bits is for products in 16 bits; eager norms would keep it in float32 all the same."""
    train = job.train
    if train.residual_dtype == "fp32" or (
        train.block_backend != "eager" and train.precision in ("bf16", "fp8")
    ):
        return None
    rule = "is for compiled blocks in bf16 or fp8: elsewhere each norm keeps a float32 copy of it"
    fix = "Set train.precision=bf16 and train.block_backend=compile or triton, or omit train.residual_dtype"
    return Problem(
        "train-residual-dtype", rule, path="train.residual_dtype", value=train.residual_dtype, fix=fix
    )


def check_grad_dtype(job: Job) -> Problem | None:
    """Gradients in 16 bits are made by our own kernels and read by our own update."""
    train = job.train
    if train.grad_dtype == "fp32":
        return None
    triton = train.block_backend == "triton" and train.precision in ("bf16", "fp8")
    if triton and train.optimizer == "adamw" and not train.grad_noise:
        return None
    rule = "is for Triton blocks in bf16 or fp8, and for AdamW without gradient noise"
    needs = "train.block_backend=triton, train.precision=bf16 and train.optimizer=adamw"
    fix = f"Leave train.grad_dtype out, or set {needs}, and leave train.grad_noise out"
    return Problem("train-grad-dtype", rule, path="train.grad_dtype", value=train.grad_dtype, fix=fix)


def check_gemm_autotune(job: Job) -> Problem | None:
    """A race is for products between our own kernels, and its winner may be another one the next time."""
    train = job.train
    if not train.gemm_autotune:
        return None
    if train.deterministic:
        rule = "may choose other algorithms than a run before, and train.deterministic=true promises the same"
        fix = "Leave train.gemm_autotune or train.deterministic out"
    elif train.block_backend != "triton":
        rule = "is for the GEMMs of Triton blocks"
        fix = "Set train.block_backend=triton, or leave train.gemm_autotune out"
    else:
        return None
    return Problem("train-gemm-autotune", rule, path="train.gemm_autotune", value=True, fix=fix)


def check_decay_room(job: Job) -> Problem | None:
    """Warm-up and the fall at the end of ``wsd`` fit into the run."""
    train = job.train
    if train.schedule != "wsd":
        return None
    fall, room = count_decay_steps(train), train.steps - train.warmup
    if fall <= room:
        return None
    rule = f"and the {fall} steps of the fall at the end are more than train.steps={train.steps}"
    fix = f"Use a warm-up of {train.steps - fall} steps or less, or a smaller train.decay_fraction"
    return Problem("train-wsd-room", rule, path="train.warmup", value=train.warmup, fix=fix)


def check_fp8(job: Job) -> Problem | None:
    """Products in 8 bits are those of compiled blocks of a dense decoder, with whole matrices."""
    if job.train.precision != "fp8":
        return None
    model, layout = job.model, job.layout
    fix = "Use train.precision=bf16"
    if not isinstance(model, DecoderModel):
        rule = "multiplies matrices in 8 bits, and torch has no such convolution"
    elif model.num_experts is not None:
        rule = f"multiplies plain matrices, not yet those of model.num_experts={model.num_experts}"
    elif layout.pp > 1:
        rule = f"makes the gradients of weights at once, and layout.pp={layout.pp} may ask for them later"
        fix += ", or leave layout.pp out"
    elif layout.tp > 1:
        rule = f"multiplies whole matrices, and layout.tp={layout.tp} cuts them"
        fix += ", or leave layout.tp out"
    elif job.train.block_backend == "eager":
        rule = "needs train.block_backend=compile or triton: casts not fused with the op before them cost "
        rule += "more than the GEMMs save"
        fix = "Set train.block_backend=compile, or use train.precision=bf16"
    else:
        return None
    return Problem("train-fp8-not-built", rule, path="train.precision", value="fp8", fix=fix)


def check_muon_whole(job: Job) -> Problem | None:
    """Newton-Schulz multiplies whole matrices; a shard of one is not enough. Experts are AdamW's."""
    layout = job.layout
    cutting = ("dp_shard", "tp", "cp") if layout.zero else ("tp",)
    cut = [name for name in cutting if getattr(layout, name) > 1]
    if job.train.optimizer != "muon" or not cut:
        return None
    rule = f"needs whole matrices, and layout.{cut[0]}={getattr(layout, cut[0])} cuts them"
    fix = "Use layout.dp_replicate, or train.optimizer=adamw"
    return Problem("train-muon-not-built", rule, path="train.optimizer", value="muon", fix=fix)


def check_noise_scale(job: Job) -> Problem | None:
    """The gradient noise scale compares the gradient of a part of the batch with that of the whole."""
    train, layout = job.train, job.layout
    one_part = layout.data_degree == 1 and (layout.micro_batch or 1) >= train.global_batch
    if not train.noise_scale_every or (train.global_batch > 1 and not one_part):
        return None
    rule = "compares a part of the batch with the whole, and one rank with one micro-batch has no part"
    fix = "Use a smaller layout.micro_batch, two ranks or more, or leave it out"
    return Problem(
        "train-noise-scale-parts",
        rule,
        path="train.noise_scale_every",
        value=train.noise_scale_every,
        fix=fix,
    )


def check_noise_scale_layout(job: Job) -> Problem | None:
    """Only replicas see their own gradient before it is summed."""
    layout = job.layout
    cut = [name for name in ("dp_shard", "tp", "pp", "cp") if getattr(layout, name) > 1]
    if not job.train.noise_scale_every or not cut:
        return None
    rule = f"is measured by replicas alone, and layout.{cut[0]}={getattr(layout, cut[0])}"
    fix = "Use layout.dp_replicate, or leave it out"
    value = job.train.noise_scale_every
    return Problem("train-noise-scale-not-built", rule, path="train.noise_scale_every", value=value, fix=fix)


def _chooser(key: str) -> str:
    return "optimizer" if any(key in keys for keys in OPTIMIZERS.values()) else "schedule"

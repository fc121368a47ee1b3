"""Rules of ResNets and of image data."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.core.errors import Problem
from meshwright.spec.job import SYNTHETIC_IMAGES, Data, Job
from meshwright.spec.legality.rule import Rule, needs_setting
from meshwright.spec.model import ResNetModel
from meshwright.spec.numbers import divisors, list_choices, near_divisors
from meshwright.spec.paths import BUILTIN

IMAGE_SETTINGS = frozenset({"path", "eval_fraction"})
"""Keys of ``[data]`` that apply to images."""
TEXT_SETTINGS: dict[str, Any] = {
    key.name: 1 if key.name == "seq_len" else key.default  # one image has one target
    for key in dataclasses.fields(Data)
    if key.name not in IMAGE_SETTINGS
}
"""Keys of text data, with their defaults."""


def check_image_data(job: Job) -> Problem | None:
    """A ResNet reads images, not text."""
    if not isinstance(job.model, ResNetModel):
        return None
    if job.data.path.startswith(BUILTIN) and job.data.path != SYNTHETIC_IMAGES:
        fix = f"Use {SYNTHETIC_IMAGES}, or a folder with images.npy and labels.npy"
        rule = "is text; this model reads images"
        return Problem("data-not-for-images", rule, path="data.path", value=job.data.path, fix=fix)
    for key, plain in TEXT_SETTINGS.items():
        if (value := getattr(job.data, key)) != plain:
            rule, fix = "is a setting of text; this model reads images", f"Leave {key} out"
            return Problem("data-not-for-images", rule, path=f"data.{key}", value=value, fix=fix)
    return None


def check_text_data(job: Job) -> Problem | None:
    """A decoder reads text, not images."""
    if isinstance(job.model, ResNetModel) or job.data.path != SYNTHETIC_IMAGES:
        return None
    fix = "Use builtin:python-stdlib, or a path of text"
    rule = "is images; this model reads text"
    return Problem("data-not-for-text", rule, path="data.path", value=job.data.path, fix=fix)


def check_image_split(job: Job) -> Problem | None:
    """Synthetic images have a fixed held-out split."""
    if job.data.path != SYNTHETIC_IMAGES or job.data.eval_fraction is None:
        return None
    rule, fix = f"has no effect: {SYNTHETIC_IMAGES} has its own held-out images", "Leave it out"
    value = job.data.eval_fraction
    return Problem("data-already-split", rule, path="data.eval_fraction", value=value, fix=fix)


def check_image_recompute(job: Job) -> Problem | None:
    """Activation checkpointing of a ResNet covers whole blocks, and excludes batch norm."""
    layout, path = job.layout, "layout.recompute"
    if not isinstance(job.model, ResNetModel) or layout.recompute == "none":
        return None
    if layout.recompute == "selective":
        rule = "keeps the outputs of linears; a ResNet has convolutions"
        return Problem(
            "layout-recompute-images", rule, path=path, value="selective", fix=f"Use {path}=full or none"
        )
    if job.mixes_samples:
        rule = "runs each forward pass twice; model.norm=batch would update its running statistics twice"
        fix = f"Use {path}=none, or model.norm=group"
        return Problem("layout-recompute-images", rule, path=path, value=layout.recompute, fix=fix)
    return None


def check_image_training(job: Job) -> Problem | None:
    """Settings for decoders only."""
    if not isinstance(job.model, ResNetModel):
        return None
    if job.train.block_backend not in (None, "eager"):
        rule = "is for the identical blocks of a decoder; each block of a ResNet would compile on its own"
        path, value = "train.block_backend", job.train.block_backend
        return Problem("train-not-for-images", rule, path=path, value=value, fix="Leave it out")
    if job.train.optimizer == "muon":
        rule = "is for the matrices of a decoder; a ResNet has convolutions"
        fix = "Use train.optimizer=sgd or adamw"
        return Problem("train-not-for-images", rule, path="train.optimizer", value="muon", fix=fix)
    if not job.train.decay_embeddings:
        rule = "has no effect: a ResNet has no embeddings"
        fix = "Leave it out"
        return Problem("train-not-for-images", rule, path="train.decay_embeddings", value=False, fix=fix)
    return None


def check_batch_norm(job: Job) -> Problem | None:
    """Batch norm must not see zero-weight padding samples."""
    if not job.mixes_samples:
        return None
    code, batch, layout = "layout-batch-norm", job.train.global_batch, job.layout
    assert isinstance(job.model, ResNetModel), "only a ResNet has batch norms"
    ranks, least = layout.data_degree, job.model.least_micro_batch
    if batch % ranks:
        rule = (
            f"does not divide train.global_batch={batch}; with model.norm=batch no rank may pad its samples"
        )
        fix = f"Use {list_choices(near_divisors(batch, ranks))}, or model.norm=group"
        return Problem(code, rule, path="layout.dp_replicate", value=ranks, fix=fix)
    share, micro = batch // ranks, layout.micro_batch
    if share < least:
        rule = f"gives {share} samples per rank; model.norm=batch needs {least}: its last stage "
        rule += "sees one pixel per image, and a single value has no variance"
        fix = "Use a larger train.global_batch or model.image_size, or fewer ranks"
        return Problem(code, rule, path="train.global_batch", value=batch, fix=fix)
    if micro is not None and micro <= share and (share % micro or micro < least):
        rule = f"does not split the {share} samples per rank (train.global_batch={batch} / {ranks}) into "
        rule += f"equal micro-batches of {least} or more; with model.norm=batch none may be padded"
        sizes = [d for d in near_divisors(share, micro) if d >= least] or [share]
        fix = f"Use {list_choices(sizes)}, or model.norm=group"
        return Problem(code, rule, path="layout.micro_batch", value=micro, fix=fix)
    return None


def check_image_layout(job: Job) -> Problem | None:
    """A ResNet is replicated, never sharded."""
    if not isinstance(job.model, ResNetModel):
        return None
    for axis in ("pp", "dp_shard", "cp", "tp"):
        if (value := getattr(job.layout, axis)) > 1:
            rule = "shards a decoder; a ResNet is replicated"
            fix = f"Use layout.dp_replicate={value}"
            return Problem("layout-image-axes", rule, path=f"layout.{axis}", value=value, fix=fix)
    return None


def check_norm_groups(job: Job) -> Problem | None:
    """The groups of a GroupNorm have equal sizes, and more than one value: a single value has no variance."""
    model = job.model
    if not isinstance(model, ResNetModel) or model.norm == "batch":
        return None
    code, path, width = "model-norm-groups", "model.norm_groups", model.width
    if width % model.groups:
        rule = f"does not divide model.width={width}; a GroupNorm has groups of equal size"
        fix = f"Use {list_choices(d for d in divisors(width) if d <= 64)}"
        return Problem(code, rule, path=path, value=model.groups, fix=fix)
    if model.groups == width and model.first_side == 1:
        rule = f"leaves one value per group (model.width={width}, and the first stage sees one pixel of "
        rule += f"model.image_size={model.image_size}); a single value has no variance"
        fewer = [d for d in divisors(width) if d < width and d <= 64]
        fix = f"Use {list_choices(fewer)}, or a larger model.image_size" if fewer else "Use larger images"
        return Problem(code, rule, path=path, value=model.groups, fix=fix)
    return None


RULES: tuple[Rule, ...] = (
    needs_setting(ResNetModel, "model.norm_groups", "model.norm", "group", "batch norm has no groups"),
    Rule(
        "model-norm-groups",
        "`model.norm_groups` divides `model.width`, and leaves more than one value per group.",
        check_norm_groups,
    ),
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
        'A ResNet has `recompute` `"none"` or `"full"`, and with batch norm `"none"` only.',
        check_image_recompute,
    ),
    Rule(
        "train-not-for-images",
        "A ResNet takes no `block_backend`, no `muon` and no `decay_embeddings`.",
        check_image_training,
    ),
    Rule(
        "layout-batch-norm",
        'With `norm = "batch"`, ranks x `micro_batch` divides `train.global_batch`: no sample is padding.',
        check_batch_norm,
    ),
)

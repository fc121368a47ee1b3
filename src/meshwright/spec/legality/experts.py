"""Checks of experts, latent attention, windows and racks; the rows are in the legality table."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.errors import Problem
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job, Train
from meshwright.spec.model import DecoderModel

Row = tuple[str, str, Callable[[Job], Problem | None]]

EXPERT_KEYS = (
    "experts_per_token",
    "expert_ffn_size",
    "shared_experts",
    "dense_layers",
    "router",
    "capacity_factor",
)
"""Keys that mean something with `num_experts` alone."""
BALANCE_KEYS = ("balance_loss", "balance_rate", "z_loss")
"""The same of ``[train]``."""
LATENT_KEYS = ("latent_size", "query_latent_size", "rope_head_dim", "value_head_dim")
"""Keys that mean something with latent attention alone."""
SPINE_KEYS = ("spine_oversubscription", "spine_latency_s")
"""Keys that mean something with racks of a known size alone."""


def check_experts_per_token(job: Job) -> Problem | None:
    """A token is sent to some of the experts that there are."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.num_experts is None:
        return None
    code, path, experts = "model-experts-per-token", "model.experts_per_token", model.num_experts
    if model.experts_per_token is None:
        rule = f"is missing: with model.num_experts={experts} each token is sent to some of them"
        return Problem(code, rule, path=path, fix="Set model.experts_per_token=2, for example")
    if model.experts_per_token <= experts:
        return None
    rule = f"is more than model.num_experts={experts}"
    return Problem(code, rule, path=path, value=model.experts_per_token, fix=f"Use {experts} or less")


def check_dense_layers(job: Job) -> Problem | None:
    """Some layer has experts."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.num_experts is None or model.expert_layers:
        return None
    rule = f"leaves none of model.num_layers={model.num_layers} for experts"
    fix = f"Use {model.num_layers - 1} or less, or leave model.num_experts out"
    return Problem("model-dense-layers", rule, path="model.dense_layers", value=model.dense_layers, fix=fix)


def check_latent(job: Job) -> Problem | None:
    """What latent attention needs."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.attention != "latent":
        return None
    code = "model-latent"
    for key in ("latent_size", "rope_head_dim"):
        if getattr(model, key) is None:
            rule = (
                "is missing: model.attention=latent makes all keys and values from one vector, and rotates "
            )
            rule += "a part of each head of its own"
            fix = f"Set model.{key}={512 if key == 'latent_size' else 64}, as DeepSeek-V3 has it"
            return Problem(code, rule, path=f"model.{key}", fix=fix)
    if (model.rope_head_dim or 0) % 2:
        rule = "is odd; rotary embedding turns pairs"
        return Problem(
            code, rule, path="model.rope_head_dim", value=model.rope_head_dim, fix="Use an even one"
        )
    if model.positions != "rope":
        rule = "has no meaning with model.attention=latent, which rotates a part of each head"
        return Problem(
            code, rule, path="model.positions", value=model.positions, fix="Use model.positions=rope"
        )
    if model.num_kv_heads != model.num_heads:
        rule = (
            f"is not model.num_heads={model.num_heads}: with model.attention=latent every head has its own "
        )
        rule += "keys, made from the latent vector"
        fix = f"Use model.num_kv_heads={model.num_heads}"
        return Problem(code, rule, path="model.num_kv_heads", value=model.num_kv_heads, fix=fix)
    return None


def check_window_every(job: Job) -> Problem | None:
    """Some layer is windowed."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.window is None or model.window_every <= model.num_layers:
        return None
    rule = f"is more than model.num_layers={model.num_layers}: no layer would have a window"
    fix = f"Use {model.num_layers} or less, or leave model.window out"
    return Problem("model-window-every", rule, path="model.window_every", value=model.window_every, fix=fix)


def _unused_row(section: type, path: str, other: str, needed: str | None, why: str) -> Row:
    """A key other than its default has no effect unless ``other`` is ``needed``, or set at all.

    Args:
        section: The table that has the key; a job with another one is not checked.
        path: The key, with its table.
        other: The key that decides.
        needed: Its value; None for any.
        why: Why there is no effect otherwise.
    """
    table, _, key = path.partition(".")
    code = f"{table}-{key.removesuffix('_s').replace('_', '-')}-unused"
    idle, (owner_table, _, leaf) = getattr(section, key), other.partition(".")
    wanted = other if needed is None else f"{other}={needed}"

    def check(job: Job) -> Problem | None:
        owner = getattr(job, table)
        if not isinstance(owner, section) or (value := getattr(owner, key)) == idle:
            return None
        there = getattr(getattr(job, owner_table), leaf, None)
        if there is not None if needed is None else there == needed:
            return None
        rule, fix = f"has an effect only with {wanted}: {why}", f"Set {wanted}, or leave {path} out"
        return Problem(code, rule, path=path, value=value, fix=fix)

    return code, f"`{path}` needs `{wanted.replace('=', ' = ')}`: {why}.", check


UNUSED_ROWS: tuple[Row, ...] = (
    *(
        _unused_row(DecoderModel, f"model.{key}", "model.num_experts", None, "a dense model has no experts")
        for key in EXPERT_KEYS
    ),
    *(
        _unused_row(Train, f"train.{key}", "model.num_experts", None, "a dense model has no experts")
        for key in BALANCE_KEYS
    ),
    *(
        _unused_row(DecoderModel, f"model.{key}", "model.attention", "latent", "heads have no latent vector")
        for key in LATENT_KEYS
    ),
    _unused_row(DecoderModel, "model.window_every", "model.window", None, "no layer has one"),
    *(
        _unused_row(Cluster, f"cluster.{key}", "cluster.nodes_per_rack", None, "all nodes are in one rack")
        for key in SPINE_KEYS
    ),
)
"""Keys that nothing reads."""
MODEL_ROWS: tuple[Row, ...] = (
    (
        "model-experts-per-token",
        "`model.num_experts` needs `experts_per_token`, at most as many.",
        check_experts_per_token,
    ),
    ("model-dense-layers", "`model.dense_layers` leaves a layer for experts.", check_dense_layers),
    (
        "model-latent",
        "Latent attention needs `latent_size`, an even `rope_head_dim`, rope, and a key head for each head.",
        check_latent,
    ),
    ("model-window-every", "`model.window_every` is at most `num_layers`.", check_window_every),
)

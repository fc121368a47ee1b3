"""Rules of mixture-of-experts models and of expert parallelism (ep, etp)."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job, Train
from meshwright.spec.legality.rule import ANY_VALUE, Rule, needs_setting, suggest
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, near_divisors

EXPERT_KEYS = (
    "experts_per_token",
    "expert_ffn_size",
    "shared_experts",
    "dense_layers",
    "router",
    "capacity_factor",
)
"""Keys of ``[model]`` that have an effect with `num_experts` only."""
BALANCE_KEYS = ("balance_loss", "balance_rate", "z_loss")
"""The same for ``[train]``."""


def check_experts_per_token(job: Job) -> Problem | None:
    """The router picks top-k of the experts, so k is at most their number."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.num_experts is None:
        return None
    code, path, experts = "model-experts-per-token", "model.experts_per_token", model.num_experts
    if model.experts_per_token is None:
        rule = f"is missing: model.num_experts={experts} needs the number of experts per token"
        return Problem(code, rule, path=path, fix="Set model.experts_per_token=2, for example")
    if model.experts_per_token <= experts:
        return None
    rule = f"is more than model.num_experts={experts}"
    return Problem(code, rule, path=path, value=model.experts_per_token, fix=f"Use {experts} or less")


def check_dense_layers(job: Job) -> Problem | None:
    """At least one layer has experts."""
    model = job.model
    if not isinstance(model, DecoderModel) or model.num_experts is None or model.expert_layers:
        return None
    rule = f"leaves none of model.num_layers={model.num_layers} for experts"
    fix = f"Use {model.num_layers - 1} or less, or leave model.num_experts out"
    return Problem("model-dense-layers", rule, path="model.dense_layers", value=model.dense_layers, fix=fix)


def check_dense_model(job: Job) -> Problem | None:
    """A dense model has no experts to shard."""
    if isinstance(job.model, DecoderModel) and job.model.num_experts is not None:
        return None
    for name in ("ep", "etp"):
        path, value = f"layout.{name}", getattr(job.layout, name)
        if value > 1:
            rule, fix = "shards experts; the model is dense", f"Leave {path} out"
            return Problem("layout-ep-dense", rule, path=path, value=value, fix=fix)
    return None


def check_experts_over_ep(job: Job) -> Problem | None:
    """Every ep rank holds the same number of whole experts."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel) or model.num_experts is None or layout.ep == 1:
        return None
    experts = model.num_experts
    if experts % layout.ep == 0:
        return None
    rule = f"does not divide model.num_experts={experts}; every rank holds whole experts"
    fix = suggest(near_divisors(experts, layout.ep))
    return Problem("layout-ep-experts", rule, path="layout.ep", value=layout.ep, fix=fix)


def check_ep_ranks(job: Job) -> Problem | None:
    """Expert parallelism reuses the ranks of dp_shard x cp x tp and adds none."""
    model, layout = job.model, job.layout
    ranks_needed = layout.ep * layout.etp
    if not isinstance(model, DecoderModel) or model.num_experts is None or ranks_needed == 1:
        return None
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % ranks_needed == 0:
        return None
    name = "ep" if layout.ep > 1 else "etp"
    times = f"times layout.etp={layout.etp} " if name == "ep" and layout.etp > 1 else ""
    rule = f"{times}does not divide layout.dp_shard={layout.dp_shard} x layout.cp={layout.cp} x "
    rule += f"layout.tp={layout.tp} = {ranks}; experts are sharded over these ranks"
    rest = ranks // layout.etp if name == "ep" and ranks % layout.etp == 0 else ranks
    experts = model.num_experts if name == "ep" else rest
    fix = suggest(d for d in divisors(rest) if experts % d == 0)
    fix += ", or more layout.dp_shard" + (" instead of dp_replicate" if layout.dp_replicate > 1 else "")
    return Problem("layout-ep-ranks", rule, path=f"layout.{name}", value=getattr(layout, name), fix=fix)


def check_etp_ffn(job: Job) -> Problem | None:
    """The linears of a routed expert split evenly over etp."""
    model, etp = job.model, job.layout.etp
    if not isinstance(model, DecoderModel) or model.num_experts is None or model.expert_width % etp == 0:
        return None
    key = "expert_ffn_size" if model.expert_ffn_size else "ffn_size"
    rule = f"does not divide model.{key}={model.expert_width}; an expert is split evenly over etp"
    fix = suggest(near_divisors(model.expert_width, etp))
    return Problem("layout-etp-ffn", rule, path="layout.etp", value=etp, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "model-experts-per-token",
        "`model.num_experts` needs `experts_per_token`, at most as many.",
        check_experts_per_token,
    ),
    Rule("model-dense-layers", "`model.dense_layers` leaves a layer for experts.", check_dense_layers),
    *(
        needs_setting(
            section, f"{table}.{key}", "model.num_experts", ANY_VALUE, "a dense model has no experts"
        )
        for table, section, keys in (("model", DecoderModel, EXPERT_KEYS), ("train", Train, BALANCE_KEYS))
        for key in keys
    ),
    Rule(
        "layout-ep-experts",
        "`layout.ep` divides `model.num_experts`: every rank holds whole experts.",
        check_experts_over_ep,
    ),
    Rule(
        "layout-ep-ranks",
        "`ep` x `etp` divides `dp_shard` x `cp` x `tp`: experts are sharded over these ranks.",
        check_ep_ranks,
    ),
    Rule("layout-etp-ffn", "`layout.etp` divides the width of an expert.", check_etp_ffn),
    Rule("layout-ep-dense", "`ep` and `etp` shard experts; a dense model has none.", check_dense_model),
)

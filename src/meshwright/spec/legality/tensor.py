"""Rules of tensor parallelism (tp) and sequence parallelism."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule, divides, needs_degree, suggest
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, list_choices, near_divisors


def check_kv_heads(job: Job) -> Problem | None:
    """Key heads split evenly over tp, or are replicated evenly where there are fewer of them."""
    model, tp = job.model, job.layout.tp
    if not isinstance(model, DecoderModel) or model.attention == "latent":
        return None
    kv = model.num_kv_heads
    if kv % tp == 0 or tp % kv == 0:
        return None
    rule = f"neither divides model.num_kv_heads={kv} nor is a multiple of it; key heads are split evenly "
    rule += "over tp, or each is replicated on the same number of ranks"
    legal = [d for d in divisors(model.num_heads) if kv % d == 0 or d % kv == 0]
    return Problem("layout-tp-kv-heads", rule, path="layout.tp", value=tp, fix=suggest(legal))


def check_ffn(job: Job) -> Problem | None:
    """Dense feed-forwards and shared experts split evenly over tp; routed experts split over etp."""
    model, tp = job.model, job.layout.tp
    if not isinstance(model, DecoderModel):
        return None
    if model.expert_layers < model.num_layers and model.ffn_size % tp:
        rule = f"does not divide model.ffn_size={model.ffn_size}; the feed-forward is split evenly over tp"
        fix = f"Use {list_choices(divisors(model.ffn_size))}"
        return Problem("layout-tp-ffn", rule, path="layout.tp", value=tp, fix=fix)
    shared = model.shared_experts * model.expert_width
    if model.expert_layers and shared % tp:
        rule = f"does not divide the width {shared} of the shared experts (model.shared_experts="
        rule += f"{model.shared_experts} x {model.expert_width}); they are split evenly over tp"
        return Problem(
            "layout-tp-ffn", rule, path="layout.tp", value=tp, fix=suggest(near_divisors(shared, tp))
        )
    return None


def check_sequence_parallel(job: Job) -> Problem | None:
    """Between the layers each tp rank holds an equal chunk of the sequence."""
    layout, length = job.layout, job.data.seq_len
    chunks = layout.tp * layout.cp
    if not layout.sequence_parallel or layout.tp == 1 or length % chunks == 0:
        return None
    rule = f"splits data.seq_len={length} into layout.tp={layout.tp} x layout.cp={layout.cp} = {chunks} "
    rule += "chunks, which are not equal"
    fix = f"Use a data.seq_len that is a multiple of {chunks}, or leave layout.sequence_parallel out"
    code, path = "layout-sequence-parallel-len", "layout.sequence_parallel"
    return Problem(code, rule, path=path, value=True, fix=fix)


def check_routed_tokens(job: Job) -> Problem | None:
    """Each tp rank routes an equal chunk of the tokens, so that no token is routed twice."""
    model, layout, length = job.model, job.layout, job.data.seq_len
    chunks = layout.tp * layout.cp
    if not isinstance(model, DecoderModel) or not model.expert_layers or layout.tp == 1:
        return None
    if layout.sequence_parallel or length % chunks == 0:  # sequence parallelism has its own rule
        return None
    rule = f"times layout.cp={layout.cp} does not divide data.seq_len={length}; with model.num_experts="
    rule += f"{model.num_experts} each tp rank routes an equal chunk of the tokens"
    fix = f"Use a data.seq_len that is a multiple of {chunks}, or another layout.tp"
    return Problem("layout-tp-routed", rule, path="layout.tp", value=layout.tp, fix=fix)


RULES: tuple[Rule, ...] = (
    divides("layout-tp-heads", "layout.tp", "model.num_heads", "heads split evenly over tp"),
    Rule(
        "layout-tp-kv-heads",
        "`layout.tp` divides `model.num_kv_heads`, or is a multiple of it: key heads are then replicated.",
        check_kv_heads,
    ),
    Rule(
        "layout-tp-ffn",
        "`layout.tp` divides `model.ffn_size`, and the width of all shared experts.",
        check_ffn,
    ),
    Rule(
        "layout-tp-routed",
        "With `num_experts`, `tp` x `cp` divides `data.seq_len`: tp ranks route equal chunks of the tokens.",
        check_routed_tokens,
    ),
    Rule(
        "layout-sequence-parallel-len",
        "With `sequence_parallel`, `tp` x `cp` divides `data.seq_len`.",
        check_sequence_parallel,
    ),
    needs_degree(
        "layout-sequence-parallel-tp",
        "layout.sequence_parallel",
        False,
        "layout.tp",
        "it shards activations within tp",
    ),
)

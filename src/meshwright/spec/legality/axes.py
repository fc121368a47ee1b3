"""Checks of the mesh axes against the model, the batch and each other; the rows are in the legality table.

Published frameworks draw the same lines: Megatron's for tp, interleaving and experts, torch's for schedules
in a V, Ulysses' for heads. What only this version cannot do is in the table's second half, as not built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES, Layout
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, list_choices, near_divisors

Check = Callable[[Job], Problem | None]


def count_micro_batches(job: Job) -> int | None:
    """Micro-batches of a step on the fullest rank; None while the micro-batch is left open."""
    micro = job.layout.micro_batch
    return None if micro is None else -(-_share(job) // micro)


def _share(job: Job) -> int:
    """Samples of the fullest rank."""
    return -(-job.train.global_batch // job.layout.data_degree)


def _use(numbers: Iterable[int]) -> str:
    return f"Use {list_choices(sorted(set(numbers))[-8:])}"


def check_tp_kv_heads(job: Job) -> Problem | None:
    """Key heads split evenly over tp, or are repeated evenly where there are fewer of them."""
    model, tp = job.model, job.layout.tp
    if not isinstance(model, DecoderModel) or model.attention == "latent":
        return None
    kv = model.num_kv_heads
    if kv % tp == 0 or tp % kv == 0:
        return None
    rule = (
        f"neither divides model.num_kv_heads={kv} nor is a multiple of it; key heads split evenly over tp, "
    )
    rule += "or each of them is held by equally many ranks"
    legal = [d for d in divisors(model.num_heads) if kv % d == 0 or d % kv == 0]
    return Problem("layout-tp-kv-heads", rule, path="layout.tp", value=tp, fix=_use(legal))


def check_tp_ffn(job: Job) -> Problem | None:
    """Dense feed-forwards and shared experts split evenly over tp; routed experts over etp."""
    model, tp = job.model, job.layout.tp
    if not isinstance(model, DecoderModel):
        return None
    if model.expert_layers < model.num_layers and model.ffn_size % tp:
        rule = f"does not divide model.ffn_size={model.ffn_size}; the feed-forward splits evenly over tp"
        fix = f"Use {list_choices(divisors(model.ffn_size))}"
        return Problem("layout-tp-ffn", rule, path="layout.tp", value=tp, fix=fix)
    shared = model.shared_experts * model.expert_width
    if model.expert_layers and shared % tp:
        rule = f"does not divide the {shared} columns of the shared experts (model.shared_experts="
        rule += f"{model.shared_experts} x {model.expert_width}); they split evenly over tp"
        return Problem("layout-tp-ffn", rule, path="layout.tp", value=tp, fix=_use(near_divisors(shared, tp)))
    return None


def check_interleaved(job: Job) -> Problem | None:
    """Interleaving means several stages a rank, and deals micro-batches in rounds of pp."""
    layout = job.layout
    if layout.schedule != "interleaved" or layout.pp == 1:
        return None
    if layout.virtual_stages == 1:
        rule = "needs layout.virtual_stages above 1: with one stage a rank it is 1f1b"
        fix = "Set layout.virtual_stages=2, or layout.schedule=1f1b"
        return Problem("layout-interleaved", rule, path="layout.schedule", value="interleaved", fix=fix)
    count = count_micro_batches(job)
    if count is None:
        count = _share(job) if _share(job) < layout.pp else 0
    if count % layout.pp == 0:
        return None
    rule = (
        f"runs {count} micro-batches (train.global_batch={job.train.global_batch} over {layout.data_degree} "
    )
    rule += (
        f"ranks of data, layout.micro_batch={layout.micro_batch or 1}) in rounds of layout.pp={layout.pp}, "
    )
    rule += "which does not divide them"
    whole = -(-count // layout.pp) * layout.pp * (layout.micro_batch or 1) * layout.data_degree
    fix = f"Use layout.schedule=1f1b, or train.global_batch={whole}"
    return Problem("layout-interleaved", rule, path="layout.schedule", value="interleaved", fix=fix)


def check_virtual_stages(job: Job) -> Problem | None:
    """Which schedules hold how many stages a rank."""
    layout = job.layout
    schedule, stages = layout.schedule, layout.virtual_stages
    if layout.pp == 1 or schedule == "interleaved":
        return None
    code, path = "layout-virtual-stages", "layout.virtual_stages"
    if schedule in V_SCHEDULES and stages != 2:
        rule = f"is not 2: layout.schedule={schedule} walks the ranks down and up again, in a V"
        return Problem(code, rule, path=path, value=stages, fix="Use 2, or leave it out")
    if schedule not in V_SCHEDULES and stages > 1:
        rule = f"has no meaning with layout.schedule={schedule}, which runs one stage a rank"
        return Problem(code, rule, path=path, value=stages, fix="Set layout.schedule=interleaved")
    return None


def check_dualpipe(job: Job) -> Problem | None:
    """DualPipe-V fills both arms of its V before it starts to alternate."""
    layout = job.layout
    count, least = count_micro_batches(job), 2 * layout.pp
    if count is None:
        count = _share(job)
    if layout.schedule != "dualpipe-v" or layout.pp == 1 or count >= least:
        return None
    rule = f"needs 2 x layout.pp={layout.pp} micro-batches, and a rank has {count} of "
    rule += f"train.global_batch={job.train.global_batch}"
    batch = least * (layout.micro_batch or 1) * layout.data_degree
    fix = f"Use layout.schedule=zbv, fewer stages, or train.global_batch={batch}"
    return Problem("layout-dualpipe", rule, path="layout.schedule", value="dualpipe-v", fix=fix)


def check_experts_over_ep(job: Job) -> Problem | None:
    """Whole experts on each rank of ep."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel) or model.num_experts is None or layout.ep == 1:
        return None
    experts = model.num_experts
    if experts % layout.ep == 0:
        return None
    rule = f"does not divide model.num_experts={experts}; every rank holds whole experts"
    fix = _use(near_divisors(experts, layout.ep))
    return Problem("layout-ep-experts", rule, path="layout.ep", value=layout.ep, fix=fix)


def check_ep_ranks(job: Job) -> Problem | None:
    """Experts are spread over ranks that are there already: ep adds none."""
    model, layout = job.model, job.layout
    product = layout.ep * layout.etp
    if not isinstance(model, DecoderModel) or model.num_experts is None or product == 1:
        return None
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % product == 0:
        return None
    name = "ep" if layout.ep > 1 else "etp"
    times = f" times layout.etp={layout.etp}" if name == "ep" and layout.etp > 1 else ""
    rule = f"{times.strip()} does not divide layout.dp_shard={layout.dp_shard} x layout.cp={layout.cp} x "
    rule += f"layout.tp={layout.tp} = {ranks}; experts are spread over these ranks"
    rest = ranks // layout.etp if name == "ep" and ranks % layout.etp == 0 else ranks
    experts = model.num_experts if name == "ep" else rest
    fix = _use(d for d in divisors(rest) if experts % d == 0)
    fix += ", or more layout.dp_shard" + (" in place of dp_replicate" if layout.dp_replicate > 1 else "")
    return Problem(
        "layout-ep-ranks", rule.strip(), path=f"layout.{name}", value=getattr(layout, name), fix=fix
    )


def check_etp_ffn(job: Job) -> Problem | None:
    """The matrices of a routed expert split evenly over etp."""
    model, etp = job.model, job.layout.etp
    if not isinstance(model, DecoderModel) or model.num_experts is None or model.expert_width % etp == 0:
        return None
    key = "expert_ffn_size" if model.expert_ffn_size else "ffn_size"
    rule = f"does not divide model.{key}={model.expert_width}; an expert splits evenly over etp"
    fix = _use(near_divisors(model.expert_width, etp))
    return Problem("layout-etp-ffn", rule, path="layout.etp", value=etp, fix=fix)


def check_ulysses(job: Job) -> Problem | None:
    """Ulysses trades pieces of the sequence for heads: each rank of tp x cp needs some."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel) or layout.context != "ulysses" or layout.cp == 1:
        return None
    ranks, path = layout.tp * layout.cp, "layout.cp"
    if model.num_heads % ranks:
        rule = f"times layout.tp={layout.tp} does not divide model.num_heads={model.num_heads}; "
        rule += "layout.context=ulysses gives every rank whole heads"
        most = model.num_heads // layout.tp if model.num_heads % layout.tp == 0 else 1
        fix = f"{_use(near_divisors(most, layout.cp))}, or layout.context=ring"
        return Problem("layout-ulysses-heads", rule, path=path, value=layout.cp, fix=fix)
    mine = max(1, model.num_kv_heads // layout.tp)
    if model.attention == "latent" or mine % layout.cp == 0 or layout.cp % mine == 0:
        return None
    rule = f"does not go evenly with the {mine} key heads of a rank (model.num_kv_heads={model.num_kv_heads} "
    rule += f"over layout.tp={layout.tp}); layout.context=ulysses splits or repeats them evenly"
    fix = (
        f"{_use(d for d in divisors(mine) if model.num_heads % (layout.tp * d) == 0)}, or layout.context=ring"
    )
    return Problem("layout-ulysses-heads", rule, path=path, value=layout.cp, fix=fix)


def check_sequence_parallel(job: Job) -> Problem | None:
    """Each rank of tp holds an equal piece of its sequence between the layers."""
    layout, length = job.layout, job.data.seq_len
    pieces = layout.tp * layout.cp
    if not layout.sequence_parallel or layout.tp == 1 or length % pieces == 0:
        return None
    rule = (
        f"cuts data.seq_len={length} into layout.tp={layout.tp} x layout.cp={layout.cp} = {pieces} pieces, "
    )
    rule += "which are not equal"
    fix = f"Use a data.seq_len that is a multiple of {pieces}, or leave layout.sequence_parallel out"
    code, path = "layout-sequence-parallel-len", "layout.sequence_parallel"
    return Problem(code, rule, path=path, value=True, fix=fix)


def check_routed_tokens(job: Job) -> Problem | None:
    """Each rank of tp routes an equal run of the tokens, so that no token is routed twice."""
    model, layout, length = job.model, job.layout, job.data.seq_len
    pieces = layout.tp * layout.cp
    if not isinstance(model, DecoderModel) or not model.expert_layers or layout.tp == 1:
        return None
    if layout.sequence_parallel or length % pieces == 0:  # sequence parallelism has a rule of its own
        return None
    rule = f"times layout.cp={layout.cp} does not divide data.seq_len={length}; with model.num_experts="
    rule += f"{model.num_experts} each rank of tp routes an equal part of the tokens"
    fix = f"Use a data.seq_len that is a multiple of {pieces}, or another layout.tp"
    return Problem("layout-tp-routed", rule, path="layout.tp", value=layout.tp, fix=fix)


def check_zero_unsharded(job: Job) -> Problem | None:
    """State is sharded over dp_shard x cp."""
    layout = job.layout
    if layout.zero == 0 or layout.dp_shard * layout.cp > 1:
        return None
    rule = "needs layout.dp_shard > 1 (or layout.cp > 1): there is nothing to shard over"
    fix = "Leave layout.zero out, or use layout.dp_shard=2 or more"
    return Problem("layout-zero-unsharded", rule, path="layout.zero", value=layout.zero, fix=fix)


def _check_idle(code: str, key: str, degree: str, why: str) -> Check:
    """A setting of the layout that only a degree above one gives an effect."""
    idle = getattr(Layout, key)

    def check(job: Job) -> Problem | None:
        value = getattr(job.layout, key)
        if value == idle or getattr(job.layout, degree) > 1:
            return None
        rule, fix = f"has no effect with layout.{degree}=1: {why}", f"Leave layout.{key} out"
        return Problem(code, rule, path=f"layout.{key}", value=value, fix=fix)

    return check


def check_idle_accumulate(job: Job) -> Problem | None:
    """Gradients that are not sharded are always summed where they are."""
    layout = job.layout
    if layout.accumulate == "sharded" or layout.zero >= 2:
        return None
    rule = f"has no effect with layout.zero={layout.zero}: gradients are not sharded below 2"
    fix = "Leave layout.accumulate out, or use layout.zero=2 or 3"
    return Problem("layout-accumulate-zero", rule, path="layout.accumulate", value="deferred", fix=fix)


def check_idle_prefetch(job: Job) -> Problem | None:
    """Only ZeRO-3 gathers layers."""
    layout = job.layout
    if layout.prefetch == 1 or layout.zero == 3:
        return None
    rule = f"has no effect with layout.zero={layout.zero}: only ZeRO-3 gathers layers"
    fix = "Leave layout.prefetch out, or use layout.zero=3"
    return Problem("layout-prefetch-zero", rule, path="layout.prefetch", value=layout.prefetch, fix=fix)


Row = tuple[str, str, Check]

AXIS_ROWS: tuple[Row, ...] = (
    (
        "layout-tp-kv-heads",
        "`layout.tp` divides `model.num_kv_heads`, or is a multiple of it: then key heads are repeated.",
        check_tp_kv_heads,
    ),
    (
        "layout-tp-ffn",
        "`layout.tp` divides `model.ffn_size`, and the width of all shared experts.",
        check_tp_ffn,
    ),
    (
        "layout-interleaved",
        '`schedule = "interleaved"` needs `virtual_stages` > 1, and a multiple of `pp` micro-batches.',
        check_interleaved,
    ),
    (
        "layout-virtual-stages",
        "`virtual_stages` is 1 for `gpipe`, `1f1b` and `zb-h1`, and 2 for `zbv` and `dualpipe-v`.",
        check_virtual_stages,
    ),
    ("layout-dualpipe", '`schedule = "dualpipe-v"` needs 2 x `pp` micro-batches.', check_dualpipe),
    (
        "layout-ep-experts",
        "`layout.ep` divides `model.num_experts`: every rank holds whole experts.",
        check_experts_over_ep,
    ),
    (
        "layout-ep-ranks",
        "`ep` x `etp` divides `dp_shard` x `cp` x `tp`: experts are spread over these ranks.",
        check_ep_ranks,
    ),
    ("layout-etp-ffn", "`layout.etp` divides the width of an expert.", check_etp_ffn),
    (
        "layout-ulysses-heads",
        'With `context = "ulysses"`, `tp` x `cp` divides `num_heads`; key heads split or repeat evenly.',
        check_ulysses,
    ),
    (
        "layout-sequence-parallel-len",
        "With `sequence_parallel`, `tp` x `cp` divides `data.seq_len`.",
        check_sequence_parallel,
    ),
    (
        "layout-tp-routed",
        "With `num_experts`, `tp` x `cp` divides `data.seq_len`: ranks of `tp` route equal parts.",
        check_routed_tokens,
    ),
    (
        "layout-zero-unsharded",
        "`layout.zero` above 0 needs `dp_shard` > 1 or `cp` > 1: else there is nothing to shard over.",
        check_zero_unsharded,
    ),
    (
        "layout-schedule-pp",
        "A `schedule` other than `1f1b` needs `pp` > 1.",
        _check_idle("layout-schedule-pp", "schedule", "pp", "there is no pipeline"),
    ),
    (
        "layout-context-cp",
        '`context = "ulysses"` needs `cp` > 1.',
        _check_idle("layout-context-cp", "context", "cp", "no sequence is shared"),
    ),
    ("layout-accumulate-zero", '`accumulate = "deferred"` needs `zero` 2 or 3.', check_idle_accumulate),
    ("layout-prefetch-zero", "A `prefetch` other than 1 needs `zero = 3`.", check_idle_prefetch),
)
"""Rows of what can never run."""

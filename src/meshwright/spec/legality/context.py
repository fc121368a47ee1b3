"""Rules of context parallelism (cp): ring attention and Ulysses."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule, needs_degree, suggest
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, near_divisors


def check_ulysses(job: Job) -> Problem | None:
    """Ulysses exchanges sequence chunks for heads: every rank of tp x cp needs whole heads."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel) or layout.context != "ulysses" or layout.cp == 1:
        return None
    ranks, path = layout.tp * layout.cp, "layout.cp"
    if model.num_heads % ranks:
        rule = f"times layout.tp={layout.tp} does not divide model.num_heads={model.num_heads}; "
        rule += "layout.context=ulysses gives every rank whole heads"
        most = model.num_heads // layout.tp if model.num_heads % layout.tp == 0 else 1
        fix = f"{suggest(near_divisors(most, layout.cp))}, or layout.context=ring"
        return Problem("layout-ulysses-heads", rule, path=path, value=layout.cp, fix=fix)
    local = max(1, model.num_kv_heads // layout.tp)
    if model.attention == "latent" or local % layout.cp == 0 or layout.cp % local == 0:
        return None
    rule = f"neither divides the {local} key heads per rank (model.num_kv_heads={model.num_kv_heads} over "
    rule += f"layout.tp={layout.tp}) nor is a multiple of them; layout.context=ulysses splits or replicates "
    rule += "key heads evenly"
    legal = [d for d in divisors(local) if model.num_heads % (layout.tp * d) == 0]
    fix = f"{suggest(legal)}, or layout.context=ring"
    return Problem("layout-ulysses-heads", rule, path=path, value=layout.cp, fix=fix)


def check_seq_len(job: Job) -> Problem | None:
    """The sequence splits into equal chunks: one per cp rank, or two for ring attention."""
    ring = job.layout.context == "ring"
    chunks = 2 * job.layout.cp if ring else job.layout.cp
    if job.layout.cp == 1 or job.data.seq_len % chunks == 0:
        return None
    rule = f"needs data.seq_len={job.data.seq_len} to split into {chunks} equal chunks"
    rule += " (two per rank, to balance causal attention)" if ring else ""
    fix = f"Use a data.seq_len that is a multiple of {chunks}"
    return Problem("layout-cp-seq-len", rule, path="layout.cp", value=job.layout.cp, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "layout-ulysses-heads",
        'With `context = "ulysses"`, `tp` x `cp` divides `num_heads`; key heads split or replicate evenly.',
        check_ulysses,
    ),
    Rule(
        "layout-cp-seq-len",
        "`data.seq_len` splits into 2 x `cp` equal chunks; with `ulysses` into `cp`.",
        check_seq_len,
    ),
    needs_degree(
        "layout-context-cp",
        "layout.context",
        "ring",
        "layout.cp",
        "no sequence is split",
        '`context = "ulysses"` needs `cp` > 1.',
    ),
)

"""``meshwright prove``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.api import load_job
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import CheckFailedError
from meshwright.core.units import format_plural
from meshwright.spec.model import DecoderModel

if TYPE_CHECKING:
    from meshwright.results import Proof, Verdict

MAX_NAMED = 3
"""Modules that are named where outputs were not compared."""


def prove_job(output: Output, source: str, overrides: Sequence[str]) -> int:
    """Prove a job and print the verdict; status 3 if a module differs."""
    proof = load_job(source, *overrides).prove(reporter=ConsoleReporter(output))
    _describe(output, proof)
    output.result(proof.as_dict())
    return 0 if proof.equal else CheckFailedError.exit_status


def _describe(output: Output, proof: Proof) -> None:
    """Equal and within which tolerance, or the first divergence."""
    parts = sorted({module for found in proof.exact.findings for module in found.not_compared})
    if parts:
        more = f" and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
        output.print(f"Not compared, because a rank holds a part: {', '.join(parts[:MAX_NAMED])}{more}")
    if ties := sum(found.replayed_ties for found in proof.exact.findings):
        choices = format_plural(ties, "routing decision")
        output.print(f"{choices} tied within {proof.tie:g}: those of the reference were replayed")
    model = proof.runs.plan.job.model
    if isinstance(model, DecoderModel) and proof.exact.record.tokens_read < model.vocab_size:
        read = f"{proof.exact.record.tokens_read:,} of {model.vocab_size:,} tokens"
        output.print(f"The batches of the last steps hold {read}; the embedding of every token was looked up")
    for layer, experts in proof.exact.record.idle_experts.items():
        output.print(f"Not proved, because no token reached them: experts {experts} of {layer}")
    _describe_verdict(output, proof.layout_name, proof.exact.verdict)
    if proof.mixed is not None and proof.runs.mixed is not None:
        precision = proof.runs.mixed[0].job.train.precision
        _describe_verdict(output, f"{proof.layout_name} in {precision}", proof.mixed.verdict)


def _describe_verdict(output: Output, name: str, verdict: Verdict) -> None:
    """The largest differences with their tolerances, and the first divergence."""
    figures = {
        "losses": ("loss", verdict.max_rel_diff),
        "gradient norms": ("gradient_norm", verdict.max_norm_diff),
        "gradients": ("gradient", verdict.max_grad_diff),
        "updates": ("update", verdict.max_update_diff),
    }
    output.print(f"{'Equal' if verdict.equal else 'NOT equal'}: {name}. Largest relative differences:")
    for what, (key, difference) in figures.items():
        output.print(f"  {what}: {_format(difference)} (tolerance {verdict.tolerance[key]:g})")
    if verdict.first_divergence is not None:
        output.print(f"First divergence: {verdict.first_divergence.sentence()} [prove-differs]")


def _format(difference: float | None) -> str:
    return "no finite number" if difference is None else f"{difference:.2g}"

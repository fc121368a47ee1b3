"""The verdict of a proof: equal or not, and the first divergence."""

from __future__ import annotations

import pytest

from meshwright.verify.proof_task import (
    BF16,
    FP16,
    ActivationDifference,
    RankFindings,
    ReferenceRecord,
    RunFigures,
    TensorDifference,
    UpdateDifference,
)
from meshwright.verify.verdict import Verdict
from meshwright.verify.verdict import judge as judge_figures

MODULES = ["embed", "blocks.0.norm", "blocks.0.attention.wq", "blocks.0.attention.wo", "blocks.0.attention"]
MODULES += ["blocks.0", "norm"]
PARAMETERS = ["head.weight", "norm.weight", "blocks.0.attention.wo.weight", "embed.weight"]
LOSSES = [5.0 - 0.1 * step for step in range(10)]


def reference_of(**norms: float) -> ReferenceRecord:
    """A reference record with these gradient norms."""
    sizes = {name: norms.get(name.replace(".", "_"), 1.0) for name in PARAMETERS}
    return ReferenceRecord(
        modules=list(MODULES),
        parameters=list(PARAMETERS),
        gradient_norms={"1": dict(sizes), "10": dict(sizes)},
        weight_norms=dict.fromkeys(PARAMETERS, 1.0),
    )


def findings_of(rank: int = 0) -> RankFindings:
    """The findings of a rank that is correct up to rounding."""

    def table() -> dict[str, TensorDifference]:
        return {name: TensorDifference(1e-7, 1.0, 1e-7) for name in PARAMETERS}

    rows = [ActivationDifference(m, w, 0, 1e-7) for m in (*MODULES, "") for w in ("input", "output")]
    updates = {step: {name: UpdateDifference(1e-7) for name in PARAMETERS} for step in ("1", "10")}
    return RankFindings(rank, rows, {"1": table(), "10": table()}, table(), updates)


def judge(reference, findings, losses, reference_losses, norms=None) -> Verdict:
    """The verdict on these losses; the gradient norms of rank 0 are all 1 or as given."""
    ones = [1.0] * len(losses)
    return judge_figures(
        reference,
        findings,
        RunFigures(losses, {0: ones, 1: norms or ones}),
        RunFigures(reference_losses, {0: [1.0] * 10}),
    )


def inject_difference(findings: RankFindings, module: str, *what: str, by: float | None = 0.5) -> None:
    """Give inputs or outputs of a module a difference."""
    for row in findings.activations:
        if row.module == module and row.what in what:
            row.difference = by


def first_divergence_of(findings: RankFindings, losses=LOSSES, reference: ReferenceRecord | None = None):
    """The first divergence of a verdict that must not be equal."""
    verdict = judge(reference or reference_of(), [findings_of(0), findings], losses, LOSSES)
    assert not verdict.equal
    assert verdict.first_divergence is not None
    return verdict.first_divergence


def test_differences_by_rounding_pass():
    verdict = judge(
        reference_of(), [findings_of(0), findings_of(1)], [x * (1 + 9e-6) for x in LOSSES], LOSSES
    )
    assert verdict.equal
    assert verdict.first_divergence is None
    assert verdict.max_rel_diff == pytest.approx(9e-6)
    assert verdict.max_grad_diff == pytest.approx(1e-7)


@pytest.mark.parametrize("step", [1, 10])
def test_one_different_gradient_on_one_rank_fails(step):
    """A difference just below the tolerance passes and one just above fails, at either step."""
    findings = findings_of(1)
    findings.gradients[str(step)]["norm.weight"] = TensorDifference(0.99e-4, 1.0, 1e-4)
    assert judge(reference_of(), [findings_of(0), findings], LOSSES, LOSSES).equal
    findings.gradients[str(step)]["norm.weight"] = TensorDifference(1.01e-4, 1.0, 1e-4)
    found = first_divergence_of(findings)
    assert (found.kind, found.module, found.parameter) == ("gradient", "norm", "norm.weight")
    assert (found.step, found.rank) == (step, 1)


def test_gradients_are_named_in_the_order_of_the_backward_pass():
    findings = findings_of(1)
    for name in ("embed.weight", "blocks.0.attention.wo.weight"):
        findings.gradients["1"][name] = TensorDifference(0.3, 1.0, 0.3)
    assert first_divergence_of(findings).module == "blocks.0.attention.wo"


@pytest.mark.parametrize("step", ["1", "10"])
def test_missing_gradient_fails_on_one_rank_and_on_all(step):
    findings = findings_of(1)
    findings.gradients[step]["norm.weight"] = TensorDifference(None, missing=True)
    found = first_divergence_of(findings)
    assert (found.module, found.rank, found.note) == ("norm", 1, "missing")
    ranks = [findings_of(0), findings_of(1)]
    for rank in ranks:
        del rank.gradients[step]["norm.weight"]
    verdict = judge(reference_of(), ranks, LOSSES, LOSSES)
    assert not verdict.equal
    assert verdict.max_grad_diff == 1.0
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.note == "missing on every rank"
    assert "missing" in verdict.first_divergence.sentence()


def test_parameter_held_by_other_ranks_only_passes():
    """Each rank of a pipeline holds its own layers."""
    one, other = findings_of(0), findings_of(1)
    for step in ("1", "10"):
        del one.gradients[step]["head.weight"], other.gradients[step]["embed.weight"]
    assert judge(reference_of(), [one, other], LOSSES, LOSSES).equal


def test_parameter_missing_in_the_reference_fails():
    findings = findings_of(1)
    findings.gradients["1"]["extra.weight"] = TensorDifference(None)
    assert first_divergence_of(findings).note == "not in the reference"


def test_noise_below_the_rounding_of_the_full_gradient_is_ignored():
    """The gradient of the key bias is zero except for rounding. A slightly larger gradient is compared."""
    reference, findings = reference_of(norm_weight=1e-9), findings_of(1)
    for step in ("1", "10"):
        for rank in (findings,):
            rank.gradients[step]["norm.weight"] = TensorDifference(2e-9, -1.0, 0.0)
    others = findings_of(0)
    for step in ("1", "10"):
        others.gradients[step]["norm.weight"] = TensorDifference(0.0)
    assert judge(reference, [others, findings], LOSSES, LOSSES).equal
    findings.gradients["1"]["norm.weight"] = TensorDifference(3e-7, 1.0, 0.0)
    assert not judge(reference, [others, findings], LOSSES, LOSSES).equal


def test_constant_factor_is_reported():
    findings = findings_of(1)
    for name in PARAMETERS:
        findings.gradients["1"][name] = TensorDifference(0.5, 0.5, 1e-7)
    assert "all gradients are 0.5 times" in judge_alone(findings).note
    findings.gradients["1"]["embed.weight"] = TensorDifference(0.5, 0.7, 0.4)
    assert judge_alone(findings).note == ""


def judge_alone(findings: RankFindings):
    """The first divergence of a single rank."""
    found = judge(reference_of(), [findings], LOSSES, LOSSES).first_divergence
    assert found is not None
    return found


def test_forward_comes_before_loss_and_loss_before_backward():
    findings = findings_of(1)
    findings.gradients["1"]["embed.weight"] = TensorDifference(0.3, 1.0, 0.3)
    assert first_divergence_of(findings).kind == "gradient"
    losses = [6.0, *LOSSES[1:]]
    found = first_divergence_of(findings, losses)
    assert (found.kind, found.module, found.step) == ("loss", "loss", 1)
    inject_difference(findings, "norm", "output")
    assert first_divergence_of(findings, losses).module == "norm"
    inject_difference(findings, "blocks.0.attention.wq", "output")
    found = first_divergence_of(findings, losses)
    assert (found.kind, found.module, found.rank) == ("activation", "blocks.0.attention.wq", 1)


def test_wrong_input_names_the_enclosing_module():
    """An error between the projections is reported as attention, one before the block as the model."""
    findings = findings_of(1)
    inject_difference(findings, "blocks.0.attention.wo", "input", "output")
    inject_difference(findings, "blocks.0.attention", "output")
    losses = [6.0, *LOSSES[1:]]
    assert first_divergence_of(findings, losses).module == "blocks.0.attention"
    for module in ("blocks.0.norm", "blocks.0"):
        inject_difference(findings, module, "input", "output")
    assert first_divergence_of(findings, losses).module == "model"
    inject_difference(findings, "", "input", by=None)
    found = first_divergence_of(findings, losses)
    assert (found.kind, found.module, found.difference) == ("input", "model", None)


@pytest.mark.parametrize("step", [1, 10])
def test_wrong_update_fails_and_names_its_term(step):
    """A term that several parameters share is counted; the gradient norm of the same step comes after it."""
    findings = findings_of(1)
    for name in ("norm.weight", "embed.weight"):
        findings.updates[str(step)][name] = UpdateDifference(0.02, "weight decay", "not applied")
    found = first_divergence_of(findings)
    assert (found.kind, found.term, found.parameter) == ("update", "weight decay", "norm.weight")
    assert (found.step, found.rank, found.note) == (step, 1, "not applied; 2 of 4 parameters")
    assert found.sentence().startswith("the weight decay of norm.weight in norm at step")
    norms = [1.0] * 9 + [1.1]
    verdict = judge(reference_of(), [findings_of(0), findings], LOSSES, LOSSES, norms)
    assert verdict.max_norm_diff == pytest.approx(0.1)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.kind == "update"


def test_wrong_gradient_norm_on_one_rank_fails():
    norms = [1.0, 1.0, 2**0.5, *[1.0] * 7]
    found = judge(reference_of(), [findings_of(0), findings_of(1)], LOSSES, LOSSES, norms).first_divergence
    assert found is not None
    assert (found.kind, found.step, found.rank) == ("gradient_norm", 3, 1)
    assert found.difference == pytest.approx(2**0.5 - 1)


def test_wrong_norm_comes_before_the_clipping_that_follows_from_it():
    findings, norms = findings_of(1), [2.0] + [1.0] * 9
    findings.updates["1"]["norm.weight"] = UpdateDifference(0.5, "clipping", "")
    found = judge(reference_of(), [findings_of(0), findings], LOSSES, LOSSES, norms).first_divergence
    assert found is not None
    assert found.kind == "gradient_norm"


def test_mixed_precision_has_wider_tolerances_and_no_later_gradients():
    findings = findings_of(1)
    findings.gradients["10"]["norm.weight"] = TensorDifference(0.3, 1.0, 0.3)
    found, expected = RunFigures([x * 1.004 for x in LOSSES]), RunFigures(LOSSES)
    found.grad_norms, expected.grad_norms = {0: [1.02] * 10, 1: [0.98] * 10}, {0: [1.0] * 10}
    assert judge_figures(reference_of(), [findings_of(0), findings], found, expected, BF16).equal
    assert not judge_figures(reference_of(), [findings_of(0), findings], found, expected, FP16).equal
    assert not judge_figures(reference_of(), [findings_of(0), findings_of(1)], found, expected).equal
    found.losses[3] *= 1.01
    assert not judge_figures(reference_of(), [findings_of(0), findings], found, expected, BF16).equal


def test_unequal_initial_weight_fails_first():
    """One that is wrong is named before the outputs that it makes wrong."""
    findings = findings_of(1)
    inject_difference(findings, "embed", "output")
    findings.weights["embed.weight"] = TensorDifference(1e-3, 1.0, 1e-3, note="row 7")
    found = first_divergence_of(findings)
    assert (found.kind, found.parameter, found.rank, found.note) == ("weight", "embed.weight", 1, "row 7")


def test_nonfinite_or_missing_values_fail():
    findings = findings_of(1)
    findings.gradients["10"]["norm.weight"] = TensorDifference(None)
    verdict = judge(reference_of(), [findings], LOSSES, LOSSES)
    assert not verdict.equal
    assert verdict.max_grad_diff is None
    for losses in ([*LOSSES[:9], float("nan")], LOSSES[:9], [None, *LOSSES[1:]]):
        verdict = judge(reference_of(), [findings_of(0)], losses, LOSSES)
        assert not verdict.equal
        assert verdict.max_rel_diff is None
        assert verdict.first_divergence is not None
        assert verdict.first_divergence.kind == "loss"


def test_sentence_names_module_step_rank_and_difference():
    findings = findings_of(1)
    findings.gradients["1"]["norm.weight"] = TensorDifference(0.25, 1.1, 0.3)
    sentence = first_divergence_of(findings).sentence()
    assert sentence == "the gradient of norm.weight in norm at step 1 on rank 1 is off by 0.25"

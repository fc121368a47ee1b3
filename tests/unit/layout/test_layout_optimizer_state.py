"""State, formulas and cost of each optimizer, without torch."""

from __future__ import annotations

import re

import pytest

from meshwright.layout.optimizer_state import (
    count_newton_schulz_flops,
    decays,
    predict_optimizer,
    rule_of,
    state_keys,
)
from meshwright.layout.parameters import Parameter, list_parameters
from meshwright.plan.build import build_plan
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.time.step import predict_step
from meshwright.spec.load import build_job, job_tree
from meshwright.spec.train_defaults import OPTIMIZERS, fill_defaults, setting

HIDDEN = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
"""Elements of the matrices inside the two blocks of `tiny`."""
TOTAL, TENSORS = 94_528, 20


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"optimizer": "adamw"}, 8 * TOTAL + 4 * TENSORS),
        ({"optimizer": "sgd"}, 4 * TOTAL),
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "lion"}, 4 * TOTAL),
        ({"optimizer": "muon"}, 4 * HIDDEN + 8 * (TOTAL - HIDDEN) + 4 * (TENSORS - 14)),
    ],
    ids=str,
)
def test_optimizer_formulas_evaluate_to_their_bytes(make_job, keys, expected):
    """The formula of the ledger line, without its labels, gives the bytes."""
    ledger = predict_ledger(make_job(train=keys), 1, 1)
    (line,) = [line for line in ledger.lines if line.name == "optimizer"]
    assert ledger.state_bytes["optimizer"] == line.bytes == expected
    assert eval(re.sub(r"\([^)]*\)", "", line.formula).replace("x", "*")) == expected


def test_muon_updates_only_the_matrices_of_blocks(make_job):
    job = make_job(train={"optimizer": "muon"}, model={"tied_embeddings": False})
    rules = {p.name: rule_of(p.name, len(p.shape), job.train) for p in list_parameters(job.model)}
    muon = {name for name, rule in rules.items() if rule == "muon"}
    assert len(muon) == 14
    assert all(name.startswith("blocks.") and "norm" not in name for name in muon)
    assert {rules[name] for name in ("embed.weight", "head.weight", "norm.weight")} == {"adamw"}
    assert rule_of("blocks.0.ffn.experts.up.weight", 2, job.train) == "adamw", (
        "expert weights are several matrices"
    )
    assert rule_of("blocks.0.ffn.shared.up.weight", 2, job.train) == "muon"


def test_norms_and_biases_never_decay_and_the_embedding_by_option(make_job):
    train, spared = make_job().train, make_job(train={"decay_embeddings": False}).train
    assert [decays(*p, train) for p in (("embed.weight", 2), ("norm.weight", 1), ("x.bias", 1))] == [1, 0, 0]
    assert not decays("embed.weight", 2, spared)
    assert decays("head.weight", 2, spared)


def test_optimizer_cost_counts_memory_passes_and_muon_gemms(make_job):
    """AdamW reads and writes 7 arrays. Newton-Schulz of an m x n matrix has 5 x 2 (2 m^2 n + m^3) FLOPs."""
    costs = {name: _cost(make_job(train={"optimizer": name})) for name in OPTIMIZERS}
    assert costs["adamw"].moved_bytes == 28 * TOTAL
    assert costs["sgd"].moved_bytes == 20 * TOTAL
    assert _cost(make_job(train={"optimizer": "sgd", "momentum": 0.0})).moved_bytes == 12 * TOTAL
    assert {name for name, cost in costs.items() if cost.flops} == {"muon"}
    assert count_newton_schulz_flops([Parameter("tall", (3, 2))]) == 5 * 2 * (2 * 4 * 3 + 8)
    jobs = {name: make_job(train={"optimizer": name}, cluster={"device": "cpu"}) for name in costs}
    times = {name: predict_step(job, 1).parts["optimizer"] for name, job in jobs.items()}
    assert times["sgd"] < times["adamw"] < times["muon"]


def _cost(job):
    return predict_optimizer(list_parameters(job.model), job.train)


def test_optimizer_defaults_are_used_and_printed(make_job):
    """Lion has its own rate and betas. Given values are not printed as defaults."""
    lion = make_job(train={"optimizer": "lion", "beta1": 0.8})
    found = [setting(lion.train, key) for key in ("lr", "weight_decay", "beta1", "beta2")]
    assert found == [1e-4, 0.3, 0.8, 0.99]
    (reason,) = [r for r in build_plan(lion)[0].reasons if r.startswith("lion takes")]
    assert "lr=0.0001, weight_decay=0.3, beta2=0.99: every element" in reason
    assert not [r for r in build_plan(make_job())[0].reasons if "takes" in r]


def test_overriding_the_optimizer_of_a_plan_uses_the_new_defaults(make_job):
    """The plan omits keys that the job omits, so no key of AdamW remains for SGD."""
    tree = job_tree(make_job(layout={"dp_replicate": 1}))
    sgd = build_job(tree | {"train": tree["train"] | {"optimizer": "sgd", "schedule": "constant"}})
    assert (setting(sgd.train, "momentum"), setting(sgd.train, "lr")) == (0.9, 0.1)
    assert fill_defaults(sgd.train)["beta1"] is None


def test_noise_scale_adds_two_values_to_the_control_all_reduce(make_job):
    def control(every):
        job = make_job(layout={"dp_replicate": 2}, train={"noise_scale_every": every})
        (row,) = [t for t in build_plan(job)[0].collectives if (t.axis, t.phase) == ("control", "step")]
        return row.calls, row.bytes

    assert (control(0), control(3)) == ((1, 40), (1, 56))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_names_its_state(make_job, name):
    assert state_keys(name, make_job(train={"optimizer": name}).train)

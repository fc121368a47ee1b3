"""The formulas of updates equal the optimizers, and a wrong term is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.spec.job import Train
from meshwright.spec.train_defaults import setting
from meshwright.train.optimizer import build_optimizer, set_lr
from meshwright.verify.proof_task import MIN_LR, UPDATE_TOLERANCE
from meshwright.verify.update_formulas import ParameterState, UpdateRule, compare_update

CLIP = 0.25
OPTIMIZERS = {
    "adamw": {},
    "sgd": {},
    "sgd, nesterov": {"nesterov": True},
    "sgd, no momentum": {"momentum": 0.0},
    "lion": {},
    "muon": {},
}
NAME = "blocks.0.ffn.up.weight"


class Updated:
    """One matrix, updated a few times by an optimizer of the package; the last update is judged."""

    def __init__(self, optimizer: str, shape: tuple[int, ...] = (12, 8), **settings) -> None:
        name, *_ = optimizer.split(",")
        self.train = Train(steps=10, global_batch=1, optimizer=name, **OPTIMIZERS[optimizer], **settings)
        generator = torch.Generator().manual_seed(0)
        self.parameter = nn.Parameter(torch.randn(shape, generator=generator))
        self.optimizer = build_optimizer(_Named(self.parameter), self.train)
        self.gradients = [torch.randn(shape, generator=generator) for _ in range(4)]
        self.count = 0
        self.clip = CLIP
        self.lr = MIN_LR[name]

    def step(self) -> None:
        """Clip and update."""
        self.parameter.grad = self.gradients[self.count] * self.clip
        set_lr(self.optimizer, self.lr)
        self.optimizer.step()
        self.count += 1

    def state(self) -> ParameterState:
        """A copy."""
        moments = {key: value.clone() for key, value in self.optimizer.state.get(self.parameter, {}).items()}
        return ParameterState(self.parameter.detach().clone(), moments)

    def judge(self, spoil=lambda self: None, decays: bool = True):
        """The difference of the fourth update, spoilt."""
        for _ in range(3):
            self.step()
        before, gradient = self.state(), self.gradients[3]
        spoil(self)
        self.step()
        decay = setting(self.train, "weight_decay") if decays else 0.0
        rule = self.train.optimizer
        expected = UpdateRule(self.train, rule, MIN_LR[rule], decay, CLIP, 4)
        return compare_update(before, gradient, self.state(), expected)


class _Named:
    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def named_parameters(self):
        yield NAME, self._parameter
        yield "norm.weight", nn.Parameter(torch.ones(2))  # Muon leaves it to AdamW


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_formula_equals_the_optimizer(optimizer):
    """Far below the tolerance, so that a tenth of the weight decay shows."""
    found = Updated(optimizer).judge()
    assert found.difference is not None
    assert found.difference < UPDATE_TOLERANCE / 10


def _no_decay(updated):
    for group in updated.optimizer.param_groups:
        group["weight_decay"] = 0.0


def _zero_state(updated):
    for key, value in updated.optimizer.state[updated.parameter].items():
        if key != "step":
            value.zero_()


def _reverse_rows(updated):
    moment = updated.optimizer.state[updated.parameter]["exp_avg"]
    moment.copy_(moment.flip(0))


def _reset_count(updated):
    updated.optimizer.state[updated.parameter]["step"].zero_()


def _count_one_update_more(updated):
    """In the bias correction of the next update only."""
    count, original = updated.optimizer.state[updated.parameter]["step"], updated.optimizer.step

    def step():
        count.add_(1)
        original()
        count.sub_(1)

    updated.optimizer.step = step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_missing_weight_decay_is_named(optimizer):
    found = Updated(optimizer).judge(_no_decay)
    assert (found.term, found.note) == ("weight decay", "not applied")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("key", "value", "term"), [("clip", 2 * CLIP, "clipping"), ("clip", 0.0, "gradient")]
)
def test_wrong_factor_of_the_gradient_is_named(optimizer, key, value, term):
    found = Updated(optimizer).judge(lambda updated: setattr(updated, key, value))
    assert found.term == term


@pytest.mark.parametrize(
    ("spoil", "term", "note"),
    [
        (lambda updated: setattr(updated, "lr", 0.5 * updated.lr), "lr", "0.5 times"),
        (lambda updated: setattr(updated, "lr", 0.0), "update", "not applied"),
        (_zero_state, "moment", "restarted"),
        (_reverse_rows, "moment exp_avg", ""),
        (_reset_count, "bias correction", "update 1 instead of 4"),
        (_count_one_update_more, "bias correction", "update 5 instead of 4"),
    ],
)
def test_wrong_term_of_adamw_is_named(spoil, term, note):
    found = Updated("adamw").judge(spoil)
    assert (found.term, note in found.note) == (term, True), found


def test_decay_of_a_norm_is_named():
    """With a gradient of zero only the decay is left to judge."""
    found = Updated("adamw", (64,)).judge(
        lambda updated: updated.optimizer.param_groups[0].update(weight_decay=0.1), decays=False
    )
    assert (found.term, found.note) == ("weight decay", "applied to a parameter without decay")
    still = Updated("adamw")
    still.gradients = [torch.zeros(12, 8)] * 4
    assert still.judge().difference == pytest.approx(0.0, abs=UPDATE_TOLERANCE)
    still = Updated("adamw")
    still.gradients = [torch.zeros(12, 8)] * 4
    assert still.judge(_no_decay).term == "weight decay"

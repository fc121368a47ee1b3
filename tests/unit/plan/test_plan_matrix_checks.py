"""The checks of the planner's matrix find what they are for: each planted contradiction is named.

The command is replaced by one that answers from a plan, so that the answer can be made wrong in one place.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

import planner_checks
from meshwright.plan.build import build_plan, summarize_plan
from meshwright.plan.contract import write_plan
from meshwright.spec.load import load_job
from planner_checks import NOTHING_FITS, Ran, find_contradictions, name_layout, run_command
from planner_matrix import Case

CASE = Case("llama3.2-1b", "h100-sxm", 8)
SHARE = 0.92


class Planner:
    """Answers as ``plan`` does: with ``-o``, without it, and for a layout that is given."""

    def __init__(self):
        overrides = ("layout.pp=2", "layout.dp_shard=2", "layout.zero=1", "layout.micro_batch=1")
        self.plan, _ = build_plan(load_job(CASE.model, overrides, CASE.on))
        first = json.loads(json.dumps(summarize_plan(self.plan))) | {"fits": True}
        for name, rank in self.plan.classes().items():
            peaks = {"first_step": rank.first_peak_bytes, "checkpoint": rank.peak_bytes // 2}
            first["memory_bytes"][name] |= {**peaks, "needed": rank.first_peak_bytes + 10**9}
        second = copy.deepcopy(first) | {"step_s": 2 * first["step_s"], "step_s_high": 3 * first["step_s"]}
        second["breakdown_s"] = {"compute": second["step_s"]}
        usable = {"usable_bytes": int(SHARE * CASE.memory_bytes), "usable_share": SHARE}
        self.written = {**usable, "layouts": [first, second]}
        self.given = {**usable, "layouts": [copy.deepcopy(first)]}
        self.refusals = {}

    @property
    def first(self):
        return self.written["layouts"][0]

    @property
    def ranks(self):
        """The first layout's memory, of its first class of ranks."""
        return next(iter(self.first["memory_bytes"].values()))

    def answer(self, case, *arguments):
        assert case == CASE
        kind = "-o" if "-o" in arguments else "given" if "layout.pp=2" in arguments else "shown"
        if kind in self.refusals:
            return self.refusals[kind]
        if kind == "-o":
            write_plan(self.plan, arguments[arguments.index("-o") + 1])
        return Ran(0, json.dumps(self.given if kind == "given" else self.written), "")


@pytest.fixture
def planner(monkeypatch):
    """A planner that agrees with itself until a test changes an answer."""
    made = Planner()
    monkeypatch.setattr(planner_checks, "plan_case", made.answer)
    return made


def refusal(code=NOTHING_FITS, fix="Use 2 nodes", status=2):
    error = {"code": code, "fix": fix, "message": f"does not fit [{code}]"}
    return Ran(status, json.dumps({"status": "error", "errors": [error]}), f"error: does not fit. [{code}]\n")


def test_a_planner_that_agrees_with_itself_passes(planner, tmp_path):
    """Proves that the checks hold for a consistent planner: the failures below are those of the change."""
    assert find_contradictions(CASE, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


CHANGES = {
    "layout": lambda p: p.first["layout"].update(micro_batch=2),
    "peak of stage 0": lambda p: p.ranks.update(peak=p.ranks["peak"] + 1),
    "lines of stage 0": lambda p: p.ranks["lines"][0].update(bytes=1),
    "classes of ranks": lambda p: p.first["memory_bytes"].popitem(),
    "peak of the first step": lambda p: p.ranks.update(first_step=1),
    "collectives (1 and 1": lambda p: p.first["collectives"][0].update(bytes=1),
    "collectives (0 and 1": lambda p: p.first["collectives"].pop(),
    "step_s": lambda p: p.first.update(step_s=1.0000001 * p.first["step_s"]),
    "breakdown_s": lambda p: p.first["breakdown_s"].update(compute=0.0),
    "breakdown_s sums to": lambda p: p.written["layouts"][1]["breakdown_s"].update(compute=0.0),
    "is not within": lambda p: p.written["layouts"][1].update(step_s_low=1e9),
    "the first layout takes": lambda p: p.written["layouts"].reverse(),
    "layout 2 is shown with fits=False": lambda p: p.written["layouts"][1].update(fits=False),
    "no usable_bytes": lambda p: p.written.pop("usable_bytes"),
    "is not usable_share": lambda p: p.written.update(usable_share=0.5),
    "memory_bytes has no checkpoint": lambda p: p.ranks.pop("checkpoint"),
    "less than": lambda p: p.ranks.update(needed=p.ranks["peak"] - 1),
    "bytes of": lambda p: p.ranks.update(needed=p.written["usable_bytes"] + 1),
    "layout when given": lambda p: p.given["layouts"][0]["layout"].update(recompute="full"),
    "collectives when given": lambda p: p.given["layouts"][0]["collectives"].pop(),
    "step_s when given": lambda p: p.given["layouts"][0].update(step_s=1.0),
    "refused when given": lambda p: p.refusals.update(given=refusal()),
    "but -o refuses it": lambda p: p.refusals.update({"-o": refusal()}),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_planted_contradiction_is_named(planner, tmp_path, words):
    """Proves that each check can fail, and says what it found."""
    CHANGES[words](planner)
    found = find_contradictions(CASE, tmp_path)
    assert any(words in sentence for sentence in found), found


def test_a_plan_that_does_not_run_is_a_contradiction(planner, tmp_path, monkeypatch):
    """Proves that an estimate is no plan of a model that runs."""
    estimated = dataclasses.replace(planner.plan, exact=False)
    monkeypatch.setattr(planner_checks, "read_plan", lambda path, to_run: estimated)
    assert any("not exact" in sentence for sentence in find_contradictions(CASE, tmp_path))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"-o": refusal(), "shown": refusal()}, None),
        ({"-o": refusal(), "shown": refusal(fix="")}, "has no fix"),
        (
            {"-o": refusal(code="layout-tp-heads"), "shown": refusal()},
            f"failed without {NOTHING_FITS}",
        ),
        ({"-o": refusal(), "shown": refusal(status=1)}, f"failed without {NOTHING_FITS}"),
    ],
    ids=["consistent", "no-fix", "other-code", "other-status"],
)
def test_nothing_fits_only_with_one_code_and_a_fix(planner, tmp_path, answers, words):
    """Proves that a refusal passes only where both commands give the same code, status 2 and a fix."""
    planner.refusals.update(answers)
    found = find_contradictions(CASE, tmp_path)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_an_interrupt_ends_the_shard_and_is_no_result(monkeypatch):
    """Proves that Ctrl-C during a command stops the tests: it must not be recorded as a case that failed."""

    def interrupted():
        raise SystemExit(130)

    monkeypatch.setattr(planner_checks, "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command("plan", "tiny")


def test_the_overrides_name_the_layout(planner):
    """Proves that the layout of a JSON entry is turned into the overrides that ask for it."""
    words = name_layout(planner.first)
    assert {"layout.pp=2", "layout.dp_shard=2", "layout.zero=1", "layout.micro_batch=1"} == set(words)

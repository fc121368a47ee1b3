"""The checks of the planner matrix detect each injected contradiction.

A fake ``plan`` command answers from a plan, so that a test can change one answer.
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


class FakePlanner:
    """Answers like ``plan``, ``plan -o`` and ``plan`` with a given layout."""

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
        """The memory of the first class of ranks of the first layout."""
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
    """A consistent planner, until a test changes an answer."""
    made = FakePlanner()
    monkeypatch.setattr(planner_checks, "plan_case", made.answer)
    return made


def refusal(code=NOTHING_FITS, fix="Use 2 nodes", status=2):
    """The output of a command that refuses the job."""
    error = {"code": code, "fix": fix, "message": f"does not fit [{code}]"}
    return Ran(status, json.dumps({"status": "error", "errors": [error]}), f"error: does not fit. [{code}]\n")


def test_consistent_planner_passes(planner, tmp_path):
    """The failures of the other tests are therefore those of their change."""
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
    "memory_bytes has no first_step": lambda p: p.ranks.pop("first_step"),
    "less than": lambda p: p.ranks.update(needed=p.ranks["peak"] - 1),
    "bytes of": lambda p: p.ranks.update(needed=p.written["usable_bytes"] + 1),
    "layout when given": lambda p: p.given["layouts"][0]["layout"].update(recompute="full"),
    "collectives when given": lambda p: p.given["layouts"][0]["collectives"].pop(),
    "step_s when given": lambda p: p.given["layouts"][0].update(step_s=1.0),
    "refused when given": lambda p: p.refusals.update(given=refusal()),
    "but -o refuses it": lambda p: p.refusals.update({"-o": refusal()}),
}


@pytest.mark.parametrize("words", CHANGES)
def test_injected_contradiction_is_reported(planner, tmp_path, words):
    """Each check can fail and reports what it found."""
    CHANGES[words](planner)
    found = find_contradictions(CASE, tmp_path)
    assert any(words in sentence for sentence in found), found


def test_estimated_plan_of_a_runnable_model_is_a_contradiction(planner, tmp_path, monkeypatch):
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
def test_nothing_fits_needs_equal_codes_and_a_fix(planner, tmp_path, answers, words):
    """A refusal passes only if both commands give the same code, status 2 and a fix."""
    planner.refusals.update(answers)
    found = find_contradictions(CASE, tmp_path)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_interrupt_stops_the_tests(monkeypatch):
    """Ctrl-C during a command must not be recorded as a failed case."""

    def interrupted():
        raise SystemExit(130)

    monkeypatch.setattr(planner_checks, "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command("plan", "tiny")


def test_layout_of_a_json_entry_becomes_overrides(planner):
    words = name_layout(planner.first)
    assert {"layout.pp=2", "layout.dp_shard=2", "layout.zero=1", "layout.micro_batch=1"} == set(words)

"""The report of a rank that ran out of memory: changes that fit what was free, and the facts as text."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.core.errors import Problem, RunFailedError
from meshwright.diagnose import out_of_memory
from meshwright.diagnose.out_of_memory import describe_oom, explain_oom
from meshwright.plan.build import build_plan

ERROR = RunFailedError(Problem("run-out-of-memory", "ran out of memory", path="rank 0"))


@pytest.fixture(scope="module")
def plan(make_job):
    """Activations are most of the memory: activation checkpointing and smaller micro-batches help."""
    tables = {"data": {"seq_len": 512}, "train": {"global_batch": 64}}
    return build_plan(make_job(**tables, layout={"dp_replicate": 2, "micro_batch": 32}))[0]


@pytest.fixture
def memory(plan):
    """The facts of a rank that had a little less memory than it needs."""
    rank = plan.ranks[0]
    return {
        "rank": 0,
        "lines": [dataclasses.asdict(line) for line in rank.lines],
        "predicted_peak_bytes": rank.peak_bytes,
        "peak_at": rank.peak_at,
        "predicted_step_s": plan.step_s,
        "free_bytes": rank.needed_bytes - 1,
        "device_bytes": plan.job.cluster.memory_bytes,
        "live_bytes": None,
        "requested_bytes": 2_500_000,
    }


def test_changes_fit_the_free_memory_and_become_the_fix(plan, memory):
    facts, error = explain_oom(plan, memory, ERROR)
    assert facts["changes"]
    assert all(change["needed_bytes"] <= memory["free_bytes"] for change in facts["changes"])
    times = [change["step_s"] for change in facts["changes"]]
    assert times == sorted(times), "fastest first"
    problem = error.problems[0]
    assert (problem.code, problem.rule) == (ERROR.problems[0].code, ERROR.problems[0].rule)
    assert facts["changes"][0]["overrides"] in (problem.fix or "")


def test_a_process_without_memory_for_the_search_still_reports(plan, memory, monkeypatch):
    """Under torchrun it is the process that ran out of memory."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(out_of_memory, "find_alternatives", fail)
    facts, error = explain_oom(plan, memory, ERROR)
    assert facts["changes"] == []
    assert "smaller model" in (error.problems[0].fix or "")
    assert describe_oom(facts)[-1] == "no single change would fit"


def test_the_text_has_every_line_of_memory_and_every_change(plan, memory):
    facts, _ = explain_oom(plan, memory, ERROR)
    text = "\n".join(describe_oom(facts))
    assert all(line["name"] in text and line["formula"] in text for line in facts["lines"])
    assert all(change["overrides"] in text for change in facts["changes"])
    assert "measured in the audited step only; failed allocation: 2.5 MB" in text

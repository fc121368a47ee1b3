"""The memory estimate against published runs, and against layouts that ran out of memory."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import MemoryEstimate, estimate_memory
from meshwright.validation.limits import judge_limits, read_failed
from meshwright.validation.published import Case, read_rows

DATA = Path(str(resources.files("meshwright.validation").joinpath("tables")))
LABEL = 2**30 / 1e9
"""Device names count GiB: an 80 GB device has 80 GiB, of which drivers leave 79."""
CONTRADICTED = "GPT 206B"
"""The one published out-of-memory layout that is predicted to fit. It has 4.60e9 parameters and 6 layers on
its fullest rank; the published GPT 203B of the same table, with 4.56e9 and 7, ran in 67 GB."""


@cache
def list_cases() -> tuple[Case, ...]:
    """Rows with published memory."""
    rows = read_rows(DATA / "published_runs.csv")
    return tuple(row.case for row in rows if row.case is not None and row.case.memory_bytes is not None)


def predict(case: Case) -> MemoryEstimate:
    """The memory estimate of a case."""
    return estimate_memory(case.workload, Grid.of([case.layout]))


@pytest.mark.parametrize(
    ("family", "rows", "most"),
    [
        ("simumax-b200-dense", 17, 0.005),
        ("simumax-b200-moe", 5, 0.015),
        ("torchtitan", 11, 0.06),
        ("bloom", 47, 0.06),
        ("korthikanti22", 4, 0.06),
    ],
)
def test_mean_memory_error_by_family(family, rows, most):
    """The bounds are the errors reached, with a margin; the targets are 2% (SimuMax) and 8%.

    Korthikanti's figures leave out the embeddings, which are 1.2 to 6% of a first stage.
    """
    errors = [
        predict(case).counted_as(case.memory_kind)[0] / case.memory_bytes - 1
        for case in list_cases()
        if case.family == family and case.memory_bytes
    ]
    assert len(errors) == rows
    assert np.mean(np.abs(errors)) <= most


def test_layouts_that_ran_out_of_memory_are_told_from_layouts_that_ran():
    """235 layouts that failed, and those of the same sources that ran."""
    ran = read_rows(DATA / "published_runs.csv")
    found = judge_limits(read_failed(), ran).as_dict()
    assert found["not_expressed"] == 0
    assert found["failed"] == 223, "the sources of twelve have no counted layout that ran"
    assert found["caught"] >= 0.9
    assert found["fitting"] >= 0.9
    assert found["balanced_accuracy"] >= 0.93


def test_no_old_out_of_memory_layout_is_predicted_to_fit():
    old = ("bigscience", "pytorch/torchtitan", "NVIDIA/Megatron-LM", "nanotron")
    cases = [row.case for row in read_failed() if row.case is not None and row.source in old]
    assert len(cases) == 11
    fitting = [case.model_name for case in cases if predict(case).fits(case.workload)[0]]
    assert fitting == [CONTRADICTED]


def test_classes_are_judged_by_source(read):
    """A layout that needs too much fails; its source needs layouts of both kinds."""
    ran = read(id="a-1", source="x/y")
    failed = read(id="b-1", source="x/y", micro_batch="4", seq_len="65536", recompute="none")
    found = judge_limits([failed], [ran, read(id="c-1", source="other/z")])
    assert [(one.source, one.failed, one.caught, one.ran, one.fitting) for one in found.sources] == [
        ("x/y", 1, 1, 1, 1)
    ]
    assert judge_limits([failed], []).as_dict()["balanced_accuracy"] is None


def test_published_runs_are_predicted_to_fit():
    """Rows with published recomputation; otherwise it is unknown how the run fitted."""
    ran = [row.case for row in read_rows(DATA / "published_runs.csv") if row.case is not None]
    cases = [
        case
        for case in ran
        if not any(text.startswith(("assumed recompute", "recompute")) for text in case.filled)
    ]
    over = [
        case.id for case in cases if predict(case).peak_bytes[0] > LABEL * case.workload.cluster.memory_bytes
    ]
    assert len(cases) > 500
    assert len(over) <= 0.03 * len(cases), over

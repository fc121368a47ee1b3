"""The estimate against published memory: rows that ran, and layouts that ran out of memory."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import UserError
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import MemoryEstimate, estimate_memory
from meshwright.validation.published import Case, read_rows
from meshwright.validation.published_oom import read_oom

DATA = Path(str(resources.files("meshwright.validation").joinpath("tables")))
LABEL = 2**30 / 1e9
"""Devices are named after GiB: an 80 GB one has 80 GiB, of which drivers leave 79."""
CONTRADICTED = "GPT 206B"
"""The one published out-of-memory layout that is predicted to fit. It has 4.60e9 parameters and 6 layers on
its fullest rank; the published GPT 203B of the same table, with 4.56e9 and 7, ran in 67 GB."""


@cache
def list_cases() -> tuple[Case, ...]:
    """Rows with memory."""
    rows = read_rows(DATA / "published_runs.csv")
    return tuple(row.case for row in rows if row.case is not None and row.case.memory_bytes is not None)


def predict(case: Case) -> MemoryEstimate:
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
def test_mean_error_by_family(family, rows, most):
    """Targets are 2% (SimuMax) and 8%; what is held here is what was reached, with a little room.

    Korthikanti's figures leave out the embeddings, which are 1.2 to 6% of a first stage.
    """
    errors = [
        predict(case).counted_as(case.memory_kind)[0] / case.memory_bytes - 1
        for case in list_cases()
        if case.family == family and case.memory_bytes
    ]
    assert len(errors) == rows
    assert np.mean(np.abs(errors)) <= most


def test_no_published_out_of_memory_layout_is_predicted_to_fit():
    rows = read_oom(DATA / "published_oom.csv")
    assert len(rows) == 11
    cases = [row.case for row in rows if row.case is not None]
    assert len(cases) == 11
    fitting = [case.model_name for case in cases if predict(case).fits(case.workload)[0]]
    assert fitting == [CONTRADICTED]


def test_what_ran_is_predicted_to_fit_the_device():
    """All rows whose recomputation is published; a blank one means that nobody said how the run fitted."""
    ran = [row.case for row in read_rows(DATA / "published_runs.csv") if row.case is not None]
    told = [case for case in ran if not any(text.startswith("recompute") for text in case.filled)]
    over = {
        case.id: round(float(predict(case).peak_bytes[0]) / case.workload.cluster.memory_bytes, 3)
        for case in told
        if predict(case).peak_bytes[0] > LABEL * case.workload.cluster.memory_bytes
    }
    assert len(told) > 200
    assert over == {}


def test_a_table_without_its_columns_or_file_is_refused(tmp_path):
    path = tmp_path / "oom.csv"
    path.write_text("source,model_name\nx,y\n")
    with pytest.raises(UserError, match="validate-columns"):
        read_oom(path)
    with pytest.raises(UserError, match="validate-unreadable"):
        read_oom(tmp_path / "missing.csv")

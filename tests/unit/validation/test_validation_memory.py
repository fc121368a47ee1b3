"""The memory estimate against published runs, and against layouts that ran out of memory."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import MemoryEstimate, estimate_memory
from meshwright.validation.published import Case, read_row, read_rows, read_table

DATA = Path(str(resources.files("meshwright.validation").joinpath("tables")))
OOM_TABLE = Path(__file__).parents[2] / "golden" / "published_oom.csv"
OOM_FRAMEWORKS = (
    ("bigscience", "megatron-deepspeed"),
    ("torchtitan", "torchtitan-fsdp2"),
    ("2104.04473", "deepspeed-zero"),
    ("nanotron", "nanotron"),
)
"""Text in a source, and the framework that it reports on. Narayanan et al. ran ZeRO-3 with DeepSpeed."""
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


def list_oom_cases() -> list[Case | None]:
    """Published layouts that ran out of memory.

    The source names the framework. A micro-batch that is not published is one sample, the smallest possible.
    """
    cases = []
    for number, cells in read_table(OOM_TABLE, ("source", "result"), "docs/memory-model.md"):
        if cells["result"] == "OOM":
            framework = next(name for word, name in OOM_FRAMEWORKS if word in cells["source"].lower())
            micro_batch = cells.get("micro_batch") or "1"
            cells |= {
                "id": f"oom-{number:03d}",
                "framework": framework,
                "micro_batch": micro_batch,
                "global_batch": cells.get("global_batch") or str(int(cells["dp"] or 1) * int(micro_batch)),
                "recompute": cells.get("recompute") or "none",
            }
            cases.append(read_row(number, cells).case)
    return cases


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


def test_no_published_out_of_memory_layout_is_predicted_to_fit():
    cases = [case for case in list_oom_cases() if case is not None]
    assert len(cases) == 11
    fitting = [case.model_name for case in cases if predict(case).fits(case.workload)[0]]
    assert fitting == [CONTRADICTED]


def test_published_runs_are_predicted_to_fit():
    """The test covers all rows with published recomputation. Otherwise it is unknown how the run fitted."""
    ran = [row.case for row in read_rows(DATA / "published_runs.csv") if row.case is not None]
    cases = [
        case
        for case in ran
        if not any(text.startswith(("assumed recompute", "recompute")) for text in case.filled)
    ]
    over = {
        case.id: round(float(predict(case).peak_bytes[0]) / case.workload.cluster.memory_bytes, 3)
        for case in cases
        if predict(case).peak_bytes[0] > LABEL * case.workload.cluster.memory_bytes
    }
    assert len(cases) > 200
    assert over == {}

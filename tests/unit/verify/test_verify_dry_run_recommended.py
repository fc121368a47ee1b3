"""Recommended layouts, scaled down, take a dry-run step as planned.

The recommended layout of a planner matrix case keeps its axes and settings. Degrees and model shrink as for
``prove``. A dry run then takes one step on one rank of every stage.
"""

from __future__ import annotations

import json

import pytest
import tomli_w

from meshwright.audit.compare import PEAK_TOLERANCE
from meshwright.cli.dry_run import dry_run_job
from meshwright.cli.output import Output
from meshwright.spec.load import job_tree, load_job
from meshwright.spec.model import DecoderModel
from meshwright.verify.shrink import shrink
from planner_checks import name_layout, plan_case, read_layout
from planner_matrix import SIZES, Case, choose_covering, is_built, is_decoder, list_cases

COUNT = 44
QUICK = 1
"""Cases in ``make test``."""
TIGHT, FULL = 0.05, 0.6
"""Training state as a share of the memory of all devices: enough that layouts are more than replicas, and not
so much that nothing fits."""
KEPT = ("zero", "sequence_parallel", "schedule", "context", "recompute", "offload", "accumulate")
"""Settings that a scaled-down layout keeps."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


def choose_cases() -> list[Case]:
    """Cases of runnable decoders that nearly fill memory. They cover models, clusters and sizes."""
    return choose_covering([case for case in list_runnable() if TIGHT <= case.state_share <= FULL], COUNT)


def list_runnable() -> list[Case]:
    """Cases whose model a dry run can step: decoders that are supported."""
    return [case for case in list_cases() if is_decoder(case) and is_built(case.model)]


CASES = choose_cases()


def as_parameters() -> list:
    """``make test`` has the first case with 8 or 64 devices, whose layout has several axes."""
    quick = [case for case in CASES if case.size in (8, 64)][:QUICK]
    slow = [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in CASES if case not in quick]
    return [*(pytest.param(case, id=str(case)) for case in quick), *slow]


def recommend(case: Case) -> dict:
    """The layout that ``plan`` shows first."""
    ran = plan_case(case, "--top", 1)
    assert ran.status == 0, ran.reason
    return ran.json["layouts"][0]


@pytest.mark.parametrize("case", as_parameters())
def test_recommended_layout_runs_as_planned(case, tmp_path, capfd):
    """The step of a recommended layout has the planned state, peak and collectives.

    On one rank of every stage state and collectives are equal. Activations and peak are within 5%.
    """
    shown = recommend(case)
    job = load_job(case.model, name_layout(shown), case.on, to_run=False)
    small = shrink(job)
    assert_same_kind(read_layout(shown), small)
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(job_tree(small)))
    pp, ranks = small.layout.pp, small.layout.world_size
    for rank in range(0, ranks, ranks // pp):
        capfd.readouterr()
        status = dry_run_job(Output(as_json=True), str(path), (), rank, None)
        out, err = capfd.readouterr()
        found = json.loads(out)
        assert status == 0, f"rank {rank} of {small.layout}: {found['differences']}\n{err[-800:]}"
        assert_equal(found)


def assert_same_kind(layout, small) -> None:
    """The scaled-down job is small and has every axis and setting of the layout."""
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    assert used == [axis for axis in AXES if getattr(small.layout, axis) > 1]
    kept = {name: getattr(layout, name) for name in KEPT}
    assert kept == {name: getattr(small.layout, name) for name in KEPT}
    assert (layout.virtual_stages > 1) == (small.layout.virtual_stages > 1)
    assert isinstance(small.model, DecoderModel)
    assert small.layout.world_size <= 4 ** len(used)
    assert small.model.hidden_size <= 1024


def assert_equal(found: dict) -> None:
    """Check each row of the audit, because the verdict alone could cover no rows."""
    rows = {row["kind"]: row for row in found["state"]}
    assert {"parameters", "gradients", "optimizer", "activations", "peak"} <= rows.keys()
    for kind, row in rows.items():
        near = kind in ("activations", "peak")
        allowed = PEAK_TOLERANCE * row["predicted"] if near else 0
        assert abs(row["measured"] - row["predicted"]) <= allowed, row
    assert rows["parameters"]["measured"] > 0
    for row in found["collectives"]:
        assert (row["calls"], row["bytes"]) == (row["predicted_calls"], row["predicted_bytes"]), row
    assert bool(found["collectives"]) == (found["world_size"] > 1)


def test_cases_cover_every_decoder_and_size():
    """Only models that fill no cluster are left out."""
    assert len(CASES) == len(set(CASES)) == COUNT
    models = {case.model for case in list_runnable()}
    assert models - {case.model for case in CASES} == {"demo-2m", "tiny"}
    assert {case.size for case in CASES} == set(SIZES)
    assert {case.cluster for case in CASES} == {case.cluster for case in list_cases()}

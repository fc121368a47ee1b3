"""``bench collectives`` between real ranks. The first call of each kind checks its result."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.core.errors import RunFailedError
from meshwright.runs import collective_bench
from meshwright.schedule.collective.ops import Op
from meshwright.verify.bench import collectives

KEYS = {"op", "algorithm", "transport", "ranks", "bytes", "time_s", "busbw_bytes_per_s"}
"""Of a row, that other programs rely on."""


def test_rows_have_every_algorithm_transport_and_size():
    """A size that the budget leaves no time for, on a busy machine, is listed."""
    sizes = {1024, 1 << 16}
    found = mw.bench_collectives(
        ranks=2, ops=["all_reduce"], algorithms=["ring"], sizes=list(sizes), budget_s=6, cpu=True
    )
    said = found.as_dict()
    assert said["rows"]
    assert all(row.keys() >= KEYS for row in said["rows"])
    measured = sizes - {one["bytes"] for one in said["skipped"]}
    assert {(row["algorithm"], row["transport"], row["bytes"]) for row in said["rows"]} == {
        (*variant, size)
        for variant in (("backend", "gloo"), ("backend", "shm"), ("ring", "gloo"))
        for size in measured
    }
    assert all(row["uncontended_s"] > 0 and row["time_s"] > 0 for row in said["rows"])
    assert [curve["ranks"] for curve in said["curves"]] == [2, 2, 2]


@pytest.mark.slow
def test_all_operations_of_three_ranks_give_the_right_values():
    """Ranks fail if a value is wrong."""
    found = mw.bench_collectives(
        ranks=3, ops=list(Op), algorithms=["ring", "naive"], sizes=[12, 40_000], budget_s=60, cpu=True
    )
    assert {row.op for row in found.rows} == set(Op)
    shared = {row.op for row in found.rows if row.transport == "shm"}
    assert shared == {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"}


@pytest.mark.slow
def test_a_wrong_value_ends_the_benchmark(monkeypatch):
    """The log of the rank, which the error names, has the reason."""
    monkeypatch.setattr(collective_bench, "ENTRY", f"{__name__}:run_wrong_rank")
    with pytest.raises(RunFailedError, match=r"of 2 on .* died") as error:
        mw.bench_collectives(ranks=2, ops=["all_gather"], algorithms=[], sizes=[1024], budget_s=20, cpu=True)
    log = Path(re.search(r"output is in (\S+);", str(error.value))[1])
    assert "elements of a collective of 1024 bytes are wrong" in log.read_text()
    shutil.rmtree(log.parents[1])


def run_wrong_rank(run_dir, listener):
    """A rank whose all-gather does nothing."""
    collectives.all_gather_into = lambda *args, **kwargs: None
    return collectives.run_rank(run_dir, listener)


@pytest.mark.slow
def test_a_budget_that_is_too_small_skips_sizes():
    found = mw.bench_collectives(
        ranks=2, ops=["all_reduce"], algorithms=[], sizes=[1024, 1 << 26], budget_s=0.001, cpu=True
    )
    assert [(one["bytes"], one["reason"]) for one in found.skipped] == [(1024, "budget"), (1 << 26, "budget")]
    assert found.rows == []

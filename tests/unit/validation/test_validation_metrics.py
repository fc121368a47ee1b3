"""Errors, rank correlation, split, golden figures and intervals of the validation."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.time import interval as intervals
from meshwright.plan.time.interval import GENERATIONS, interval, similar_groups
from meshwright.validation.devices import known_devices
from meshwright.validation.evaluate import Outcome, bundled_table, evaluate, evaluate_tables
from meshwright.validation.metrics import (
    Errors,
    best_found,
    kendall_tau,
    summarise,
    summarise_families,
    worst_rows,
)
from meshwright.validation.split import is_held_out

ROOT = Path(__file__).parents[3]


def load_script():
    """The module benchmarks/validation.py."""
    spec = importlib.util.spec_from_file_location("validation", ROOT / "benchmarks" / "validation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """The outcomes of all rows of the package."""
    return evaluate_tables([bundled_table()])


def test_errors_by_hand():
    errors = Errors.of([0.1, -0.3, 0.05, -0.05])
    assert errors.rows == 4
    assert errors.mape == pytest.approx(0.125)
    assert errors.median == pytest.approx(0.075)
    assert errors.bias == pytest.approx(-0.05)
    assert errors.worst == pytest.approx(0.3)
    assert errors.within_10pct == pytest.approx(0.75)
    assert Errors.of([]) == Errors(0)


def test_kendall_tau_by_hand():
    one = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau([(one, one)]) == 1
    assert kendall_tau([(one, -one)]) == -1
    swapped = np.array([1.0, 3.0, 2.0, 4.0])
    assert kendall_tau([(one, swapped)]) == pytest.approx(4 / 6)
    tied = np.array([1.0, 1.0, 2.0])  # pairs: one tied in the first; the two others agree
    assert kendall_tau([(tied, np.array([1.0, 2.0, 3.0]))]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall_tau([(one, one), (one, -one)]) == 0, "pairs of all groups are pooled"
    assert kendall_tau([]) is None
    assert kendall_tau([(np.ones(3), one[:3])]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_kendall_tau_equals_counting_pairs(pairs):
    first, second = np.array(pairs, dtype=float).T
    signs = [
        (np.sign(first[i] - first[j]), np.sign(second[i] - second[j]))
        for i in range(len(pairs))
        for j in range(i)
    ]
    scale = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    found = kendall_tau([(first, second)])
    assert (found is None) == (scale == 0)
    if scale:
        assert found == pytest.approx(sum(a * b for a, b in signs) / scale)


def test_best_found_allows_5_percent():
    predicted = np.array([1.0, 2.0, 3.0])
    assert best_found(predicted, np.array([1.0, 10.0, 9.6]))
    assert not best_found(predicted, np.array([1.0, 10.0, 9.4]))


def outcome(read, factor: float, **cells: str) -> Outcome:
    """A row whose prediction is ``factor`` times the measurement."""
    row = read(**cells)
    return Outcome(row, row.reason, factor * row.step_s, 1e9)


def test_non_gating_rows_are_excluded_from_errors(read):
    gating, other = outcome(read, 1.2), outcome(read, 3.0, id="made-up-002", confidence="digitised")
    both = summarise([gating, other])
    assert (both["rows"], both["expressed"], both["gates"]) == (2, 2, True)
    assert both["time"]["mape"] == pytest.approx(0.2)
    alone = summarise([other])
    assert (alone["gates"], alone["time"]["rows"]) == (False, 1)


def test_rows_that_cannot_be_expressed_are_counted_by_reason(read):
    rows = [read(gpu="TPU v4"), read(gpu="TPU v4"), read(tp="x"), read()]
    figures = summarise(evaluate(rows))
    assert (figures["rows"], figures["expressed"]) == (4, 1)
    assert figures["not_expressed"]["no figures for the device 'TPU v4'"] == 2
    assert sum(figures["not_expressed"].values()) == 3


def test_ranking_groups_have_one_model_and_device_count(read):
    fast, slow = {"step_time_s": "2"}, {"step_time_s": "3", "tp": "4", "dp": "16"}
    ranked = summarise([outcome(read, 1.0, **fast), outcome(read, 1.0, **slow)])
    assert (ranked["groups"], ranked["tau"], ranked["best_within_5pct"]) == (1, 1.0, 1.0)
    apart = summarise([outcome(read, 1.0, **fast), outcome(read, 1.0, num_gpus="32", dp="16")])
    assert (apart["groups"], apart["tau"]) == (0, None)
    again = summarise([outcome(read, 1.0, **fast), outcome(read, 1.1, step_time_s="2.2")])
    assert again["groups"] == 0, "the same layout twice is a repeated measurement"


def test_families_and_rows_keep_their_order(read):
    found = evaluate([read(id="b-002"), read(id="a-1"), read(id="b-003", gpu="?")])
    assert [one.row.id for one in found] == ["b-002", "a-1", "b-003"]
    assert {name: figures["rows"] for name, figures in summarise_families(found).items()} == {"b": 2, "a": 1}


def test_predictions_of_rows_are_independent(read):
    """Rows of one workload are predicted together. The result equals that of each row alone."""
    rows = [
        read(),
        read(id="x-1", recompute="none"),
        read(id="x-2", micro_batch="2"),
        read(id="x-3", seq_len="1024"),
    ]
    together = [one.predicted_step_s for one in evaluate(rows)]
    assert together == [evaluate([row])[0].predicted_step_s for row in rows]
    assert len(set(together)) > 1


def test_predictions_do_not_use_measurements(read):
    slow = evaluate([read(step_time_s="900", memory_gb_per_gpu="1", tokens_per_s_per_gpu="3", mfu_pct="1")])[
        0
    ]
    plain = evaluate([read()])[0]
    assert slow.predicted_step_s == plain.predicted_step_s
    assert slow.predicted_memory_bytes == plain.predicted_memory_bytes


def test_worst_rows_come_first(read):
    rows = [outcome(read, factor, id=f"x-{factor}") for factor in (1.1, 0.5, 1.3)]
    assert [one.row.id for one in worst_rows(rows, 2)] == ["x-0.5", "x-1.3"]


def test_predicted_memory_follows_the_published_kind(read):
    """Allocator reserve and context are included if the measurement includes them."""
    notes = ("memory = peak ALLOCATED", "", "nvidia-smi")
    found = [evaluate([read(note=note)])[0].predicted_memory_bytes for note in notes]
    assert found[0] < found[1] < found[2]


# The split


def test_held_out_split_is_fixed():
    """It must never change. Otherwise rows that rates were fitted to would be reported as held out."""
    assert [n for n in range(1, 41) if is_held_out(f"bloom-{n:03d}")] == HELD_OUT_OF_BLOOM
    share = np.mean([is_held_out(f"any-{n}") for n in range(3000)])
    assert share == pytest.approx(1 / 3, abs=0.03)


HELD_OUT_OF_BLOOM = [1, 6, 12, 19, 20, 24, 26, 34, 35, 38]


def test_korthikanti_rows_are_always_held_out():
    assert all(is_held_out(f"korthikanti22-{n:03d}") for n in range(1, 11))


def test_fitted_and_held_out_errors_are_reported(outcomes):
    figures = summarise_families(outcomes)
    for family in figures.values():
        parts = family["split"]
        assert parts["fit"]["time"]["rows"] + parts["held_out"]["time"]["rows"] == family["time"]["rows"]
    assert figures["korthikanti22"]["split"]["fit"]["time"]["rows"] == 0


# The rows of the package


def test_package_has_the_published_rows_without_vtrain(outcomes):
    assert len(outcomes) == 420
    assert not [one.row.id for one in outcomes if one.row.id.startswith("vtrain")]
    assert len({one.row.id for one in outcomes}) == 420
    assert not [one.reason for one in outcomes if one.reason.startswith("bad cell")]


def test_every_row_with_a_published_layout_is_expressed(outcomes):
    left_out = {one.row.family: one.reason for one in outcomes if one.case is None}
    assert left_out == {
        "mcore-h100-strong": "pp not published",
        "nemo-launcher": "layout not published",
        "llama1": "layout not published",
    }


def test_rows_shard_over_their_whole_data_degree(outcomes):
    """No row of the package uses hybrid sharding. A misread note would show here."""
    for one in outcomes:
        if one.case:
            layout = one.case.layout
            assert min(layout.dp_shard, layout.dp_replicate) == 1, one.row.id
            assert (layout.zero > 0) == (layout.dp_shard > 1) or layout.cp > 1, one.row.id
            assert one.case.workload.cluster.world_size >= layout.world_size, one.row.id


def flat(figures, path=""):
    """Figures by dotted name."""
    if not isinstance(figures, dict):
        return {path: figures}
    return {
        key: value for name, part in figures.items() for key, value in flat(part, f"{path}.{name}").items()
    }


def test_figures_equal_the_golden_ones(outcomes):
    """A change of the formulas shows here for each family."""
    golden = flat(json.loads((ROOT / "tests" / "golden" / "validate.json").read_text(encoding="utf-8")))
    now = flat(load_script().golden_figures(outcomes))
    assert len(golden) > 300
    assert now == pytest.approx(golden, abs=2e-5), (
        "if the change is intended, run: .venv/bin/python benchmarks/validation.py"
    )


def test_residuals_are_up_to_date(outcomes):
    script = load_script()
    assert script.RESIDUALS.read_text(encoding="utf-8") == script.residuals_text(outcomes), (
        "run: .venv/bin/python benchmarks/validation.py"
    )


# Intervals


def test_residuals_are_percentiles_of_held_out_gating_rows(read):
    held = [f"made-up-{n}" for n in range(200) if is_held_out(f"made-up-{n}")][:11]
    fitted = [f"made-up-{n}" for n in range(200) if not is_held_out(f"made-up-{n}")][:11]
    rows = [outcome(read, 1 / (0.9 + 0.02 * place), id=name) for place, name in enumerate(held)]
    rows += [outcome(read, 9.0, id=name) for name in fitted]
    rows += [outcome(read, 9.0, id=name, confidence="digitised") for name in held]
    table = load_script().tabulate_residuals(rows)
    assert {(entry["kind"], entry["profile"], entry["device"]) for entry in table} == set(
        similar_groups(read().case.workload)
    )
    assert {(entry["rows"], entry["low"], entry["high"]) for entry in table} == {(11, 0.92, 1.08)}


def test_small_groups_count_in_larger_groups_only(read):
    held = [f"made-up-{n}" for n in range(200) if is_held_out(f"made-up-{n}")][:9]
    rows = [outcome(read, 1.0, id=name) for name in held[:7]]
    rows += [outcome(read, 1.0, id=name, gpu="H200") for name in held[7:]]
    table = {
        (entry["profile"], entry["device"]): entry["rows"] for entry in load_script().tabulate_residuals(rows)
    }
    assert ("megatron-core", "H100-80GB-SXM") not in table
    assert table["megatron-core", ""] == 9


def test_interval_uses_the_most_similar_rows_and_names_them(case, monkeypatch):
    work = case().workload
    table = {("dense", "megatron-core", ""): (19, 0.9, 1.2), ("dense", "", "Ampere"): (30, 0.8, 1.3),
             ("", "", ""): (99, 1.1, 1.4)}  # fmt: skip
    monkeypatch.setattr(intervals, "_table", lambda: table)
    assert interval(work) == (0.9, 1.2, "19 held-out published runs of dense models with megatron-core")
    old = case(gpu="A100-80GB-SXM").workload
    assert interval(old) == (0.8, 1.3, "30 held-out published runs of dense models on Ampere")
    ours = replace(work, profile=replace(work.profile, name="other"))
    least = 1 - intervals.LEAST_SPREAD
    assert interval(ours) == (least, 1.4, "99 held-out published runs"), (
        "the interval contains the prediction with a margin"
    )


def test_every_device_has_a_gpu_generation():
    names = set(known_devices())
    assert all(any(name.startswith(start) for start in GENERATIONS) for name in names)


def test_intervals_of_the_package_contain_the_prediction(outcomes):
    for one in outcomes:
        if one.case:
            found = interval(one.case.workload)
            assert found.low <= 1 <= found.high
            assert "held-out published runs" in found.basis

"""Errors, rank correlation, split, golden figures and intervals of the validation."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.time import interval as intervals
from meshwright.plan.time.interval import GENERATIONS, interval, similar_groups
from meshwright.validation.devices import known_devices
from meshwright.validation.evaluate import (
    Outcome,
    bundled_tables,
    evaluate,
    evaluate_left_out,
)
from meshwright.validation.metrics import (
    Errors,
    Validation,
    best_found,
    kendall_tau,
    summarize,
    summarize_families,
    worst_rows,
)
from meshwright.validation.published import read_rows
from meshwright.validation.residuals import (
    interval_cover,
    plan_interval_cover,
    tabulate_residuals,
    weighted_quantiles,
)

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
    return evaluate([row for path in bundled_tables() for row in read_rows(path)])


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


def test_pairs_within_3_percent_are_tied():
    predicted, measured = np.array([1.0, 2.0, 3.0]), np.array([1.02, 1.0, 2.0])
    assert kendall_tau([(predicted, measured)]) == pytest.approx(1 / 3)
    assert kendall_tau([(predicted, measured)], 0.03) == 1


def test_best_found_allows_5_percent():
    predicted = np.array([1.0, 2.0, 3.0])
    assert best_found(predicted, np.array([1.0, 10.0, 9.6]))
    assert not best_found(predicted, np.array([1.0, 10.0, 9.4]))


def outcome(read, factor: float, **cells: str) -> Outcome:
    """A row whose prediction is ``factor`` times the measurement."""
    row = read(**cells)
    return Outcome(row, row.reason, factor * row.step_s, 1e9)


def test_rows_that_do_not_count_are_excluded_from_errors(read):
    counted, other = outcome(read, 1.2), outcome(read, 3.0, id="made-up-002", confidence="digitised")
    both = summarize([counted, other])
    assert (both["rows"], both["expressed"], both["counted"]) == (2, 2, True)
    assert both["time"]["mape"] == pytest.approx(0.2)
    alone = summarize([other])
    assert (alone["counted"], alone["time"]["rows"]) == (False, 1)


def test_rows_that_cannot_be_expressed_are_counted_by_reason(read):
    rows = [read(gpu="TPU v4"), read(gpu="TPU v4"), read(tp="x"), read()]
    figures = summarize(evaluate(rows))
    assert (figures["rows"], figures["expressed"]) == (4, 1)
    assert figures["not_expressed"]["no figures for the device 'TPU v4'"] == 2
    assert sum(figures["not_expressed"].values()) == 3


def test_ranking_groups_have_one_model_and_device_count(read):
    fast, slow = {"step_time_s": "2"}, {"step_time_s": "3", "tp": "4", "dp": "16"}
    ranked = summarize([outcome(read, 1.0, **fast), outcome(read, 1.0, **slow)])
    assert (ranked["groups"], ranked["tau"], ranked["best_within_5pct"]) == (1, 1.0, 1.0)
    apart = summarize([outcome(read, 1.0, **fast), outcome(read, 1.0, num_gpus="32", dp="16")])
    assert (apart["groups"], apart["tau"]) == (0, None)
    again = summarize([outcome(read, 1.0, **fast), outcome(read, 1.1, step_time_s="2.2")])
    assert again["groups"] == 0, "the same layout twice is a repeated measurement"


def test_families_and_rows_keep_their_order(read):
    found = evaluate([read(id="b-002"), read(id="a-1"), read(id="b-003", gpu="?")])
    assert [one.row.id for one in found] == ["b-002", "a-1", "b-003"]
    assert {name: figures["rows"] for name, figures in summarize_families(found).items()} == {"b": 2, "a": 1}


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


# The rows of the package


def test_package_has_published_and_measured_rows(outcomes):
    assert len(outcomes) == 1737
    assert len({one.row.id for one in outcomes}) == 1737
    assert len({one.row.source for one in outcomes}) >= 47
    assert sum(one.row.source == "meshwright" for one in outcomes) == 52
    assert not [one.reason for one in outcomes if one.reason.startswith("bad cell")]


def test_every_row_with_a_published_layout_is_expressed(outcomes):
    left_out = {one.row.family: one.reason for one in outcomes if one.case is None}
    assert left_out == {
        "mcore-h100-strong": "pp not published",
        "nemo-launcher": "layout not published",
        "llama1": "layout not published",
        "primus-mi300x": "global_batch not published",
        "nemo-lora": "lora: training of adapters is not planned",
    }


def test_rows_shard_over_their_whole_data_degree(outcomes):
    """Rows of six publishers use hybrid sharding. A misread note would show here."""
    hybrid = re.compile("internevo|fms|gcp-maxtext|modalities|oellm|nebius")
    for one in outcomes:
        if one.case:
            layout = one.case.layout
            assert min(layout.dp_shard, layout.dp_replicate) == 1 or hybrid.match(one.row.id), one.row.id
            assert (layout.zero > 0) == (layout.dp_shard > 1) or layout.cp > 1, one.row.id
            assert one.case.workload.cluster.world_size >= layout.world_size, one.row.id


def flat(figures, path=""):
    """Figures by dotted name."""
    if isinstance(figures, list):
        figures = {str(place): part for place, part in enumerate(figures)}
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


@pytest.mark.slow
def test_residuals_are_up_to_date():
    """They come from leave-one-source-out fits of all rows, which take half a minute."""
    script = load_script()
    left_out = evaluate_left_out(script.read_bundled())
    assert script.RESIDUALS.read_text(encoding="utf-8") == script.residuals_text(left_out), (
        "run: .venv/bin/python benchmarks/validation.py"
    )


# Intervals


def rows_of_sources(read, counts: dict[str, int], **cells: str) -> list[Outcome]:
    """Rows of several sources; measured over predicted goes from 0.9 to 1.1 in each."""
    return [
        outcome(read, 1 / (0.9 + 0.2 * place / (count - 1)), id=f"{source}-{place}", source=source, **cells)
        for source, count in counts.items()
        for place in range(count)
    ]


def test_residuals_are_percentiles_of_counted_rows(read):
    rows = rows_of_sources(read, {"a/a": 41, "b/b": 41, "c/c": 41})
    rows += [outcome(read, 9.0, id=f"plot-{n}", source="d/d", confidence="digitised") for n in range(20)]
    table = tabulate_residuals(rows)
    assert set(table) == set(similar_groups(read().case.workload))
    for count, low, high in table.values():
        assert count == 123
        assert (low, high) == pytest.approx((0.91, 1.09), abs=0.004), "3 sources: half of the tails"


def test_few_sources_have_wider_intervals(read):
    few, many = (
        tabulate_residuals(rows_of_sources(read, {f"{n}/{n}": 21 for n in range(count)}))["", "", ""]
        for count in (3, 12)
    )
    assert few[1] < many[1] < 1 < many[2] < few[2]


def test_groups_need_rows_of_three_sources(read):
    rows = rows_of_sources(read, {"a/a": 20, "b/b": 20})
    rows += rows_of_sources(read, {"c/c": 8}, gpu="A100-80GB-SXM")
    table = tabulate_residuals(rows)
    assert ("dense", "megatron-core", "H100-80GB-SXM") not in table
    assert ("", "", "") in table


def test_every_source_has_the_same_weight():
    few, many = np.array([2.0] * 2), np.array([1.0] * 100)
    weights = np.array([1 / 2] * 2 + [1 / 100] * 100)
    assert weighted_quantiles(np.concatenate([few, many]), weights, [0.1, 0.9]) == [1.0, 2.0]


def test_cover_of_a_source_uses_the_residuals_of_the_others(read):
    """Three sources alike and one far off: its rows are outside, those of the others inside."""
    rows = rows_of_sources(read, {"a/a": 11, "b/b": 11, "c/c": 11})
    far = [outcome(read, 3.0, id=f"far-{n}", source="d/d") for n in range(11)]
    found = interval_cover([*rows, *far])
    assert found["rows"] == 44
    assert found["share"] == pytest.approx(0.75, abs=0.08)


def test_rows_of_the_caller_are_judged_by_the_intervals_of_plans(read, monkeypatch):
    """Other rows of one's own file are no basis: they may be of other machines."""
    table = {("", "", ""): (99, 0.9, 1.2)}
    monkeypatch.setattr(intervals, "_table", lambda: table)
    rows = [outcome(read, factor) for factor in (1.0, 1.05, 2.0)]
    found = plan_interval_cover(rows)
    assert (found["rows"], found["share"]) == (3, pytest.approx(2 / 3))
    assert found["half_width"] == pytest.approx(0.15)
    assert Validation(rows, given=True).totals["interval"] == found
    assert Validation(rows).totals["interval"]["rows"] == 0, "no other source"
    assert plan_interval_cover([])["share"] is None


def test_interval_uses_the_most_similar_rows_and_names_them(case, monkeypatch):
    work = case().workload
    table = {("dense", "megatron-core", ""): (19, 0.9, 1.2), ("dense", "", "Ampere"): (30, 0.8, 1.3),
             ("", "", ""): (99, 1.1, 1.4)}  # fmt: skip
    monkeypatch.setattr(intervals, "_table", lambda: table)
    assert interval(work) == (
        0.9,
        1.2,
        "19 runs of dense models with megatron-core of sources that were left out of the fit",
    )
    old = case(gpu="A100-80GB-SXM").workload
    assert interval(old) == (
        0.8,
        1.3,
        "30 runs of dense models on Ampere of sources that were left out of the fit",
    )
    ours = replace(work, profile=replace(work.profile, name="other"))
    least = 1 - intervals.LEAST_SPREAD
    assert interval(ours) == (least, 1.4, "99 runs of sources that were left out of the fit"), (
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
            assert "left out of the fit" in found.basis

"""The fit of rates: sources that are left out, recovered rates, bounds, and few rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.rates import load_calibration, merge_rates
from meshwright.validation import fit as fitting
from meshwright.validation.evaluate import evaluate_left_out
from meshwright.validation.fit import BOUNDS, FEWEST_ROWS, FITTED, PRIORS, Runs, fit_without, with_changes
from meshwright.validation.sources import source_of


def at(change: float, rate: tuple[str, str]) -> np.ndarray:
    """All fitted rates at their priors, but for one."""
    return np.array([change if one == rate else 0.0 for one in FITTED])


@pytest.fixture
def measured(read):
    """``measured(tables, source, count)``: rows whose times are those of some rates, without noise."""

    def make(tables, source: str, count: int):
        rows = []
        for place in range(count):
            row = read(
                id=f"{source}-{place}", source=source, micro_batch=str(1 + place % 4),
                seq_len=str(4096 * (1 + place % 3)),
                recompute=("none", "full")[place % 2],
            )  # fmt: skip
            rates = merge_rates(tables, "H100")
            step_s = float(estimate_step(row.case.workload, Grid.of([row.case.layout]), rates).step_s[0])
            case = dataclasses.replace(row.case, step_s=step_s)
            rows.append(dataclasses.replace(row, case=case, step_s=step_s))
        return rows

    return make


def test_many_sets_of_rates_are_evaluated_as_one(measured):
    """A batch of rates gives the same steps as each set alone."""
    runs = Runs([row.case for row in measured(PRIORS, "a/a", 5)])
    sets = [
        PRIORS,
        with_changes(at(0.2, ("device.H100", "matmul"))),
        with_changes(at(-0.3, ("default", "nic"))),
    ]
    together = runs.log_errors(sets)
    for index, tables in enumerate(sets):
        assert together[index] == pytest.approx(runs.log_errors([tables])[0], abs=1e-12)
    assert together[0] == pytest.approx(np.zeros(5), abs=1e-12)


def test_a_rate_is_recovered_from_exact_steps(measured):
    wanted = with_changes(at(-0.2, ("device.H100", "matmul")))
    rows = measured(wanted, "a/a", 24) + measured(wanted, "b/b", 24)
    found = fitting.fit(Runs([row.case for row in rows])).tables
    assert found["device.H100"]["matmul"] == pytest.approx(wanted["device.H100"]["matmul"], rel=0.05)


def test_a_left_out_source_does_not_change_its_rates(measured):
    """The slow source decides the rates of the others only, and is judged with theirs."""
    slow = with_changes(at(-0.3, ("device.H100", "matmul")))
    rows = measured(PRIORS, "a/a", 12) + measured(slow, "b/b", 12)
    fits = fit_without(Runs([row.case for row in rows]), ["a/a", "b/b"])
    one, other = (fits[name].tables["device.H100"]["matmul"] for name in ("a/a", "b/b"))
    assert one < 0.9 * PRIORS["device.H100"]["matmul"]
    assert other == pytest.approx(PRIORS["device.H100"]["matmul"], rel=0.02)
    outcomes = evaluate_left_out(rows)
    errors = {name: [one.step_error for one in outcomes if one.row.source == name] for name in ("a/a", "b/b")}
    assert min(errors["a/a"]) > 0.05
    assert max(errors["b/b"]) < -0.05


def test_rates_with_few_rows_keep_their_priors(measured):
    slow = with_changes(at(-0.3, ("device.H100", "matmul")))
    found = fitting.fit(Runs([row.case for row in measured(slow, "a/a", FEWEST_ROWS - 1)]))
    assert found.tables == with_changes(np.zeros(len(FITTED)))


def test_the_calibrated_rates_are_few_and_not_on_their_bounds():
    tables = load_calibration()
    assert len(FITTED) <= 24
    for section, name in FITTED:
        low, high = BOUNDS[name]
        assert low < tables[section][name] < high, (section, name)
    assert all(section in ("default", *tables) for section, _ in FITTED)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("NVIDIA/dgxc-benchmarking v25.02 llama3.1/README_8b.md", "NVIDIA/dgxc-benchmarking"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md (26.08)", "NVIDIA-NeMo/Megatron-Bridge"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md", "NVIDIA-NeMo/Megatron-Bridge"),
        ("arXiv 2104.04473 Table 2", "NVIDIA/Megatron-LM"),
        ("Megatron-LM README Jan 2021 (git 152aab304d)", "NVIDIA/Megatron-LM"),
        ("arXiv 2205.05198 abstract", "arXiv 2205.05198"),
        ("arXiv 2311.05610 Aleph-Alpha/NeurIPS-WANT-submission data/a.xlsx trial 1", "Aleph-Alpha"),
        ("https://github.com/InternLM/InternEvo/blob/main/doc.md", "InternLM/InternEvo"),
        ("gist.github.com/chenyaofo/d4cd6a20", "gist.github.com/chenyaofo"),
        ("", "made-up"),
    ],
)
def test_files_and_versions_of_a_publisher_are_one_source(text, source):
    assert source_of(text, "made-up") == source

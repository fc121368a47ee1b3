"""The measured pipeline bubble of real processes is the simulated one: the benchmark with small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bubbles(monkeypatch):
    """The benchmark module, importable in this process and in the ranks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pipeline_bubble

    return pipeline_bubble


@pytest.mark.slow
def test_measured_bubbles_equal_the_simulated_ones_within_25_percent(bubbles, tmp_path):
    """With and without split backward, in the best of three steps.

    A rank that waits for one forward pass after each send exceeds the tolerance.
    """
    cases = [bubbles.Case(name, 2, 4, even=False, forward_s=0.01) for name in ("1f1b", "zb-h1")]
    found = bubbles.run_cases(cases, 3, tmp_path / "run")
    for case, measurement in zip(cases, found, strict=True):
        simulated = case.walk(measurement.transfer_s).bubble
        measured = [bubbles.measure_bubble(spans) for spans in measurement.steps]
        assert min(abs(bubble / simulated - 1) for bubble in measured) < 0.25, (case, simulated, measured)
        bubbles.draw(case, measurement, tmp_path)
    plot = (tmp_path / "zb-h1-2-uneven.svg").read_text()
    assert plot.index("zb-h1, 2 ranks, uneven stages: simulated") < plot.index("measured with sleeping")

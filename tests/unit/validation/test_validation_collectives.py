"""Published NCCL curves: fitted on 2, 4 and 8 ranks, judged on the others."""

from __future__ import annotations

import pytest

from meshwright.validation.collectives import FIT_RANKS, Point, fit_ring, rings_of, validate_curves
from meshwright.validation.nvlink import DGX1_V100, count_rings


@pytest.fixture(scope="module")
def found():
    return validate_curves()


def test_held_out_ranks_are_within_20_percent(found):
    """The bar is the mean; no row of 1 MB and more is beyond it either."""
    for curve in found.curves:
        held_out = curve.as_dict()["held_out"]
        assert held_out["rows"] >= 33
        assert held_out["mape"] <= 0.2
        assert held_out["worst"] <= 0.2
        assert {point.ranks for point, _ in curve.rows} - set(FIT_RANKS) <= {3, 5, 6, 7}


def test_mean_error_is_within_20_percent_whatever_ranks_are_fitted(found):
    for curve in found.curves:
        splits = curve.as_dict()["any_split"]
        assert splits["splits"] >= 20
        assert splits["least_mape"] <= curve.as_dict()["held_out"]["mape"] <= splits["most_mape"] <= 0.2


def test_simulation_of_a_ring_is_linear_in_the_fitted_figures(found):
    for curve in found.curves:
        fit = curve.fit
        for point, predicted_s in curve.rows:
            steps, size = 2 * (point.ranks - 1), point.size_bytes
            wire_s = steps / point.ranks * size / (fit.bytes_per_s * rings_of(point))
            assert predicted_s == pytest.approx(fit.launch_s + steps * fit.alpha_s + wire_s, rel=1e-4)


def test_every_row_is_judged_or_has_a_reason(found):
    judged = sum(len(curve.rows) for curve in found.curves)
    not_expressed = sum(11 * len(curve.not_expressed) for curve in found.curves)
    assert judged + not_expressed + sum(found.not_judged.values()) == 199


def test_choice_is_judged_only_where_it_is_stated(found):
    assert [(choice.stated, choice.simulated) for choice in found.choices] == [
        *[("tree", "either")] * 5,
        ("ring", "ring"),
    ]


def test_fit_recovers_the_figures_of_exact_times():
    points = []
    for ranks in FIT_RANKS:
        for size in (10**6, 10**7, 10**8):
            steps = 2 * (ranks - 1)
            time_s = 3e-5 + 2e-6 * steps + steps * size / ranks / 1e11
            points.append(Point("switch", ranks, size, time_s))
    fit = fit_ring(points)
    assert (fit.launch_s, fit.alpha_s, fit.bytes_per_s) == pytest.approx((3e-5, 2e-6, 1e11), rel=1e-3)


def test_fit_has_no_negative_figure():
    """Latency that falls with the ranks would need a negative latency per step."""
    base_s = {2: 5e-5, 4: 4e-5, 8: 3e-5}
    points = [Point("switch", n, size, base_s[n] + size / 1e11) for n in FIT_RANKS for size in (10**6, 10**9)]
    fit = fit_ring(points)
    assert fit.alpha_s == 0
    assert fit.launch_s > 0


def test_rings_of_a_hybrid_cube_mesh():
    """Six NVLinks per GPU: three cycles on all eight, none where GPU 4 has only one neighbour."""
    assert [sum(row) for row in DGX1_V100] == [6] * 8
    assert all(DGX1_V100[a][b] == DGX1_V100[b][a] for a in range(8) for b in range(8))
    assert [count_rings(gpus) for gpus in range(2, 9)] == [1, 2, 4, 0, 2, 4, 6]

"""Measured collectives: bus bandwidth, the fit of latency and bandwidth, and the picture."""

from __future__ import annotations

import pytest

from meshwright.report.collective_curves import (
    CollectiveCurve,
    CollectiveRow,
    bus_factor,
    draw_curves,
    fit_line,
    list_curves,
)
from meshwright.report.figure import save_figure

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
ALPHA_S, BETA = 3e-4, 5e-10


def build_rows(op="all_reduce", algorithm="backend", transport="gloo", ranks=4, extra_s=0.0):
    return [
        CollectiveRow(op, algorithm, transport, ranks, size, line + extra_s, line, 5)
        for size in SIZES
        for line in [ALPHA_S + size * BETA]
    ]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op, factor):
    assert bus_factor(op, 4) == factor
    row = build_rows(op)[-1]
    assert row.busbw_bytes_per_s == pytest.approx(row.bytes * factor / row.time_s)
    assert row.as_dict()["busbw_bytes_per_s"] == row.busbw_bytes_per_s


def test_a_fit_finds_latency_and_bandwidth():
    curve = CollectiveCurve.of(build_rows())
    assert (curve.alpha_s, curve.beta_s_per_byte) == pytest.approx((ALPHA_S, BETA))
    assert curve.worst_error == pytest.approx(0, abs=1e-9)


def test_a_fit_of_idle_times_is_without_the_time_in_run_queues():
    curve = CollectiveCurve.of(build_rows(extra_s=1e-3))
    assert curve.alpha_s == pytest.approx(ALPHA_S + 1e-3)
    assert curve.fit_uncontended() == pytest.approx((ALPHA_S, BETA))


def test_a_fit_has_no_negative_values():
    assert fit_line([1, 1000], [1.0, 0.5]) == pytest.approx((0.6, 0.0))  # least squares of 1 - a and 1 - 2 a
    alpha_s, beta = fit_line([1000, 2000], [1e-3, 4e-3])
    assert (alpha_s, beta > 0) == (0.0, True)
    assert fit_line([1024], [1.0]) is None


def test_curves_are_drawn_by_operation(tmp_path):
    rows = [*build_rows(), *build_rows(transport="shm"), *build_rows("broadcast", "ring")]
    curves = list_curves(rows)
    assert [curve.name for curve in curves] == ["backend, gloo", "backend, shm", "ring, gloo"]
    save_figure(draw_curves(curves, "4 ranks"), tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for text in ("all_reduce: bus bandwidth", "broadcast: time", "backend, shm", "ring, gloo", "4 ranks"):
        assert text in drawn


def test_labels_of_less_than_a_decade_are_times_within_the_margin(tmp_path):
    """Matplotlib labels minor ticks itself then, in TeX that an SVG shows as it is."""
    rows = [
        CollectiveRow("all_reduce", "ring", "shm", 2, size, 1.1e-3 + size * 3e-10, 1e-3, 5) for size in SIZES
    ]
    figure = draw_curves(list_curves(rows), "note")
    save_figure(figure, tmp_path / "curves.svg")
    assert "mathdefault" not in (tmp_path / "curves.svg").read_text()
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels(which="both")]
    assert "2.0 ms" in labels
    assert not any("$" in label for label in labels)


def test_two_sizes_have_no_error_of_the_fit():
    """A line through two points always fits."""
    curve = CollectiveCurve.of(build_rows()[:2])
    assert curve.alpha_s is not None
    assert curve.worst_error is None

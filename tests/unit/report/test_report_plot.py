"""Charts: round ticks, extremes that survive thinning, and text from files that cannot become markup."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.plot import (
    MOST_TOOLTIPS,
    Chart,
    Series,
    build_frame,
    draw_svg,
    format_value,
    log_ticks,
    round_ticks,
    thin,
    tick_labels,
    x_axis,
    y_axis,
)
from meshwright.report.text_plot import draw_text

SVG = "{http://www.w3.org/2000/svg}"


def chart_of(*points: tuple[float, float], **settings) -> Chart:
    return Chart("Loss", "step", "nats", (Series("training", (points,)),), **settings)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_inside(low, width):
    """Whatever the range: steps of 1, 2 or 5 times a power of ten, between two and eleven of them."""
    high = low + width
    ticks = round_ticks(low, high)
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return  # narrower than floats can tell apart
    assert 2 <= len(ticks) <= 11
    slack = (high - low) * 1e-6 + 1e-9 * abs(low)
    assert low - slack <= ticks[0]
    assert ticks[-1] <= high + slack
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    lead = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(lead - m) for m in (1, 2, 5, 10)) < 1e-3


def test_counts_have_no_ticks_between_whole_numbers():
    assert round_ticks(1, 2, about=8, whole=True) == (1.0, 2.0)
    assert round_ticks(1, 4, about=8, whole=True) == (1.0, 2.0, 3.0, 4.0)


def test_a_logarithmic_axis_has_powers_and_places_them_evenly():
    assert log_ticks(0.9, 20000) == (1.0, 10.0, 100.0, 1000.0, 10000.0)
    axis = y_axis(chart_of((0, 1.0), (1, 10000.0), log_y=True))
    middle = axis.place(100.0)
    assert middle == pytest.approx((axis.place(1.0) + axis.place(10000.0)) / 2)


def test_thinning_keeps_every_extreme_and_both_ends():
    """One spike in a hundred thousand steps is still there."""
    points = [(float(n), math.sin(n)) for n in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 2000
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert kept == sorted(kept)


def test_a_short_series_is_not_thinned():
    points = [(float(n), float(n)) for n in range(10)]
    assert thin(points, 500) == points


def test_a_line_that_is_too_dense_gets_its_medians_drawn_over_it():
    """All extremes stay, faint; the line on top is where most points are."""
    points = [(float(n), 100.0 if n % 50 == 0 else 1.0) for n in range(20_000)]
    raw, over = ET.fromstring(draw_svg(chart_of(*points))).iter(f"{SVG}polyline")
    assert "faint" in raw.get("class")
    assert "faint" not in over.get("class")
    heights = {place.split(",")[1] for place in over.get("points").split()}
    assert len(heights) == 1, "the spikes do not move the medians"


def test_names_from_files_are_text_and_the_picture_is_whole_xml():
    evil = '<script>alert("x")</script>&'
    series = (Series(evil, (((1.0, 2.0), (2.0, 1.0)),)), Series("other", (((1.0, 1.0),),), 1))
    drawn = draw_svg(Chart(evil, evil, evil, series, marks=((1.5, evil),)), standalone=True)
    root = ET.fromstring(drawn)
    assert [e.tag for e in root.iter() if "script" in e.tag] == []
    assert evil in {e.text for e in root.iter(f"{SVG}text")}


def test_points_say_their_values_and_long_series_do_not_say_all():
    few = ET.fromstring(draw_svg(chart_of((1, 5.5), (2, 4.25))))
    assert {t.text for t in few.iter(f"{SVG}title")} == {"step 1: training 5.5", "step 2: training 4.25"}
    many = ET.fromstring(draw_svg(chart_of(*[(float(n), float(n % 7)) for n in range(50_000)])))
    assert 0 < len(list(many.iter(f"{SVG}title"))) <= MOST_TOOLTIPS


def test_a_value_that_is_not_finite_breaks_the_line():
    drawn = ET.fromstring(draw_svg(chart_of((1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, 4.0))))
    lines = list(drawn.iter(f"{SVG}polyline"))
    assert [len(line.get("points").split()) for line in lines] == [2, 2]


@pytest.mark.parametrize("points", [[], [(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, math.inf)]])
def test_degenerate_series_are_drawn(points):
    """No point, one point, a constant, nothing finite: a picture all the same, without NaN in it."""
    for settings in ({}, {"log_y": True}, {"from_zero": True}):
        drawn = draw_svg(chart_of(*points, **settings))
        assert "nan" not in drawn
        assert "inf" not in drawn
        draw_text(chart_of(*points, **settings))


def test_the_text_plot_falls_with_the_loss():
    """A falling line has its dots at the top on the left and at the bottom on the right."""
    lines = draw_text(chart_of(*[(float(n), 10.0 - n) for n in range(11)]), columns=20, rows=5)
    assert lines[0] == "Loss (nats: training)"
    rows = [line.partition("│")[2] for line in lines[1:6]]
    assert rows[0][:2].strip()
    assert not rows[0][10:].strip()
    assert rows[4][-2:].strip()
    assert not rows[4][:10].strip()
    assert lines[-1].split() == ["0", "step", "10"]


@pytest.mark.parametrize("values", [(2.980e-4, 2.985e-4), (1e17, 5e17), (1.0, 2.0)])
def test_the_left_margin_has_room_for_the_longest_label(values):
    """Seven pixels a character, beside the axis' own name."""
    chart = chart_of((1, values[0]), (2, values[1]))
    up = y_axis(chart)
    longest = max(map(len, tick_labels(up.ticks)))
    assert build_frame(chart, up, 640, 400).left >= 20 + 7 * longest + 7


def test_ticks_close_together_can_be_told_apart():
    assert tick_labels((5.7684, 5.7686, 5.7688)) == ["5.7684", "5.7686", "5.7688"]
    assert tick_labels((0, 5000, 10000)) == ["0", "5000", "10 k"]


def test_very_large_values_are_powers():
    assert [format_value(v) for v in (5e17, -2.5e30, 3e12)] == ["5e17", "-2.5e30", "3 T"]


def test_a_long_title_sends_the_legend_to_a_line_of_its_own():
    """Title, note and legend stand at different heights, all above the plot."""
    lines = tuple(Series(name, (((1.0, 1.0), (2.0, 2.0)),)) for name in ("ideal", "measured"))

    def heights(chart: Chart) -> dict[str, float]:
        drawn = ET.fromstring(draw_svg(chart, 640, 400))
        return {e.text: float(e.get("y")) for e in drawn.iter(f"{SVG}text")}

    short = heights(Chart("Loss", "step", "nats", lines))
    assert short["Loss"] == short["measured"]
    title = "Speed-up, weak scaling: the batch grows with the ranks"
    long = heights(Chart(title, "ranks", "times", lines, note="demo on a machine"))
    assert long[title] < long["demo on a machine"] < long["measured"] == long["ideal"]
    assert build_frame(Chart(title, "", "", lines), y_axis(chart_of((1, 1), (2, 2))), 640, 400).top > 48


def test_a_single_place_is_in_the_middle_of_the_axis():
    across = x_axis(chart_of((4, 1.0), whole_x=True))
    assert (across.ticks, across.place(4)) == ((4,), 0.5)
    assert draw_text(chart_of((4, 1.0), whole_x=True))[-1].strip() == "step 4"

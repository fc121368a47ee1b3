"""Charts: thinning keeps extremes, text from files is escaped, text plots."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from meshwright.report.figure import INK, embedded_svg, save_figure
from meshwright.report.plot import Chart, Series, draw_chart, format_value, thin
from meshwright.report.text_plot import draw_text, x_axis

SVG = "{http://www.w3.org/2000/svg}"


def chart_of(*points: tuple[float, float], **settings) -> Chart:
    """A loss chart with these points."""
    return Chart("Loss", "step", "nats", (Series("training", (points,)),), **settings)


def axes_of(chart: Chart):
    """The axes of a drawn chart."""
    (axes,) = draw_chart(chart).axes
    return axes


def test_thinning_keeps_extremes_and_ends():
    """One spike in 100,000 steps is kept."""
    points = [(float(n), math.sin(n)) for n in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 2000
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert kept == sorted(kept)


def test_short_series_is_not_thinned():
    points = [(float(n), float(n)) for n in range(10)]
    assert thin(points, 500) == points


def test_dense_line_is_drawn_faint_with_its_median_on_top():
    """The faint line keeps all extremes."""
    points = [(float(n), 100.0 if n % 50 == 0 else 1.0) for n in range(20_000)]
    raw, over = axes_of(chart_of(*points)).lines
    assert (raw.get_alpha(), over.get_alpha()) == (0.3, None)
    assert max(raw.get_ydata()) == 100
    assert set(over.get_ydata()) == {1.0}, "the spikes do not move the medians"


def test_names_from_files_are_escaped_in_svg(tmp_path):
    evil = '<script>alert("x")</script>&$'
    series = (Series(evil, (((1.0, 2.0), (2.0, 1.0)),)), Series("other", (((1.0, 1.0),),), 1))
    figure = draw_chart(Chart(evil, evil, evil, series, marks=((1.5, evil),)))
    save_figure(figure, tmp_path / "chart.svg")
    for drawn in ((tmp_path / "chart.svg").read_text(), embedded_svg(figure, evil)):
        root = ET.fromstring(drawn)
        assert [e.tag for e in root.iter() if "script" in e.tag] == []
        assert evil in {e.text for e in root.iter(f"{SVG}text")}


def test_embedded_chart_uses_the_text_color_of_the_page():
    drawn = embedded_svg(draw_chart(chart_of((1, 1.0), (2, 2.0))), "Loss")
    assert drawn.startswith('<svg role="img" aria-label="Loss"')
    assert INK not in drawn
    assert "currentColor" in drawn
    assert "<metadata" not in drawn


def test_non_finite_value_interrupts_the_line():
    lines = axes_of(chart_of((1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, 4.0))).lines
    assert [len(line.get_xdata()) for line in lines] == [2, 2]


def test_attempts_share_one_legend_entry():
    series = (
        Series("training", (((1.0, 1.0),), ((2.0, 1.0),))),
        Series("held out", (((1.0, 1.0),),), 1),
    )
    axes = axes_of(Chart("Loss", "step", "nats", series))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "held out"]


@pytest.mark.parametrize("points", [[], [(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, math.inf)]])
def test_degenerate_series_are_drawn(points):
    """No point, one point, a constant and no finite value give a plot without NaN."""
    for settings in ({}, {"log_y": True}, {"from_zero": True}):
        drawn = embedded_svg(draw_chart(chart_of(*points, **settings)), "chart")
        assert "nan" not in drawn
        assert ">inf" not in drawn
        draw_text(chart_of(*points, **settings))


def test_text_plot_of_a_falling_loss_falls():
    """Its dots are at the top left and at the bottom right."""
    lines = draw_text(chart_of(*[(float(n), 10.0 - n) for n in range(11)]), columns=20, rows=5)
    assert lines[0] == "Loss (nats: training)"
    rows = [line.partition("│")[2] for line in lines[1:6]]
    assert rows[0][:2].strip()
    assert not rows[0][10:].strip()
    assert rows[4][-2:].strip()
    assert not rows[4][:10].strip()
    assert lines[-1].split() == ["0", "step", "10"]


def test_large_values_are_formatted_as_powers():
    assert [format_value(v) for v in (5e17, -2.5e30, 3e12, 2.98e-4)] == ["5e17", "-2.5e30", "3T", "2.98e-4"]


def test_stacked_charts_share_the_width():
    figure = draw_chart(chart_of((1, 1.0), (2, 2.0)), chart_of((1, 1.0), (2, 3.0)), width=400, height=200)
    assert tuple(figure.get_size_inches() * 96) == (400, 400)
    upper, lower = (axes.get_position() for axes in figure.axes)
    assert upper.y0 > lower.y1


def test_single_x_value_is_in_the_middle_of_the_axis():
    assert x_axis(chart_of((4, 1.0), whole_x=True)).place(4) == 0.5
    assert draw_text(chart_of((4, 1.0), whole_x=True))[-1].strip() == "step 4"

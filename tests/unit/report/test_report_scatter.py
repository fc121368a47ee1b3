"""The scatter plot of predicted against measured values."""

from __future__ import annotations

from meshwright.report.figure import COLORS, embedded_svg
from meshwright.report.scatter import Scatter, draw_scatter


def axes_of(families):
    """The axes of a scatter plot of these families."""
    (axes,) = draw_scatter(Scatter("a < b", "x", "y", families)).axes
    return axes


def test_points_have_their_values_on_equal_axes():
    axes = axes_of({"one": [(1.0, 1.0), (100.0, 100.0), (1.0, 100.0)]})
    points = axes.collections[-1].get_offsets().tolist()
    assert points == [[1, 1], [100, 100], [1, 100]]
    assert axes.get_xlim() == axes.get_ylim()
    (line,) = axes.lines
    assert list(line.get_xdata()) == list(line.get_ydata()), "the line of equality"


def test_names_are_escaped_and_families_have_distinct_markers():
    many = {f"family <{n}>": [(1.0, 2.0)] for n in range(len(COLORS) + 1)}
    figure = draw_scatter(Scatter("a < b", "x", "y", many))
    assert "family &lt;0&gt; (1)" in embedded_svg(figure, "a < b")
    first, last = figure.axes[0].collections[1], figure.axes[0].collections[-1]
    assert first.get_facecolor().tolist() == last.get_facecolor().tolist()
    assert len(first.get_paths()[0]) != len(last.get_paths()[0]), "another marker"


def test_scatter_without_families_is_empty():
    assert len(axes_of({}).collections) == 1, "the band of 10%"

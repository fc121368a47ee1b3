"""The picture of predicted over measured: dots where they belong, readable names, nothing to draw."""

from __future__ import annotations

from xml.etree import ElementTree

from meshwright.report.scatter import COLOURS, Scatter, draw_scatter

SVG = "{http://www.w3.org/2000/svg}"


def draw(families):
    return ElementTree.fromstring(draw_scatter(Scatter("a < b", "x", "y", families)))


def test_equal_values_lie_on_the_line_of_equality():
    tree = draw({"one": [(1.0, 1.0, "a"), (100.0, 100.0, "b"), (1.0, 100.0, "c")]})
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter(f"{SVG}circle")][:3]
    line = next(one for one in tree.iter(f"{SVG}line") if one.get("class") == "frame")
    x1, y1, x2, y2 = (float(line.get(name)) for name in ("x1", "y1", "x2", "y2"))

    def off(dot) -> float:
        return dot[1] - (y1 + (dot[0] - x1) * (y2 - y1) / (x2 - x1))

    assert abs(off(dots[0])) < 1
    assert abs(off(dots[1])) < 1
    assert off(dots[2]) < -100, "predicted too slow lies above"


def test_names_are_escaped_and_families_told_apart():
    many = {f"family <{n}>": [(1.0, 2.0, f"row & {n}")] for n in range(len(COLOURS) + 1)}
    tree = draw(many)
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert "family <0> (1)" in texts
    assert len(list(tree.iter(f"{SVG}rect"))) == 1 + 2, "the eleventh family has another shape"


def test_nothing_is_drawn_of_nothing():
    assert not list(draw({}).iter(f"{SVG}circle"))

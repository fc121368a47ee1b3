"""Pictures of plans: both surfaces draw the same things at the same places."""

from __future__ import annotations

import struct
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest

from meshwright.report.canvas import ADVANCE, SCALE, PngCanvas, SvgCanvas
from meshwright.report.glyphs import glyph
from meshwright.report.plan_plot import PlanPicture, draw_plan

SVG = "{http://www.w3.org/2000/svg}"


def pixels_of(content: bytes) -> np.ndarray:
    """An 8-bit RGB picture whose rows are unfiltered."""
    width, height = struct.unpack(">II", content[16:24])
    place, data = 8, b""
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        if content[place + 4 : place + 8] == b"IDAT":
            data = content[place + 8 : place + 8 + length]
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any(), "no row is filtered"
    return rows[:, 1:].reshape(height, width, 3)


def test_a_box_covers_its_pixels_and_no_others():
    canvas = PngCanvas(20, 10, "box")
    canvas.rect(5, 2, 10, 4, "#102030")
    pixels = pixels_of(canvas.finish())
    inside = (pixels == (16, 32, 48)).all(axis=2)
    assert inside.sum() == 10 * 4 * SCALE**2
    assert inside[2 * SCALE : 6 * SCALE, 5 * SCALE : 15 * SCALE].all()


def test_a_letter_is_drawn_as_its_dots():
    canvas = PngCanvas(20, 20, "letter")
    canvas.text(2, 12, "H", colour="#000000")
    dark = (pixels_of(canvas.finish()) == 0).all(axis=2)
    assert dark.sum() == glyph("H").sum() * SCALE**2
    assert glyph("H")[3].all(), "its bar"
    assert (glyph("\u00e9") == glyph("?")).all()


@pytest.mark.parametrize(("anchor", "left"), [("start", 40), ("middle", 31), ("end", 22)])
def test_words_end_or_begin_at_their_anchor(anchor, left):
    canvas = PngCanvas(100, 20, "words")
    canvas.text(40, 12, "HHH", anchor=anchor, colour="#000000")
    columns = np.flatnonzero((pixels_of(canvas.finish()) == 0).all(axis=2).any(axis=0))
    assert columns[0] == left * SCALE


def test_svg_escapes_what_it_is_told():
    canvas = SvgCanvas(10, 10, 'a "title" & <more>')
    canvas.text(1, 1, "<b>")
    canvas.rect(0, 0, 1, 1, "#000000", says="5 > 3")
    root = ElementTree.fromstring(canvas.finish())
    assert [e.text for e in root.iter(f"{SVG}text")] == ["<b>"]
    assert [e.text for e in root.iter(f"{SVG}title")] == ["5 > 3"]


def test_bars_are_as_long_as_their_bytes_and_the_limit_stands_where_it_belongs():
    picture = PlanPicture(
        "plan",
        memory={"first": {"state": 60.0, "activations": 20.0}},
        room_bytes=100.0,
        steps=[("a", {"compute": 3.0, "bubble": 1.0})],
        rates=np.array([5.0, 4.0, 1.0]),
    )
    root = ElementTree.fromstring(draw_plan(picture, "svg"))
    bars = {
        title.text.partition(":")[0]: float(rect.get("width"))
        for rect in root.iter(f"{SVG}rect")
        for title in rect.iter(f"{SVG}title")
    }
    assert bars["state"] / bars["activations"] == pytest.approx(3, rel=0.01)
    assert bars["compute"] / bars["bubble"] == pytest.approx(3, rel=0.01)
    limit = next(e for e in root.iter(f"{SVG}line") if e.get("stroke-width") == "2")
    start = min(float(r.get("x")) for r in root.iter(f"{SVG}rect") for _ in r.iter(f"{SVG}title"))
    assert float(limit.get("x1")) - start == pytest.approx(
        (bars["state"] + bars["activations"]) / 0.8, rel=0.01
    )
    assert pixels_of(draw_plan(picture, "png")).shape[2] == 3


def test_a_single_layout_can_be_drawn():
    picture = PlanPicture(
        "one", {"every rank": {"state": 1.0}}, 2.0, [("a", {"compute": 1.0})], np.array([1.0])
    )
    for kind in ("svg", "png"):
        assert len(draw_plan(picture, kind)) > 500


def test_no_figure_is_crossed_by_the_line_of_the_limit():
    """77 of 80 GB: the words would lie under the line, so they stand behind it."""
    memory = {"first": {"state": 80e9}, "last": {"state": 77e9}}
    picture = PlanPicture("full", memory, 80e9, [("a", {"compute": 1.0})], np.ones(1))
    root = ElementTree.fromstring(draw_plan(picture, "svg"))
    limit = float(next(e for e in root.iter(f"{SVG}line") if e.get("stroke-width") == "2").get("x1"))
    words = [e for e in root.iter(f"{SVG}text") if e.text in ("80 GB", "77 GB")]
    assert len(words) == 2
    for element in words:
        left = float(element.get("x"))
        assert not left - 2 < limit < left + ADVANCE * len(element.text)


def test_layouts_are_named_in_full():
    words = "pp=4 dp_replicate=2 dp_shard=2 cp=2 tp=4 zero=3 interleaved x12 sequence_parallel micro_batch=1"
    picture = PlanPicture("t", {"every rank": {"state": 1.0}}, 2.0, [(words, {"compute": 1.0})], np.ones(1))
    root = ElementTree.fromstring(draw_plan(picture, "svg"))
    assert words in [e.text for e in root.iter(f"{SVG}text")]


def test_a_pipeline_is_drawn_as_a_timeline():
    """Rank 1 idles for a quarter of the step, then goes forward, then backward."""
    rows = [
        ("rank 0", [("forward", 0.0, 2.0), ("backward", 3.0, 4.0)]),
        ("rank 1", [("forward", 1.0, 2.0), ("backward", 2.0, 4.0)]),
    ]
    picture = PlanPicture(
        "t", {"first": {"state": 1.0}}, 2.0, [("a", {"compute": 4.0})], np.ones(1), pipeline=rows
    )
    root = ElementTree.fromstring(draw_plan(picture, "svg"))
    height = {e.text: float(e.get("y")) for e in root.iter(f"{SVG}text")}
    (start, whole), *passes = [
        (float(r.get("x")), float(r.get("width")))
        for r in root.iter(f"{SVG}rect")
        if r.get("y") and float(r.get("y")) == height["rank 1"] - 14
    ]
    places = [((x - start) / whole, width / whole) for x, width in passes]
    assert places == [pytest.approx((0.25, 0.25), abs=0.01), pytest.approx((0.5, 0.5), abs=0.01)]
    assert pixels_of(draw_plan(picture, "png")).shape[2] == 3

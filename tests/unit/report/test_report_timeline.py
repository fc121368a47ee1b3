"""Timelines: measured bars look as simulated ones do, and two share one axis of time."""

from __future__ import annotations

import struct
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest

from meshwright.report.timeline import (
    FILLS,
    Timeline,
    build_timeline,
    draw_pair_png,
    draw_pair_svg,
    draw_png,
    draw_svg,
    measured_timeline,
)
from meshwright.report.timeline_text import draw_pair_rows, draw_rows
from meshwright.schedule.pipeline.actions import PipelineSchedule
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule

SVG = "{http://www.w3.org/2000/svg}"


def spans_of(schedule: PipelineSchedule, seconds: float, began: float = 0.0):
    """What a run of the schedule would have recorded, with passes of so many seconds."""
    walk = walk_schedule(schedule, StageTimes(seconds, seconds, seconds))
    return [
        [(a, began + start, began + end) for a, start, end in zip(row, starts, ends, strict=True)]
        for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
    ]


def simulated(schedule: PipelineSchedule, seconds: float = 1.0) -> Timeline:
    walk = walk_schedule(schedule, StageTimes(seconds, seconds, seconds))
    return build_timeline(schedule, walk, "simulated", "", unit="s")


def bars_of(svg: str) -> list[tuple[str, float, float, float]]:
    """Style, left edge, top and width of each bar."""
    boxes = [box for box in ElementTree.fromstring(svg).iter(f"{SVG}rect") if len(box)]
    return [(b.get("class"), *(float(b.get(key)) for key in ("x", "y", "width"))) for b in boxes]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_measured_bars_are_those_of_a_walk_with_the_same_times(name):
    """Whenever the run began, and in whatever order the records come."""
    schedule = build_schedule(name, 2, 4)
    spans = [list(reversed(row)) for row in spans_of(schedule, 1.0, began=1000.0)]
    measured = measured_timeline(schedule, spans, "simulated", "")
    assert measured == simulated(schedule)
    assert draw_svg(measured) == draw_svg(simulated(schedule))


def test_a_measured_rank_without_records_is_an_empty_row():
    schedule = build_schedule("1f1b", 2, 2)
    spans = [spans_of(schedule, 1.0)[0], []]
    measured = measured_timeline(schedule, spans, "measured", "")
    assert [len(bars) for _, bars in measured.rows] == [4, 0]
    assert "rank 1" in draw_svg(measured)
    assert measured_timeline(schedule, [[], []], "nothing", "").end == 0


def test_two_timelines_share_the_axis_and_the_kinds():
    """The lower run took twice as long: its bars are twice as wide, and it alone fills the width."""
    schedule = build_schedule("1f1b", 2, 2)
    lower = measured_timeline(schedule, spans_of(schedule, 2.0), "measured & drawn", "note")
    svg = draw_pair_svg(simulated(schedule), lower)
    bars = bars_of(svg)
    above, below = bars[:8], bars[8:]
    assert len(below) == 8
    assert max(y for _, _, y, _ in above) < min(y for _, _, y, _ in below)
    assert max(x + width for _, x, _, width in above) < 0.55 * 960
    assert max(x + width for _, x, _, width in below) == pytest.approx(960 - 16, abs=1.5)
    for (style, x, _, width), (style_below, x_below, _, width_below) in zip(above, below, strict=True):
        assert style == style_below
        assert x_below - 64 == pytest.approx(2 * (x - 64), abs=0.02)
        assert width_below == pytest.approx(2 * width + 1, abs=0.02)
    words = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert words.count("forward") == 1, "one list of the kinds"
    assert words.count("time, s") == 1, "one axis"
    assert {"simulated", "measured & drawn"} <= set(words)


def pixels_of(png: bytes) -> np.ndarray:
    """Of the pictures that the canvas writes: eight bits, three channels, no filter."""
    width, height = struct.unpack(">II", png[16:24])
    at = png.index(b"IDAT")
    (length,) = struct.unpack(">I", png[at - 4 : at])
    rows = np.frombuffer(zlib.decompress(png[at + 4 : at + 4 + length]), dtype=np.uint8)
    return rows.reshape(height, 1 + width * 3)[:, 1:].reshape(height, width, 3)


def test_a_png_has_the_bars_of_the_svg():
    schedule = build_schedule("zbv", 2, 4)
    timeline = simulated(schedule)
    pixels = pixels_of(draw_png(timeline))
    for style, x, y, width in bars_of(draw_svg(timeline)):
        found = pixels[round(2 * (y + 2)), round(2 * (x + width / 2))]
        plain = np.array([int(FILLS[style[0]][n : n + 2], 16) for n in (1, 3, 5)])
        expected = 255 - 0.72 * (255 - plain) if "later" in style else plain
        assert np.allclose(found, expected, atol=1), style
    pair = pixels_of(draw_pair_png(timeline, timeline))
    assert pair.shape[0] == pixels.shape[0] + 2 * (48 + 2 * 28)


def test_text_of_two_timelines_has_one_scale():
    schedule = build_schedule("1f1b", 2, 2)
    lower = measured_timeline(schedule, spans_of(schedule, 2.0), "measured", "")
    above, below, missing = draw_pair_rows(simulated(schedule), lower, 200)
    assert missing == 0
    texts = ["".join(text for text, _, _ in row) for row in above + below]
    assert texts[0].split()[:4] == ["rank", "0", "F0", "F1"]
    assert len(texts[2]) - len("rank 0  ") == 2 * (len(texts[0]) - len("rank 0  "))


def test_text_of_one_odd_short_bar_does_not_widen_all_others():
    """A pass a thousand times shorter than the others still has its cell."""
    schedule = build_schedule("1f1b", 2, 4)
    spans = spans_of(schedule, 1.0)
    action, start, _ = spans[0][0]
    spans[0][0] = (action, start, start + 0.001)
    lower = measured_timeline(schedule, spans, "measured", "")
    _, below, missing = draw_pair_rows(simulated(schedule), lower, 140)
    assert missing == 0
    assert "".join(text for text, _, _ in below[0]).startswith("rank 0   F0")
    assert draw_rows(lower, 140)[1] > 0, "alone it is drawn with the shortest bar as its unit"

"""Timelines: measured and simulated bars look alike and share one time axis."""

from __future__ import annotations

import pytest

from meshwright.report.timeline import Timeline, build_timeline, draw_timelines, measured_timeline
from meshwright.report.timeline_text import draw_rows
from meshwright.schedule.pipeline.actions import PipelineSchedule
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule


def spans_of(schedule: PipelineSchedule, seconds: float, began: float = 0.0):
    """The spans that a run of the schedule would record, with passes of this length."""
    walk = walk_schedule(schedule, StageTimes(seconds, seconds, seconds))
    return [
        [(a, began + start, began + end) for a, start, end in zip(row, starts, ends, strict=True)]
        for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
    ]


def simulated(schedule: PipelineSchedule, seconds: float = 1.0) -> Timeline:
    """The timeline of a simulated schedule."""
    walk = walk_schedule(schedule, StageTimes(seconds, seconds, seconds))
    return build_timeline(schedule, walk, "simulated", "", unit="s")


def bars_of(axes) -> list[tuple[float, float]]:
    """Start and width of each bar, without the gap after it."""
    spans = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    return sorted((round(span.x0, 6), round(span.width, 6)) for span in spans)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_measured_timeline_equals_the_simulated_one(name):
    """The start time of the run and the order of the records have no influence."""
    schedule = build_schedule(name, 2, 4)
    spans = [list(reversed(row)) for row in spans_of(schedule, 1.0, began=1000.0)]
    assert measured_timeline(schedule, spans, "simulated", "") == simulated(schedule)


def test_timeline_has_a_labelled_bar_per_action():
    schedule = build_schedule("zbv", 2, 4)
    timeline = simulated(schedule)
    (axes,) = draw_timelines(timeline).axes
    assert len(bars_of(axes)) == timeline.bars == sum(map(len, schedule.ranks))
    assert len(axes.texts) == timeline.bars + 1, "one more text is the note"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "forward",
        "backward",
        "weight gradient",
    ]


def test_rank_without_records_is_an_empty_row():
    schedule = build_schedule("1f1b", 2, 2)
    spans = [spans_of(schedule, 1.0)[0], []]
    measured = measured_timeline(schedule, spans, "measured", "")
    assert [len(bars) for _, bars in measured.rows] == [4, 0]
    labels = draw_timelines(measured).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["rank 0", "rank 1"]
    assert measured_timeline(schedule, [[], []], "nothing", "").end == 0


def test_two_timelines_share_time_axis_and_legend():
    """The lower run takes twice as long, so its bars start at twice the time."""
    schedule = build_schedule("1f1b", 2, 2)
    lower = measured_timeline(schedule, spans_of(schedule, 2.0), "measured & drawn", "note")
    above, below = draw_timelines(simulated(schedule), lower).axes
    assert above.get_xlim() == below.get_xlim() == (0, lower.end)
    assert above.get_position().y0 > below.get_position().y1
    starts = [start for start, _ in bars_of(above)]
    assert [start for start, _ in bars_of(below)] == [2 * start for start in starts]
    assert (above.get_title(loc="left"), below.get_title(loc="left")) == ("simulated", "measured & drawn")
    assert (above.get_xlabel(), below.get_xlabel()) == ("", "time, s"), "one axis"
    assert above.get_legend() is not None
    assert below.get_legend() is None


def test_text_timeline_has_a_cell_for_the_shortest_bar():
    rows, missing = draw_rows(simulated(build_schedule("1f1b", 2, 2)), 200)
    assert missing == 0
    assert "".join(text for text, _, _ in rows[0]).split()[:4] == ["rank", "0", "F0", "F1"]
    assert draw_rows(simulated(build_schedule("1f1b", 2, 2)), 20)[1] > 0

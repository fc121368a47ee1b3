"""Plots of plans: bar lengths, labels and file types."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.core.errors import UserError
from meshwright.report.figure import save_figure
from meshwright.report.plan_plot import PlanPicture, draw_plan


def picture_of(**changes) -> PlanPicture:
    """A plan picture with changed fields."""
    given = {
        "title": "plan",
        "memory": {"first": {"state": 60.0, "activations": 20.0}},
        "room_bytes": 100.0,
        "steps": [("a", {"compute": 3.0, "bubble": 1.0})],
        "rates": np.array([5.0, 4.0, 1.0]),
        "checked": "3 checked, 3 of them fit",
    }
    return PlanPicture(**(given | changes))


def bars_of(axes) -> list[tuple[float, float]]:
    """Left edge and width of every bar."""
    return [(bar.get_x(), bar.get_width()) for bar in axes.patches]


def test_bars_and_memory_limit_have_their_values():
    memory, steps, rates = draw_plan(picture_of()).axes
    assert bars_of(memory) == [(0, 60), (60, 20)]
    assert memory.lines[0].get_xdata()[0] == 100
    assert bars_of(steps) == [(0, 3), (3, 1)]
    assert rates.get_xscale() == "log"


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_plot_is_saved_in_every_format_deterministically(kind, tmp_path):
    one = picture_of(memory={"every rank": {"state": 1.0}}, steps=[("a", {"compute": 1.0})], rates=np.ones(1))
    for name in ("first", "second"):
        save_figure(draw_plan(one), tmp_path / f"{name}.{kind}")
    first, second = (tmp_path / f"{name}.{kind}" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes(), "the same plot gives the same bytes"
    assert len(first.read_bytes()) > 500


def test_missing_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.core.packages.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        save_figure(None, tmp_path / "plan.svg")
    assert caught.value.problems[0].code == "install-missing-extra"
    assert "meshwright[plots]" in str(caught.value)


def test_labels_do_not_overlap_the_memory_limit():
    """77 of 80 GB: the label would cross the line, so it is placed after it."""
    memory = {"first": {"state": 80e9}, "last": {"state": 77e9}, "low": {"state": 20e9}}
    axes = draw_plan(picture_of(memory=memory, room_bytes=80e9)).axes[0]
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [
        ("80 GB", 80e9),
        ("77 GB", 80e9),
        ("20 GB", 20e9),
    ]


def test_names_of_ranks_are_inside_the_picture():
    stages = "stages " + ", ".join(str(8 * n) for n in range(12))
    figure = draw_plan(picture_of(memory={"stages 0, 8, 16, 24": {"state": 1e9}, stages: {"state": 2e9}}))
    figure.canvas.draw()
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["stages 0, 8, 16, 24", "stages 0, 8, 16, 24, ..., 88"]
    assert all(label.get_window_extent().x0 >= 0 for label in labels)


def test_layout_names_are_not_truncated():
    name = "pp=4 dp_replicate=2 dp_shard=2 cp=2 tp=4 zero=3 interleaved x12 sequence_parallel micro_batch=1"
    axes = draw_plan(picture_of(steps=[(name, {"compute": 1.0})])).axes[1]
    assert name in [text.get_text() for text in axes.texts]


def test_pipeline_timeline_shows_at_most_eight_ranks():
    rows = [
        ("rank 0", [("forward", 0.0, 2.0), ("backward", 3.0, 4.0)]),
        ("rank 1", [("forward", 1.0, 2.0), ("backward", 2.0, 4.0)]),
    ]
    axes = draw_plan(picture_of(pipeline=rows)).axes[2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    spans = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert sorted((span.x0, span.width) for span in spans) == [(0, 2), (1, 1), (2, 2), (3, 1)]
    many = [(f"rank {n}", rows[0][1]) for n in range(64)]
    labels = [t.get_text() for t in draw_plan(picture_of(pipeline=many)).axes[2].get_yticklabels()]
    assert len(labels) == 8
    assert (labels[0], labels[-1]) == ("rank 0", "rank 63")


def test_a_pipeline_with_many_passes_shows_its_start_and_its_end():
    passes = [("forward" if n % 2 else "backward", float(n), n + 1.0) for n in range(1000)]
    axes = draw_plan(picture_of(pipeline=[("rank 0", passes)])).axes[2]
    assert [part.get_xlim() for part in axes.child_axes] == [(0, 100), (900, 1000)]
    assert "the first and the last" in axes.get_title(loc="left")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward"]


def test_small_lines_of_memory_are_drawn_as_one():
    memory = {"first": {"state": 990.0, "batch": 6.0, "tables": 4.0}}
    axes = draw_plan(picture_of(memory=memory, room_bytes=2000.0)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["state", "other"]
    assert bars_of(axes) == [(0, 990), (990, 10)]

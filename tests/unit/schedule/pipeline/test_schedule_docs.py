"""The numbers of ``docs/pipeline-schedules.md`` equal the simulation, and its program runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.core.errors import CheckFailedError
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import load_schedule
from meshwright.schedule.pipeline.proof import prove_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule

PAGE = (Path(__file__).parents[4] / "docs" / "pipeline-schedules.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `") and "--schedule" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def build_from_cell(cell: str, micro_batches: int):
    """The schedule of a first cell such as "`interleaved`, v = 4", and its stage times."""
    name = re.findall(r"`(.+?)`", cell)[0]
    virtual_stages = int(cell[-1]) if "v = " in cell else None
    schedule = build_schedule(name, 4, micro_batches, virtual_stages)
    return schedule, StageTimes(*[1 / schedule.virtual_stages] * 3)


@pytest.mark.parametrize("row", rows("Numbers"), ids=lambda row: row[0])
def test_table_of_times_bubbles_and_peaks(row):
    for micro_batches, time, bubble in ((8, row[1], row[2]), (32, row[3], row[4])):
        schedule, times = build_from_cell(row[0], micro_batches)
        walk = walk_schedule(schedule, times)
        assert walk.makespan_s == pytest.approx(float(time))
        assert f"{walk.bubble:.1%}" == bubble
        peaks = [f"{peak / schedule.virtual_stages:g}" for peak in prove_schedule(schedule).peak_in_flight]
        assert peaks == (row[5].split() if row[5][0].isdigit() else [str(micro_batches)] * 4)


@pytest.mark.parametrize("row", rows("Times and transfers"), ids=lambda row: row[0])
def test_table_of_times_with_transfers(row):
    schedule, times = build_from_cell(row[0], 32)
    found = [
        walk_schedule(schedule, times, t, overlap).makespan_s
        for t, overlap in ((0, True), (0.1, True), (0.1, False))
    ]
    assert found == pytest.approx([float(cell) for cell in row[1:]])


def test_tables_have_all_rows():
    assert (len(rows("Numbers")), len(rows("Times and transfers"))) == (7, 6)


def test_program_of_the_page_prints_its_output(capsys):
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(snippet, {})
    assert capsys.readouterr().out == "[105.  100.5  97.5]\n[4 3 2 1]\n"


def test_schedule_file_of_the_page_is_proved(tmp_path):
    """The page also shows the error of a rank that begins with its backward pass."""
    (text,) = re.findall(r"^```\n(# two ranks.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "my.csv").write_text(text, encoding="utf-8")
    assert load_schedule(tmp_path / "my.csv").ranks == build_schedule("1f1b", 2, 3).ranks
    (tmp_path / "my.csv").write_text(text.replace("1F0, 1B0", "1B0, 1F0"), encoding="utf-8")
    with pytest.raises(CheckFailedError) as refused:
        load_schedule(tmp_path / "my.csv")
    message = str(refused.value.problems[-1]).partition(" ")[2]  # the page has it for a shorter file
    assert message in PAGE

"""The numbers of ``docs/collectives.md`` are counted on the schedules, and its program runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.schedule.collective.build import ALGORITHMS, build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.proof import prove_collective
from meshwright.schedule.collective.traffic import count_traffic

PAGE = (Path(__file__).parents[4] / "docs" / "collectives.md").read_text(encoding="utf-8")


def rows(heading: str, columns: int) -> list[list[str]]:
    """The rows below a heading that have this many columns."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == columns and not row[0].startswith("`--")]


@pytest.mark.parametrize("row", rows("Steps and bytes", 7), ids=lambda row: row[0])
def test_table_of_steps_and_bytes(row):
    algorithm = row[0].strip("`")
    for ranks, per_node, steps, sent in ((8, 4, row[3], row[4]), (64, 8, row[5], row[6])):
        nodes = {"ranks_per_node": per_node} if algorithm == "hierarchical" else {}
        schedule = build_collective("all_reduce", algorithm, ranks, **nodes)
        size = 64_000
        assert prove_collective(schedule).steps == int(steps)
        assert f"{max(count_traffic(schedule, size).sent) / size:.3g}" == sent


def test_tables_have_every_algorithm_and_operation():
    assert [row[0].strip("`") for row in rows("Steps and bytes", 7)] == list(ALGORITHMS)
    named = rows("The algorithms", 3)
    table = {op: re.findall(r"`(\w+)`", row[1]) for row in named for op in re.findall(r"`(\w+)`", row[0])}
    assert {op: tuple(names) or ALGORITHMS for op, names in table.items()} == {
        str(op): list_algorithms(op) for op in Op
    }


def test_program_of_the_page_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = PAGE.partition("## In Python\n")[2].partition("```python\n")[2].partition("```")[0]
    program, measured, _ = program.partition("measured = mw.bench_collectives(")  # takes 30 s
    assert measured
    exec(compile(program, "collectives.md", "exec"), {})
    steps, sent, *_ = capsys.readouterr().out.split()
    assert (steps, sent) == ("14", "112000000")
    assert (tmp_path / "ring.svg").exists()


def test_loop_of_the_page_is_that_of_the_example():
    example = (Path(__file__).parents[4] / "examples" / "collective_transport.py").read_text(encoding="utf-8")
    shown = PAGE.partition("## A transport")[2].partition("```python\n")[2].partition("```")[0]
    written = [line.strip() for line in example.splitlines()]
    assert [line for line in shown.splitlines() if line.strip() not in written] == []

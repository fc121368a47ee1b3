"""Reads and writes schedule files: custom schedules, which are proved when they are read.

The format is torch's compute-only CSV (``_load_csv`` and ``_dump_csv`` with ``compute_only`` in
``torch.distributed.pipelining``): one row per rank, one cell per action, as ``2F0`` for stage, letter and
micro-batch. Letters: F forward, B full backward, I input gradient, W weight gradients. A pair such as
``(0F3;1B2)OVERLAP_F_B`` is its two actions in order. Empty cells and lines, and text after ``#``, are
ignored.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import CheckFailedError, Problem, UserError
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.build import MAX_ACTIONS
from meshwright.schedule.pipeline.proof import MAX_VIOLATIONS, prove_schedule

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_INPUT, _FULL = "I", "B"
"""Letters of a file for :attr:`Kind.BACKWARD`, in a split and in a full backward pass."""


@dataclass(frozen=True)
class _Row:
    """The cells of a line, with the letters of the file."""

    line: int
    cells: tuple[tuple[int, str, int], ...]


def load_schedule(path: Path) -> PipelineSchedule:
    """Read a schedule and prove it.

    The file determines ranks, stages and the number of micro-batches. With an I or W in it the backward pass
    is split, and B means an input gradient directly followed by W.

    Raises:
        UserError: The file cannot be read, or is not a complete schedule.
        CheckFailedError: The schedule cannot run; each violation with its line.
    """
    rows = _read_rows(path)
    split = any(letter in (_INPUT, Kind.WEIGHT) for row in rows for _, letter, _ in row.cells)
    stage_ranks = _find_stage_ranks(path, rows)
    count = _count_micro_batches(path, rows, len(stage_ranks))
    ranks = tuple(tuple(a for cell in row.cells for a in _actions(*cell, split)) for row in rows)
    schedule = PipelineSchedule(path.name, count, stage_ranks, ranks, split)
    violations = prove_schedule(schedule).violations
    if violations:
        raise CheckFailedError(
            *(
                Problem("schedule-not-proved", f"is not proved: {v}", path=f"{path}:{rows[v.rank].line}")
                for v in violations
            )
        )
    return schedule


def write_schedule(schedule: PipelineSchedule, path: Path) -> None:
    """Write a schedule so that :func:`load_schedule` and torch read it.

    An input gradient directly followed by its weight gradients is written as a full backward pass.

    Raises:
        UserError: The file cannot be written.
    """
    lines = [",".join(_cells(row, schedule.split_backward)) for row in schedule.ranks]
    try:
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(Problem("schedule-file", rule, path=str(path), fix="Name another file")) from None


def _cells(row: tuple[Action, ...], split: bool) -> list[str]:
    found: list[str] = []
    for action in row:
        before = f"{action.stage}{_INPUT}{action.micro_batch}"
        if action.kind is Kind.WEIGHT and found and found[-1] == before:
            found[-1] = f"{action.stage}{_FULL}{action.micro_batch}"
        else:
            letter = _INPUT if split and action.kind is Kind.BACKWARD else action.kind.value
            found.append(f"{action.stage}{letter}{action.micro_batch}")
    return found


def _actions(stage: int, letter: str, micro_batch: int, split: bool) -> list[Action]:
    if letter == _FULL and split:
        kinds = [Kind.BACKWARD, Kind.WEIGHT]
    else:
        kinds = [Kind.BACKWARD if letter == _INPUT else Kind(letter)]
    return [Action(kind, stage, micro_batch) for kind in kinds]


def _read_rows(path: Path) -> list[_Row]:
    """The lines with cells; reports all cells that are not actions."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        rule = f"cannot be read as a schedule: {why}"
        raise UserError(
            Problem("schedule-file", rule, path=str(path), fix="Give a CSV file with one row per rank")
        ) from None
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0]
        if not content.strip():
            continue
        cells: list[tuple[int, str, int]] = []
        for cell in next(csv.reader([content])):
            pair = _PAIR.fullmatch(cell.strip())
            for single in pair.groups() if pair else [cell]:
                action = _CELL.fullmatch(single.strip())
                if action:
                    cells.append((int(action[1]), action[2], int(action[3])))
                elif single.strip():
                    problems.append(_not_an_action(path, number, cell.strip()))
        rows.append(_Row(number, tuple(cells)))
    if problems:
        raise UserError(*problems[:MAX_VIOLATIONS])
    if not rows:
        rule, fix = "has no actions", "Write one row per rank, such as 0F0,0F1,0B0,0B1"
        raise UserError(Problem("schedule-file", rule, path=str(path), fix=fix))
    return rows


def _not_an_action(path: Path, line: int, cell: str) -> Problem:
    rule = "is not an action: a stage, one of F, B, I and W, and a micro-batch"
    return Problem("schedule-file-cell", rule, path=f"{path}:{line}", value=cell, fix="For example 2F0")


def _find_stage_ranks(path: Path, rows: list[_Row]) -> tuple[int, ...]:
    """The rank of each stage."""
    stage_ranks: dict[int, int] = {}
    problems = []
    for rank, row in enumerate(rows):
        for stage in sorted({cell[0] for cell in row.cells}):
            if stage_ranks.setdefault(stage, rank) != rank:
                other = rows[stage_ranks[stage]].line
                rule = f"has stage {stage}, which is also on line {other}; a stage is on one rank"
                problems.append((row.line, rule, "Move its actions to one of them"))
        if not row.cells:
            problems.append((row.line, "has no actions; a rank has at least one stage", "Remove the line"))
    last = max(stage_ranks, default=0)
    if not problems and len(stage_ranks) <= last:
        gap = next(stage for stage in range(last) if stage not in stage_ranks)
        rule = f"has stage {last} and no stage {gap}; stages count from 0 without gaps"
        line = rows[stage_ranks[last]].line
        problems.append((line, rule, f"Add stage {gap}, or count the stages from 0"))
    if problems:
        raise UserError(
            *(
                Problem("schedule-file-stage", rule, path=f"{path}:{line}", fix=fix)
                for line, rule, fix in problems[:MAX_VIOLATIONS]
            )
        )
    return tuple(stage_ranks[stage] for stage in range(len(stage_ranks)))


def _count_micro_batches(path: Path, rows: list[_Row], stages: int) -> int:
    """The number of micro-batches; checks that there are no gaps, and that there are backward passes."""
    found = {cell[2] for row in rows for cell in row.cells}
    count = max(found) + 1
    if len(found) < count:
        gap = next(m for m in range(count) if m not in found)
        rule = (
            f"has micro-batch {count - 1} and no micro-batch {gap}; micro-batches count from 0 without gaps"
        )
        fix = f"Add micro-batch {gap}, or count the micro-batches from 0"
        raise UserError(Problem("schedule-file-micro-batches", rule, path=str(path), fix=fix))
    if count * stages * len(Kind) > MAX_ACTIONS:
        rule = f"has {stages:,} stages and {count:,} micro-batches: more than {MAX_ACTIONS:,} actions"
        raise UserError(Problem("schedule-size", rule, path=str(path), fix="Use fewer of either"))
    if all(letter == Kind.FORWARD for row in rows for _, letter, _ in row.cells):
        rule, fix = "has only forward passes; a training step needs backward passes", "Add a B for each F"
        raise UserError(Problem("schedule-file-backward", rule, path=str(path), fix=fix))
    return count

"""Checks of one case of the planner matrix: ``plan`` shows the layout that it writes and accepts.

The command runs in this process, through the ``main`` of the installed command. A check returns one sentence
per contradiction, so that a test of many cases can list them all.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.cli import main
from meshwright.layout.text import layout_overrides
from meshwright.plan.build import summarize_plan
from meshwright.plan.contract import PlanContract, read_plan
from meshwright.plan.search.find import SIMPLICITY_MARGIN
from meshwright.spec.layout import Layout
from planner_matrix import Case, is_built

TOP = 5
NOTHING_FITS = "plan-nothing-fits"
INTERRUPTED = 130
TIME_TOLERANCE = 1e-9
"""Relative difference of a time that was written and read again."""
PARTS_SUM = 1e-6
"""Relative difference between a step and the sum of its parts."""
TRAFFIC_KEYS = ("axis", "op", "phase", "ranks", "calls", "bytes", "pp_rank")
PEAKS = ("peak", "first_step")


@dataclass(frozen=True)
class Ran:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output."""
        found = json.loads(self.out)
        assert isinstance(found, dict), f"not an object: {self.out!r}"
        return found

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The errors of a command that failed."""
        return list(self.json.get("errors", []))

    @property
    def codes(self) -> list[str]:
        """The codes of the errors."""
        return [error["code"] for error in self.errors]

    @property
    def reason(self) -> str:
        """Exit status and first error, for a message."""
        return f"exit {self.status}: {self.errors[0]['message'][:240] if self.errors else self.err[-240:]}"


def run_command(*arguments: object) -> Ran:
    """Run ``meshwright`` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with (
        mock.patch.object(sys, "argv", ["meshwright", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    if status == INTERRUPTED:
        raise KeyboardInterrupt("Ctrl-C ended the command")
    return Ran(int(status or 0), out.getvalue(), err.getvalue())


def plan_case(case: Case, *arguments: object) -> Ran:
    """Run ``meshwright plan`` with ``--json`` for a case."""
    return run_command("plan", case.model, "--on", case.on, *arguments, "--json")


def read_layout(shown: Mapping[str, Any]) -> Layout:
    """The layout of a JSON entry."""
    keys = dict(shown["layout"])
    if "stage_layers" in keys:
        keys["stage_layers"] = tuple(keys["stage_layers"])
    return Layout(**keys)


def name_layout(shown: Mapping[str, Any]) -> list[str]:
    """The overrides of the layout of a JSON entry."""
    return layout_overrides(read_layout(shown)).split()


def find_contradictions(case: Case, folder: Path) -> list[str]:
    """All contradictions between the outputs of ``plan`` for a case."""
    path = folder / f"{case}.toml"
    written = plan_case(case, "--top", TOP, "-o", path)
    if written.status != 0:
        return list(_refused(case, written, path))
    try:
        plan = read_plan(path, to_run=False)
    finally:
        path.unlink()
    found = written.json
    best = found["layouts"][0]
    return [
        *_shown_differs_from_written(best, plan),
        *_not_exact(case, plan),
        *_does_not_fit(case, found),
        *_times_do_not_add_up(found["layouts"]),
        *_planned_otherwise_when_given(case, best),
    ]


def _refused(case: Case, written: Ran, path: Path) -> Iterator[str]:
    """No layout fits: ``plan`` fails with that code and a fix, with ``-o`` and without."""
    shown = plan_case(case, "--top", TOP)
    if shown.status == 0:
        overrides = " ".join(name_layout(shown.json["layouts"][0]))
        yield f"plan shows {overrides}, but -o refuses it: {written.reason}"
        return
    for name, ran in {"plan": shown, "plan -o": written}.items():
        if (ran.status, ran.codes) != (2, [NOTHING_FITS]):
            yield f"{name} failed without {NOTHING_FITS}: {ran.reason}"
        elif not ran.errors[0]["fix"] or f"[{NOTHING_FITS}]" not in ran.err:
            yield f"{name}: the error has no fix, or the message has no code: {ran.reason}"
    if path.exists():
        yield "a plan was written although nothing fits"


def _shown_differs_from_written(best: Mapping[str, Any], plan: PlanContract) -> Iterator[str]:
    """The first layout in JSON against the plan file: layout, memory, collectives, step time."""
    summary = json.loads(json.dumps(summarize_plan(plan)))
    yield from _compare("layout", best["layout"], summary["layout"])
    yield from _compare("collectives", _traffic(best), _traffic(summary))
    yield from _compare_memory(best["memory_bytes"], summary["memory_bytes"])
    first_steps = {name: rank.first_peak_bytes for name, rank in plan.classes().items()}
    shown_first = {name: rank.get("first_step") for name, rank in best["memory_bytes"].items()}
    yield from _compare("peak of the first step", shown_first, first_steps)
    yield from _compare_times("step_s", {"step": best["step_s"]}, {"step": plan.step_s})
    yield from _compare_times("breakdown_s", best["breakdown_s"], plan.breakdown_s)


def _not_exact(case: Case, plan: PlanContract) -> Iterator[str]:
    """For a model that ``train`` runs, the plan must be exact."""
    if not plan.exact and is_built(case.model):
        yield "the written plan is not exact: train cannot run its layout"


def _compare_memory(shown: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
    """Peak and lines of each class of ranks."""
    if shown.keys() != written.keys():
        yield f"classes of ranks: shown {sorted(shown)}, written {sorted(written)}"
        yield from _compare("largest peak", _largest_peak(shown), _largest_peak(written))
        return
    for name, rank in written.items():
        yield from _compare(f"peak of {name}", shown[name]["peak"], rank["peak"])
        yield from _compare(f"lines of {name}", _lines(shown[name]), _lines(rank))


def _does_not_fit(case: Case, found: Mapping[str, Any]) -> Iterator[str]:
    """Every layout shown must fit on each class of ranks."""
    usable, share = found.get("usable_bytes"), found.get("usable_share")
    if usable is None or share is None:
        yield "the JSON has no usable_bytes or no usable_share"
    elif not (0 < share <= 1 and math.isclose(usable, share * case.memory_bytes, rel_tol=1e-6)):
        yield f"usable_bytes={usable} is not usable_share={share} of {case.memory_bytes} bytes"
    for number, layout in enumerate(found["layouts"], 1):
        if layout.get("fits") is not True:
            yield f"layout {number} is shown with fits={layout.get('fits')}"
        ranks = layout["memory_bytes"]
        missing = {key for key in (*PEAKS, "needed") for rank in ranks.values() if key not in rank}
        if missing:
            yield f"layout {number}: memory_bytes has no {', '.join(sorted(missing))}"
            continue
        for name, rank in ranks.items():
            largest = max(rank[key] for key in PEAKS)
            if rank["needed"] < largest:
                yield f"layout {number}, {name}: needs {rank['needed']} bytes, less than {largest}"
            if usable is not None and rank["needed"] > usable:
                yield f"layout {number}, {name}: needs {rank['needed']} bytes of {usable}"


def _times_do_not_add_up(layouts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Parts sum to the step time, the step time is within its interval, and layouts are sorted by it."""
    for number, layout in enumerate(layouts, 1):
        step, parts = layout["step_s"], sum(layout["breakdown_s"].values())
        if not math.isclose(parts, step, rel_tol=PARTS_SUM):
            yield f"layout {number}: breakdown_s sums to {parts} s, the step takes {step} s"
        if not 0 < layout["step_s_low"] <= step <= layout["step_s_high"]:
            interval = f"{layout['step_s_low']} to {layout['step_s_high']} s"
            yield f"layout {number}: a step of {step} s is not within {interval}"
    first, *others = (layout["step_s"] for layout in layouts)
    if others != sorted(others):
        yield f"the layouts after the first are not sorted by step time: {others}"
    if others and first > others[0] * (1 + SIMPLICITY_MARGIN["cuda"] + TIME_TOLERANCE):
        yield f"the first layout takes {first} s, a later one {others[0]} s"


def _planned_otherwise_when_given(case: Case, best: Mapping[str, Any]) -> Iterator[str]:
    """The first layout, given by its overrides, must get the same prediction."""
    overrides = name_layout(best)
    given = plan_case(case, *overrides)
    if given.status != 0:
        yield f"{' '.join(overrides)} is shown first and refused when given: {given.reason}"
        return
    (again,) = given.json["layouts"]
    yield from _compare("layout when given", again["layout"], best["layout"])
    yield from _compare("collectives when given", _traffic(again), _traffic(best))
    peaks = [_peaks(entry["memory_bytes"]) for entry in (again, best)]
    yield from _compare("peaks when given", *peaks)
    yield from _compare_times("step_s when given", {"step": again["step_s"]}, {"step": best["step_s"]})


def _compare(what: str, one: Any, other: Any) -> Iterator[str]:
    """A sentence if two values differ; for lists the first rows that differ."""
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        one, other = ({key: side.get(key) for key in keys} for side in (one, other))
    elif isinstance(one, list) and isinstance(other, list):
        both = [row for row in one if row in other]
        one, other = ([row for row in side if row not in both] for side in (one, other))
        what = f"{what} ({len(one)} and {len(other)} rows differ)"
        one, other = one[:2], other[:2]
    yield f"{what}: {one} != {other}"


def _compare_times(what: str, one: Mapping[str, float], other: Mapping[str, float]) -> Iterator[str]:
    same = one.keys() == other.keys() and all(
        math.isclose(one[key], other[key], rel_tol=TIME_TOLERANCE, abs_tol=1e-15) for key in one
    )
    if not same:
        yield f"{what}: {dict(one)} != {dict(other)}"


def _traffic(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The collectives of a JSON entry in a fixed order, without other keys."""
    rows = [
        {key: row[key] for key in TRAFFIC_KEYS if row.get(key) is not None} for row in entry["collectives"]
    ]
    return sorted(rows, key=json.dumps)


def _lines(rank: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(line["name"], line["bytes"]) for line in rank["lines"]]


def _peaks(memory: Mapping[str, Any]) -> dict[str, int]:
    return {name: rank["peak"] for name, rank in memory.items()}


def _largest_peak(memory: Mapping[str, Any]) -> int:
    return max(_peaks(memory).values())

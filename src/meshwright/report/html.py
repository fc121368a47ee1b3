"""The report as one HTML page: no scripts, no other files; light, dark and print styles.

All text from files is escaped. The page's content security policy forbids scripts and external resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from meshwright.audit.backup_slices import UsedSlices
from meshwright.audit.compare import CollectiveRow, StateRow
from meshwright.audit.record import LayoutChanged, Recovery
from meshwright.audit.stragglers import StragglerSpan
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.core.units import format_bytes, format_seconds
from meshwright.core.version import __version__
from meshwright.report.figure import can_draw, embedded_svg
from meshwright.report.generation_plot import draw_generations
from meshwright.report.plot import Chart, draw_chart
from meshwright.report.run_report import RunReport
from meshwright.report.stage_table import STAGE_COLUMNS, stage_cells
from meshwright.report.timeline import MAX_BARS, draw_timelines

MOST_OPEN = 20
"""Further rows of a table are collapsed."""

MOST_EXPERTS = 16
"""Experts that are listed per layer: the first ones."""

PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif;
  color: #16191d; background: #ffffff; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.badge { display: inline-block; padding: .1rem .6rem; border-radius: 1rem; font-size: .85rem;
  font-weight: 600; border: 1px solid currentColor; vertical-align: .2rem; white-space: nowrap; }
.good { color: #1b6a3f; } .bad { color: #a82418; } .open { color: #7a5200; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 1rem 0; }
dt { color: #59616b; } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #8a919b; } td { border-bottom: 1px solid #e3e6ea; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
.charts svg { width: 100%; height: auto; } figure svg { width: 100%; min-width: 52rem; height: auto; }
figure { margin: 0 0 1rem; overflow-x: auto; }
li { overflow-wrap: anywhere; } summary { cursor: pointer; margin: .5rem 0; }
pre { background: #f3f5f7; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; border-radius: .3rem; }
footer { margin-top: 2.5rem; color: #59616b; font-size: .85rem; }
@media (prefers-color-scheme: dark) { @media screen {
body { color: #e4e7eb; background: #16191d; } dt, footer { color: #a2a9b2; }
.good { color: #69c592; } .bad { color: #ff8d80; } .open { color: #f0c060; }
td { border-color: #30363e; } pre { background: #20252b; }
} }
@media print { body { max-width: none; padding: 0; font-size: 11px; color-scheme: light; }
figure svg { min-width: 0; } figure { overflow: visible; }
figure, svg, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide, pre { overflow: visible; }
pre { white-space: pre-wrap; } details::details-content { content-visibility: visible; display: block; } }
"""

OTHER_TIME = "other: in-memory snapshots, writing events, and the end of the run after its last step."
NO_PLOTS = (
    "Curves need matplotlib: install <code>meshwright[plots]</code>, then run <code>meshwright report</code>."
)
BADGES = {"complete": "good", "failed": "bad"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def draw_page(report: RunReport) -> str:
    """The page as HTML."""
    name = report.run_dir.resolve().name
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}: {escape(report.status)}</title>",
        f"<style>{PAGE_STYLE}</style></head><body>",
        _head(report, name),
        *_warnings(report),
        *_timeline(report),
        *_curves(report),
        *_experts(report),
        *_pipeline(report),
        *_memory(report),
        *_audit(report),
        *_goodput(report),
        *_slices(report.slices),
        *_notes(report),
        f"<h2>Job</h2><pre>{escape(report.job_text())}</pre>",
        f"<footer>Written by meshwright {escape(__version__)} from {escape(str(report.run_dir))}</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def write_page(report: RunReport, path: Path) -> None:
    """Write the page atomically."""
    try:
        replace_text(path, draw_page(report))
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        fix = "Choose another file"
        raise UserError(Problem("report-not-writable", rule, path=str(path), fix=fix)) from None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """An HTML table; cells are escaped, except badges of this module."""
    heads = "".join(f"<th{_right(i, numbers)}>{escape(c)}</th>" for i, c in enumerate(columns))
    lines = [f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>']
    for row in rows:
        cells = "".join(f"<td{_right(i, numbers)}>{_cell(c)}</td>" for i, c in enumerate(row))
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


class _Badge(str):
    """Text that is already HTML: a coloured word."""

    __slots__ = ()


def _badge(text: str, kind: str) -> _Badge:
    return _Badge(f'<span class="{kind}">{escape(text)}</span>')


def _cell(text: str) -> str:
    return text if isinstance(text, _Badge) else escape(text)


def _right(index: int, numbers: Sequence[int]) -> str:
    return ' class="n"' if index in numbers else ""


def _head(report: RunReport, name: str) -> str:
    kind = BADGES.get(report.status, "open")
    badge = f'<span class="badge {kind}">{escape(report.status)}</span>'
    if report.audited:
        kept = report.audit.ok
        word, kind = ("audit ok", "good") if kept else ("audit differs", "bad")
        if not report.audit.measured:
            word, kind = "not measured", "open"
        badge += f' <span class="badge {kind}">{word}</span>'
    elif report.audit.real_differences:
        badge += ' <span class="badge bad">audit differs</span>'
    pairs = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in report.facts())
    return f"<h1>{escape(name)} {badge}</h1>\n<dl>{pairs}</dl>"


def _warnings(report: RunReport) -> list[str]:
    found = report.warnings()
    if not found:
        return []
    lines = "".join(f"<li>{escape(text)}</li>" for text in found)
    return [f'<h2 class="bad">Warnings</h2><ul>{lines}</ul>']


def _curves(report: RunReport) -> list[str]:
    parts = ["<h2>Curves</h2>"]
    large = [c for c in (report.loss_chart(), report.rate_chart()) if not c.empty]
    if not large:
        return [*parts, "<p>No step was completed.</p>"]
    if not can_draw():
        return [*parts, f"<p>{NO_PLOTS}</p>"]
    parts += [f"<figure>{_draw(chart, 1080, 340)}</figure>" for chart in large]
    small = "".join(_draw(chart, 530, 240) for chart in report.small_charts())
    return [*parts, f'<div class="charts">{small}</div>']


def _draw(chart: Chart, width: int, height: int) -> str:
    return embedded_svg(draw_chart(chart, width=width, height=height), chart.title)


def _experts(report: RunReport) -> list[str]:
    """Expert load by layer; nothing for a dense model."""
    loads = report.history.newest.record.experts
    if loads is None:
        return []
    columns = ("layer", "busiest / mean", "most tokens", "fewest", "dropped", "tokens of each expert")
    rows = []
    for layer in loads.layers:
        each = ", ".join(f"{count:,}" for count in layer.load[:MOST_EXPERTS])
        more = len(layer.load) - MOST_EXPERTS
        cells = (f"{layer.imbalance:.2f}", f"{max(layer.load):,}", f"{min(layer.load):,}")
        listed = f"{each} and {more} more" if more > 0 else each
        rows.append((str(layer.layer), *cells, f"{layer.dropped_share:.1%}", listed))
    parts = ["<h2>Experts</h2>", f"<p>Tokens routed to each expert in step {loads.step}:</p>"]
    return parts + _collapsible_table(columns, rows, (0, 1, 2, 3, 4))


def _pipeline(report: RunReport) -> list[str]:
    """The stages, and the simulated and measured timeline; nothing without a pipeline."""
    planned = report.plan.pipeline
    if planned is None:
        return []
    parts = ["<h2>Stages</h2>", table(STAGE_COLUMNS, stage_cells(report.plan))]
    if report.pipeline is None:
        bubble = (
            f"Planned: {planned.bubble:.1%} of the ranks' time is idle, from the first action to the last."
        )
        return [*parts, f"<p>{escape(bubble)} No timeline was recorded.</p>"]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in report.pipeline.sentences()]
    upper, lower = report.pipeline.timelines()
    if upper.bars + lower.bars <= MAX_BARS and can_draw():
        parts.append(f"<figure>{embedded_svg(draw_timelines(upper, lower), upper.title)}</figure>")
    return parts


def _memory(report: RunReport) -> list[str]:
    """Predicted memory by rank class, then measured memory by rank."""
    parts = ["<h2>Memory</h2>"]
    for name, rank in report.plan.classes().items():
        lines = [
            (line.name, f"{line.bytes:,}", format_bytes(line.bytes), line.formula) for line in rank.lines
        ]
        peak = rank.peak_bytes
        lines.append(("peak in a step", f"{peak:,}", format_bytes(peak), f"at: {rank.peak_at}"))
        parts.append(f"<p>Predicted for {escape(name)} before the run:</p>")
        parts.append(table(("line", "bytes", "size", "formula"), lines, numbers=(1, 2)))
    kinds = list(dict.fromkeys(row.kind for row in report.audit.state))
    by_rank: dict[int, dict[str, StateRow]] = {}
    for row in report.audit.state:
        by_rank.setdefault(row.rank, {})[row.kind] = row
    rows = [[str(rank), *(_beside(found.get(kind)) for kind in kinds)] for rank, found in by_rank.items()]
    parts.append("<p>Measured in the audited step, with the difference from the prediction:</p>")
    columns = ("rank", *kinds)
    parts += _collapsible_table(columns, rows, tuple(range(len(columns))))
    return parts


def _beside(row: StateRow | None) -> str:
    if row is None or row.measured is None:
        return "not measured"
    difference = row.measured - row.predicted
    return f"{format_bytes(row.measured)} ({f'{difference:+,d} B' if difference else 'equal'})"


def _collapsible_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]
) -> list[str]:
    """A table; rows after the first are collapsed."""
    parts = [table(columns, rows[:MOST_OPEN], numbers)]
    if len(rows) > MOST_OPEN:
        rest = table(columns, rows[MOST_OPEN:], numbers)
        parts.append(f"<details><summary>{len(rows) - MOST_OPEN} more rows</summary>{rest}</details>")
    return parts


def _audit(report: RunReport) -> list[str]:
    """Every prediction with its verdict."""
    parts = ["<h2>Audit</h2>", f"<p>{escape(report.verdict_text())}</p>"]
    rows = [_state_cells(row) for row in report.audit.state]
    columns = ("rank", "kind", "predicted bytes", "measured bytes", "tolerance", "verdict")
    # Rows that differ come first, so that none is collapsed.
    rows.sort(key=lambda cells: "differs" not in cells[-1])
    parts += _collapsible_table(columns, rows, (0, 2, 3))
    parts.append("<h2>Collectives</h2>")
    moved = [_collective_cells(row) for row in report.audit.collectives]
    if moved:
        heads = (
            "axis",
            "operation",
            "phase",
            "ranks",
            "calls predicted",
            "calls measured",
            "bytes predicted",
            "bytes measured",
            "verdict",
        )
        whose = "Where ranks differ, the row is of the one furthest from the plan."
        parts.append(f"<p>Per rank, {escape(report.audited_part())}. {whose}</p>")
        parts.append(table(heads, moved, numbers=(3, 4, 5, 6, 7)))
    elif report.plan.collectives:
        parts.append("<p>Not reported: the run did not finish.</p>")
    else:
        parts.append("<p>None predicted, none measured.</p>")
    return parts


def _state_cells(row: StateRow) -> list[str]:
    measured = "not measured" if row.measured is None else f"{row.measured:,}"
    allowed = f"{row.tolerance:.0%}" if row.tolerance else "equal"
    verdict = "-" if row.measured is None else _verdict(row.ok)
    kind = row.kind if row.generation is None else f"{row.kind}, generation {row.generation}"
    return [str(row.rank), kind, f"{row.predicted:,}", measured, allowed, verdict]


def _collective_cells(row: CollectiveRow) -> list[str]:
    counts = (row.ranks, row.predicted_calls, row.calls, row.predicted_bytes, row.bytes)
    axis = row.axis if row.pp_rank is None else f"{row.axis}, pp rank {row.pp_rank}"
    return [axis, row.op, row.phase, *(f"{n:,}" for n in counts), _verdict(row.equal)]


def _verdict(ok: bool) -> str:
    return _badge("ok", "good") if ok else _badge("differs", "bad")


def _timeline(report: RunReport) -> list[str]:
    """The generations of a run over its time; nothing for a run of one generation."""
    record = report.history.run
    if record.goodput is None or len(record.generations) < 2 or not can_draw():
        return []
    times = [record.clock.generations[number] for number in sorted(record.clock.generations)]
    figure = embedded_svg(draw_generations(times), "Generations")
    return [f"<h2>Timeline</h2><figure>{figure}</figure>"]


def _goodput(report: RunReport) -> list[str]:
    """Where the time went; for a run of several generations also its recoveries and attempts."""
    goodput, record = report.history.run.goodput, report.history.run
    if goodput is None:
        return []
    rows = [("steps that count", goodput.steps_s), *goodput.lost_s.items()]
    cells = [(name, f"{seconds:.2f}", f"{seconds / goodput.wall_s:.1%}") for name, seconds in rows]
    parts = ["<h2>Goodput</h2>", table(("", "seconds", "share"), cells, numbers=(1, 2))]
    parts.append(f"<p>{OTHER_TIME}</p>")
    stragglers = _stragglers(record.stragglers.spans)
    changes = _layout_changes(record.layout_changes)
    return [*parts, *_recoveries(record.recoveries), *changes, *stragglers, *_attempts(report)]


def _stragglers(spans: Sequence[StragglerSpan]) -> list[str]:
    """The ranks that were named as stragglers."""
    if not spans:
        return []
    columns = ("rank", "host", "phase", "times its peers", "late", "share", "from step", "to step", "action")
    rows = [
        (
            str(one.rank),
            one.host,
            one.phase_text,
            f"{one.slowdown:.2f}",
            format_seconds(one.lateness_s),
            f"{one.share:.1%}",
            str(one.since_step),
            "-" if one.recovered_step is None else str(one.recovered_step),
            one.action,
        )
        for one in spans
    ]
    return ["<h2>Stragglers</h2>", *_collapsible_table(columns, rows, (0, 3, 4, 5, 6, 7))]


def _slices(rows: Sequence[UsedSlices]) -> list[str]:
    """The replicas whose gradients were used, with backup replicas."""
    if not rows:
        return []
    columns = ("rank", "role", "steps", "own slice used", "another rank's slice used", "not used")
    cells = [
        (
            str(row.rank),
            "backup" if row.backup else f"slice {row.rank}",
            str(row.steps),
            "-" if row.backup else str(row.own),
            str(row.taken_over),
            str(row.unused),
        )
        for row in rows
    ]
    return ["<h2>Backup replicas</h2>", *_collapsible_table(columns, cells, (0, 2, 3, 4, 5))]


def _recoveries(recoveries: Sequence[Recovery]) -> list[str]:
    """The recoveries with their parts in seconds."""
    if not recoveries:
        return []
    parts = list(recoveries[0].parts())
    columns = ("failed rank", "how", "from", "step", "steps replayed", *parts)
    rows = [
        (
            "none" if one.failed_rank is None else str(one.failed_rank),
            one.how,
            one.source,
            str(one.restored_step),
            str(one.replayed_steps),
            *(f"{seconds:.3f}" for seconds in one.parts().values()),
        )
        for one in recoveries
    ]
    text = "<p>Parts in seconds: see Recovery in the documentation.</p>"
    return ["<h2>Recoveries</h2>", text, *_collapsible_table(columns, rows, (0, *range(3, len(columns))))]


def _layout_changes(changes: Sequence[LayoutChanged]) -> list[str]:
    """The layout changes by which the run continued with fewer or more devices."""
    if not changes:
        return []
    rows = [(str(c.step), f"{c.ranks_before} to {c.ranks}", c.describe_layout(), c.reason) for c in changes]
    return ["<h2>Layouts</h2>", table(("after step", "ranks", "layout", "reason"), rows, numbers=(0,))]


def _attempts(report: RunReport) -> list[str]:
    attempts = report.history.attempts
    if len(attempts) < 2:
        return []
    last = len(attempts) - 1
    rows = [
        (str(n), str(a.resumed_at or 0), str(a.last_step), report.status if n == last else a.status)
        for n, a in enumerate(attempts)
    ]
    columns = ("attempt", "from step", "to step", "status")
    return ["<h2>Attempts</h2>", table(columns, rows, numbers=(0, 1, 2))]


def _notes(report: RunReport) -> list[str]:
    lines = "".join(f"<li>{escape(text)}</li>" for text in report.notes())
    return [f"<h2>Notes</h2><ul>{lines}</ul>"] if lines else []

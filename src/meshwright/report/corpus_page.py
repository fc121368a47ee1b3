"""The report of a preparation: lines of text, and one HTML page without scripts or other files."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.core.units import format_bytes, format_count, format_plural, format_rate, format_seconds
from meshwright.core.version import __version__
from meshwright.data.corpus_summary import CorpusSummary
from meshwright.data.prepare_report import PrepareReport
from meshwright.report.html import PAGE_STYLE, POLICY, table

_BAR_WIDTH = 40
_NAMED = 100


def corpus_facts(report: PrepareReport, summary: CorpusSummary) -> list[tuple[str, str]]:
    """Names and values, for text and page."""
    text_bytes = report.bytes_per_s * report.seconds
    left_out = {
        "exact duplicates": report.duplicates,
        "near-duplicates": report.near_duplicates,
        "dropped by the filter": report.filtered,
        "empty": report.empty,
        "unreadable": report.quarantined,
    }
    splits = (f"{name} {summary.documents[name]:,}" for name in summary.documents)
    return [
        ("documents read", f"{report.documents_in:,}"),
        ("documents kept", f"{report.documents_out:,} ({', '.join(splits)})"),
        *((name, f"{count:,}") for name, count in left_out.items()),
        ("text", format_bytes(text_bytes)),
        ("tokens", f"{format_count(report.tokens)} ({summary.tokenizer}, vocabulary {summary.vocab_size:,})"),
        ("tokens per byte", f"{report.tokens / max(text_bytes, 1):.3f}"),
        ("shards", f"{report.shards} with {format_bytes(summary.disk_bytes)}"),
        ("longest document", f"{summary.longest:,} tokens"),
        (
            "engine",
            f"{report.engine}, {format_seconds(report.seconds)}, {format_rate(report.bytes_per_s, 'B')}",
        ),
        ("sha256", report.sha256),
    ]


def corpus_lines(report: PrepareReport, summary: CorpusSummary) -> list[str]:
    """The report as text: facts, a histogram of lengths, frequent words."""
    facts = corpus_facts(report, summary)
    width = max(len(name) for name, _ in facts)
    lines = [f"{name:<{width}}  {value}" for name, value in facts]
    lines += ["", "tokens per document"]
    most = max((count for _, count in summary.lengths), default=1)
    for least, count in summary.lengths:
        bar = "#" * max(1, round(_BAR_WIDTH * count / most))
        lines.append(f"{least:>10,}+ {count:>10,} {bar}")
    words = ", ".join(f"{word} {count:,}" for word, count in summary.top_words[:10])
    return [*lines, "", f"most frequent of {summary.sampled_words:,} words: {words}"]


def draw_corpus_page(report: PrepareReport, summary: CorpusSummary) -> str:
    """The report as an HTML page."""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in corpus_facts(report, summary)
    )
    words = [(word, f"{count:,}") for word, count in summary.top_words]
    lengths = [(f"{least:,} to {2 * least - 1:,}", f"{count:,}") for least, count in summary.lengths]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.out)}</title><style>{PAGE_STYLE}</style></head><body>",
        f"<h1>{escape(Path(report.out).name)}</h1><dl>{facts}</dl>",
        f"<h2>Tokens per document</h2>{_histogram(summary)}",
        table(["tokens", "documents"], lengths, numbers=(0, 1)),
        f"<h2>Most frequent of {summary.sampled_words:,} words</h2>",
        table(["word", "count"], words, numbers=(1,)),
        *_quarantine(report),
        f"<footer>Written by meshwright {escape(__version__)}</footer></body></html>",
    ]
    return "\n".join(parts) + "\n"


def write_corpus_page(report: PrepareReport, summary: CorpusSummary, path: Path) -> None:
    """Write the page atomically.

    Raises:
        UserError: It cannot be written.
    """
    try:
        replace_text(path, draw_corpus_page(report, summary))
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise UserError(
            Problem("report-not-writable", rule, path=str(path), fix="Choose another file")
        ) from error


def _histogram(summary: CorpusSummary) -> str:
    """Bars as SVG with their counts: one per power of two, at its own size."""
    most = max((count for _, count in summary.lengths), default=1)
    step, height, top = 44, 120, 14
    bars = []
    for number, (least, count) in enumerate(summary.lengths):
        tall = max(1.0, height * count / most)
        at = number * step
        title = f"{least:,} to {2 * least - 1:,} tokens: {format_plural(count, 'document')}"
        bars.append(
            f'<rect x="{at}" y="{top + height - tall:.1f}" width="{step - 6}" height="{tall:.1f}" '
            f'fill="#3a6ea5">'
            f"<title>{title}</title></rect>"
            f"{_label(at + (step - 6) / 2, top + height - tall - 3, format_count(count))}"
            f"{_label(at + (step - 6) / 2, top + height + 12, format_count(least))}"
        )
    width, total = max(1, len(summary.lengths)) * step, top + height + 18
    # The page's charts fill its width: a few bars would fill the screen.
    frame = f'viewBox="0 0 {width} {total}" style="width:{width}px;min-width:0;height:{total}px"'
    axes = "Above a bar: documents. Below it: tokens of a document, at least."
    return f"<figure><svg {frame}>{''.join(bars)}</svg><figcaption>{axes}</figcaption></figure>"


def _label(x: float, y: float, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="10" text-anchor="middle" fill="currentColor"'
    return f"<text {place}>{text}</text>"


def _quarantine(report: PrepareReport) -> list[str]:
    if not report.quarantined:
        return []
    named = report.quarantined_names[:_NAMED]
    items = "".join(f"<li>{escape(name)}</li>" for name in named)
    more = f"<p>and {report.quarantined - len(named):,} more</p>" if report.quarantined > len(named) else ""
    return [f"<h2>Unreadable</h2><ul>{items}</ul>{more}"]

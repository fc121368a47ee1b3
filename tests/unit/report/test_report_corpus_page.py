"""The report of a preparation: what was kept and left out, escaped, without scripts."""

from __future__ import annotations

import json

from meshwright.data.corpus_summary import summarize_corpus
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.report.corpus_page import corpus_lines, draw_corpus_page


def test_report_of_a_small_corpus(tmp_path):
    texts = ["<b>bold</b> words " * 3, *(f"word {n} " * n for n in range(1, 30)), "word 3 " * 3]
    (tmp_path / "a.jsonl").write_text("\n".join([*(json.dumps({"text": t}) for t in texts), "{<script>"]))
    report = prepare_corpus(CorpusSpec(("a.jsonl",), "out", eval_fraction=0.1), tmp_path)
    summary = summarize_corpus(tmp_path / "out")
    assert sum(count for _, count in summary.lengths) == report.documents_out == 30
    assert sum(summary.tokens.values()) == report.tokens
    expected = max(len(text) for text in texts) + 1
    assert summary.longest == expected
    assert summary.top_words[0] == ("word", sum(range(1, 30)))
    text = "\n".join(corpus_lines(report, summary))
    assert "exact duplicates       1\n" in text
    assert report.sha256 in text
    page = draw_corpus_page(report, summary)
    assert "<script" not in page
    most = max(count for _, count in summary.lengths)
    assert f">{most}</text>" in page, "the counts are shown without a pointer"
    assert "min-width:0" in page, "a few bars do not fill the screen"
    assert "a.jsonl:32" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page

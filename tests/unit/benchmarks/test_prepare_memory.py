"""The benchmark of preparation: its peak memory does not grow with the file."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("tokenizer", "small", "large"), [("byte", 40_000, 1_000_000), ("bpe:300", 40_000, 120_000)]
)
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, tokenizer, small, large):
    """A text of 1.2 MB and one of 30 MB as bytes; BPE took about 130 bytes per byte of a file."""
    pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from prepare_memory import measure

    peaks = []
    for lines in (small, large):
        file = tmp_path / f"{lines}.txt"
        file.write_text("".join(f"line {n} of one text, again\n" for n in range(lines)))
        found = measure(file, tokenizer)
        assert found["tokens"] > lines
        peaks.append(found["peak_rss_mb"])
    assert peaks[1] - peaks[0] < 40

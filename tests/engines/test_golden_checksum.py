"""One golden checksum: every engine, at parallelism 1 and 3, writes the bytes of the reference."""

from __future__ import annotations

from contextlib import closing

import pytest

from golden_corpus import CORPUS, SHA256, SPLIT_BYTES
from meshwright.data.corpus_spec import parse_corpus_spec
from meshwright.data.engines.choose import ENGINES, build_engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
TEXTS = ["text", "a.jsonl", "b.jsonl.gz"]


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "reference"])
def test_every_engine_writes_the_same_bytes(needs, corpus, tmp_path, name, parallelism):
    needs(name)
    from meshwright.data.pipeline.run import prepare_on_engine
    from meshwright.data.pipeline.wordcount import count_words

    spec = parse_corpus_spec({**CORPUS, "out": str(tmp_path / "out")})
    with closing(build_engine(name, parallelism)) as engine:
        report = prepare_on_engine(spec, corpus, engine, split_bytes=SPLIT_BYTES)
        counted = count_words(TEXTS, corpus, engine, split_bytes=SPLIT_BYTES)
    assert (report.engine, report.sha256) == (name, SHA256)
    reference = count_words(TEXTS, corpus, None, split_bytes=SPLIT_BYTES)
    assert (counted.distinct, counted.total, counted.top) == (
        reference.distinct,
        reference.total,
        reference.top,
    )

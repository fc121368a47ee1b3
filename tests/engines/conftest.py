"""Tests with real engines. An engine without its extra, or without Java 17, is skipped with the reason."""

from __future__ import annotations

import pytest

from golden_corpus import write_corpus
from meshwright.core.errors import UserError
from meshwright.data.engines.choose import check_engine


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The golden corpus."""
    folder = tmp_path_factory.mktemp("golden")
    write_corpus(folder)
    return folder


@pytest.fixture
def needs():
    """Skips the test where an engine cannot be used, with the reason."""

    def check(engine: str) -> None:
        try:
            check_engine(engine, None, None)
        except UserError as error:
            pytest.skip(str(error))

    return check

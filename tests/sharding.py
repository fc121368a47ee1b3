"""Pytest options to run the long tests in parts: ``--shard K/N`` and ``--resume-file FILE``.

``--shard 3/8`` runs the third of eight parts. A hash of its id assigns each test to one part.
``--resume-file`` skips the tests that have passed before with the same sources, and records those that pass.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shards")
    group.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of the tests")
    group.addoption("--resume-file", type=Path, help="skip what this file lists as passed; add what passes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--resume-file") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedTests(config.getoption("--resume-file").resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = read_shard(config.getoption("--shard"))
    passed = read_passed(config.getoption("--resume-file"))
    kept = [item for item in items if shard_of(item.nodeid, count) == number and item.nodeid not in passed]
    running = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in running])
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """No test left to run is a success."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--resume-file"):
        session.exitstatus = pytest.ExitCode.OK


def read_shard(text: str) -> tuple[int, int]:
    """``3/8`` as (3, 8)."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise pytest.UsageError(f"--shard {text}: two numbers K/N with 1 <= K <= N, for example 3/8")
    return int(first), int(second)


def shard_of(nodeid: str, count: int) -> int:
    """The part of a test, from 1."""
    return int.from_bytes(hashlib.blake2b(nodeid.encode(), digest_size=4).digest()) % count + 1


def fingerprint() -> str:
    """Hash of all sources: after a change, every test runs again."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def read_passed(file: Path | None) -> set[str]:
    """Ids of the tests that have passed with these sources."""
    if file is None or not file.exists():
        return set()
    sources, *passed = file.read_text(encoding="utf-8").splitlines()
    return set(passed) if sources == fingerprint() else set()


class PassedTests:
    """Records each test as soon as it passes, so that an interrupted run can continue."""

    def __init__(self, file: Path) -> None:
        self._file = file
        if not read_passed(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fingerprint() + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for every phase of every test; skipped tests count as passed."""
        if (report.when == "call" and report.passed) or report.skipped:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(report.nodeid + "\n")

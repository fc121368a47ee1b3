"""The options of ``make test-all``: shards partition the tests, and a resumed run repeats no passed test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sharding import read_shard, shard_of

THREE = """
import pytest

@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

@pytest.mark.parametrize("number", range(12))
def test_number(number):
    assert number != {failing}
"""


@pytest.fixture
def run_tests(tmp_path: Path):
    """Run pytest on twelve small tests with the plugin; returns its last line.

    Its exit status must be 1 if a test fails, otherwise 0.
    """

    def run(*options: str, failing: int = -1) -> str:
        (tmp_path / "test_numbers.py").write_text(THREE.format(failing=failing))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "sharding", "-p", "no:cacheprovider", *options]
        done = subprocess.run(
            [*command, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        assert done.returncode == (failing >= 0), done.stdout
        return done.stdout.splitlines()[-1]

    return run


def test_every_test_is_in_exactly_one_shard(run_tests):
    passed = [int(run_tests("--shard", f"{k}/3").split()[0]) for k in (1, 2, 3)]
    assert sum(passed) == 12
    assert {shard_of(f"test_{n}", 8) for n in range(200)} == set(range(1, 9))


def test_resumed_run_skips_passed_tests_and_repeats_failed_ones(run_tests, tmp_path):
    resume = ("--resume-file", str(tmp_path / "passed"))
    assert run_tests(*resume, failing=5).startswith("1 failed, 11 passed")
    assert run_tests(*resume).startswith("1 passed, 11 deselected")
    assert run_tests(*resume).startswith("12 deselected")


def test_a_relative_resume_file_is_that_of_the_folder_where_pytest_started(run_tests, tmp_path):
    """The tests change the folder."""
    assert run_tests("--resume-file", ".cache/passed").startswith("12 passed")
    assert len((tmp_path / ".cache" / "passed").read_text().splitlines()) == 1 + 12


def test_results_of_other_sources_are_ignored(run_tests, tmp_path):
    (tmp_path / "passed").write_text("other sources\ntest_numbers.py::test_number[0]\n")
    assert run_tests("--resume-file", str(tmp_path / "passed")).startswith("12 passed")


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", ""])
def test_invalid_shard_is_refused(text):
    with pytest.raises(pytest.UsageError, match="3/8"):
        read_shard(text)

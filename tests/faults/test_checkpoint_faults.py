"""Kills, truncation, flipped bits, mixed files, full disks and failing calls: fault tests 10 to 15.

The code is that of ``meshwright faults``. Writers are real processes that save small tensors with the code of
the ranks, without training. Each test prints its seed; ``CHECKPOINT_FAULTS_SEED`` replays one.
"""

from __future__ import annotations

import shutil

import pytest

from meshwright.runs.faults.checks import broken_files, killed_saves
from meshwright.runs.faults.checks.failing_disk import (
    IO_ERROR,
    NO_SPACE,
    check_failing_call,
    check_full_pages,
)

KILLS = [pytest.param(50, marks=pytest.mark.slow), 5]


@pytest.mark.parametrize("kills", KILLS)
def test_10_sigkill_during_a_save_keeps_a_whole_checkpoint(check, kills):
    killed_saves.check_new_steps(check, kills)


@pytest.mark.parametrize("kills", KILLS)
def test_11_sigkill_while_a_step_is_saved_again_keeps_the_old_or_the_new_one(check, kills):
    killed_saves.check_same_step(check, kills)


def test_12_a_truncated_shard_is_named_and_the_previous_checkpoint_is_used(check):
    broken_files.check_truncation(check)


def test_13_every_flipped_bit_is_found(check):
    broken_files.check_flipped_bits(check)


def test_14_mixed_files_are_refused(check):
    broken_files.check_mixed_files(check)


def test_15_a_disk_that_is_full_at_any_page_costs_the_new_checkpoint_only(check, small_disk):
    check_full_pages(check, small_disk("6m"))


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        pytest.param("write", "ENOSPC", NO_SPACE, marks=pytest.mark.slow),
        pytest.param("write", "EIO", IO_ERROR, marks=pytest.mark.slow),
        pytest.param("fsync", "EIO", IO_ERROR),
        pytest.param("rename", "EIO", IO_ERROR),
    ],
)
@pytest.mark.parametrize("ever_after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_15_a_call_that_fails_costs_the_new_checkpoint_only(check, call, error, says, ever_after):
    """Each call in turn fails, alone or with all that follow (a broken disk): see docs/checkpoints.md."""
    check_failing_call(check, check.folder / "root", call, error, says, ever_after)

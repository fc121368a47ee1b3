"""Checkpoints that were made to harm, and the commands that read them: fault test 16.

The attacks are those of ``meshwright faults``. ``tests/unit/checkpoint/test_checkpoint_hostile_files.py`` has
more variants, without commands.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.runs.faults.checks.forked_commands import ForkedCommands
from meshwright.runs.faults.checks.malicious import (
    ATTACKS,
    COMMANDS,
    MEMORY_SLACK_MB,
    PICKLE,
    RAN,
    measure_memory,
    refuse_attack,
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_16_a_malicious_checkpoint_is_refused_with_a_reason(checkpoint, tmp_path, run, attack):
    """Each command that would use the harmful part ends with status 2 (``verify``: 3); none crashes."""
    refuse_attack(tmp_path, checkpoint, attack, run)


def test_16_the_pickle_of_the_attacks_runs_code(tmp_path, monkeypatch):
    """Otherwise the attacks prove nothing."""
    import pickle

    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLE)
    assert Path(RAN).is_dir()


def test_16_files_that_no_command_reads_do_no_harm(checkpoint, run):
    """Pickles under the names that other programs load."""
    for name in (".metadata", "pytorch_model.bin", "optimizer.pt", "rank-00009.safetensors"):
        (checkpoint / name).write_bytes(PICKLE)
    assert [run(*COMMANDS[name])[0] for name in ("verify", "generate", "export")] == [0, 0, 0]
    assert not Path(RAN).exists()
    assert not list(Path("exported").glob("*.bin"))


@pytest.mark.slow
def test_16_memory_is_at_most_that_of_a_good_checkpoint_and_twice_the_files(checkpoint, tmp_path):
    """Of each command, in a process of its own, against the same command with the good checkpoint."""
    shutil.copytree(checkpoint, tmp_path / "good")
    with ForkedCommands.started(checkpoint.parents[1]) as commands:
        assert measure_memory(tmp_path / "good", checkpoint, commands) <= MEMORY_SLACK_MB * 1e6

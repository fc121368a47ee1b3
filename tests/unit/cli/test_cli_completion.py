"""Shell completion, as bash calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.cli.completion import complete_key, complete_model


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """``complete("plan", "llama3-")``: what bash offers for the last word."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "llama3-job.toml").touch()
    program = folder / "bin" / "meshwright"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    program.chmod(0o755)

    def ask(*words: str) -> list[str]:
        listed = " ".join(f"'{word}'" for word in ("meshwright", *words))
        script = f"""
            PATH={program.parent}:$PATH
            source <(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 meshwright --show-completion bash)
            function=$(complete -p meshwright | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            COMP_WORDS=({listed}) COMP_CWORD={len(words)}
            $function meshwright
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    return ask


def test_bash_completes_commands_presets_clusters_and_keys(complete):
    assert complete("pl") == ["plan"]
    assert complete("plan", "llama3-") == ["llama3-405b", "llama3-70b", "llama3-8b", "llama3-job.toml"]
    assert complete("plan", "tiny", "--on", "2x8xh100-s") == ["2x8xh100-sxm"]
    assert complete("train", "job.toml", "train.global") == [
        "train.global_batch=",
        "train.global_batch=VALUE",
    ]
    assert complete("train", "job.toml", "layout.context") == [
        "layout.context=ring",
        "layout.context=ulysses",
    ]
    assert set(complete("train", "job.toml", "compression.")) >= {"compression.kind=none"}


def test_absolute_paths_and_choices_of_optional_keys_are_completed(tmp_path):
    (tmp_path / "job[1].toml").touch()
    assert complete_model(f"{tmp_path}/job[") == [str(tmp_path / "job[1].toml")]
    assert complete_key("train.block_backend=t") == ["train.block_backend=triton"]

"""Generates text from a checkpoint, in this process or on tensor-parallel ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.core.errors import Problem, RunFailedError, UserError
from meshwright.core.events import Event
from meshwright.core.object_path import AnyPath
from meshwright.core.packages import require_packages
from meshwright.elastic.rank_starter import LOGS
from meshwright.launch.environment import prepare_environment
from meshwright.runs.checkpoints import find_checkpoint, require_folder
from meshwright.runs.ranks import build_launch, require_devices
from meshwright.spec.cluster import count_cores
from meshwright.spec.hf_config_reader import CONFIG_FILE
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from meshwright.train.generate import GenerateTask


def find_model(path: AnyPath) -> Path:
    """A Hugging Face folder as it is; else the checkpoint that the path means."""
    path = require_folder(path)
    return path if (path / CONFIG_FILE).is_file() else require_folder(find_checkpoint(path))


def generate_from(
    model: Path, settings: Mapping[str, Any], chat: bool, on_token: Callable[[int], None]
) -> str:
    """Generate text.

    Args:
        model: A checkpoint or a Hugging Face folder.
        settings: Fields of ``GenerateTask``.
        chat: Whether the prompt is a user message in the model's chat template, unless the settings name one.
        on_token: Called with the number of tokens generated so far.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="generating text")
    prepare_environment(threads=count_cores() if settings["tp"] == 1 else 1)
    from meshwright.train.generate import GenerateTask, generate_text  # noqa: PLC0415  (torch)

    if (model / MANIFEST).is_file():
        read_manifest(model)  # verifies it
    if chat and settings["template"] is None:
        settings = {**settings, "template": _trained_template(model)}
    task = GenerateTask(checkpoint=str(model), **settings)
    job = task.check()
    return generate_text(task, on_token=on_token) if task.tp == 1 else _generate_on_ranks(task, job, on_token)


def _trained_template(model: Path) -> str:
    """The model's own chat template."""
    from meshwright.train.saved_model import saved_template  # noqa: PLC0415  (torch)

    found = saved_template(model)
    if found is None:
        rule, fix = "has no chat template", "Give the one that it was trained with: --template chatml"
        raise UserError(Problem("generate-no-template", rule, path=str(model), fix=fix))
    return found


def _generate_on_ranks(task: GenerateTask, job: Job, on_token: Callable[[int], None]) -> str:
    """Generate on tensor-parallel ranks of this machine."""
    from meshwright.train.generate import ENTRY  # noqa: PLC0415

    require_devices(job, task.tp)
    texts: list[str] = []

    def listen(event: Event) -> None:
        if event["event"] == "generated":
            on_token(event["tokens"])
        elif event["event"] == "text":
            texts.append(event["text"])

    with tempfile.TemporaryDirectory(prefix="meshwright-generate-") as folder:
        task.write(Path(folder))
        try:
            build_launch(ENTRY, job, Path(folder), listen).run()
        except RunFailedError as error:  # its advice is for training, and its log goes with the folder
            logs = [path.read_text(errors="replace") for path in sorted(Path(folder, LOGS).glob("*.log"))]
            last = next((text.strip().splitlines()[-1] for text in logs if text.strip()), "no output")
            rule, fix = f"a rank died: {last}", "Use more ranks (--tp) if memory ran out, or --tp 1"
            raise RunFailedError(
                Problem("generate-rank-died", rule, path=task.checkpoint, fix=fix)
            ) from error
    if not texts:
        raise KeyboardInterrupt
    return texts[0]

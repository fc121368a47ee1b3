"""``meshwright generate``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, TaskID

from meshwright.checkpoint.manifest import MANIFEST, find_newest, read_manifest
from meshwright.cli.app import require_packages
from meshwright.cli.output import Output
from meshwright.cli.ranks import build_launch, require_devices
from meshwright.core.errors import Problem, RunFailedError, UserError
from meshwright.core.events import Event
from meshwright.launch.environment import prepare_environment
from meshwright.launch.local import LOGS
from meshwright.spec.cluster import count_cores
from meshwright.spec.hf_config_reader import CONFIG_FILE
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from meshwright.train.generate import GenerateTask


def write_text(output: Output, path: Path, settings: dict[str, Any]) -> int:
    """Generate from a checkpoint, the newest of a folder or a run, or from a Hugging Face folder."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="generating text")
    checkpoint = path if (path / CONFIG_FILE).is_file() else find_checkpoint(path)
    prepare_environment(threads=count_cores() if settings["tp"] == 1 else 1)
    from meshwright.train.generate import GenerateTask, generate_text  # noqa: PLC0415

    if (checkpoint / MANIFEST).is_file():
        read_manifest(checkpoint)  # verifies it
    task = GenerateTask(checkpoint=str(checkpoint), **settings)
    with Progress(console=output.errors, transient=True, disable=not output.errors.is_terminal) as bar:
        on_token = partial(_advance, bar, bar.add_task("writing", total=task.tokens))
        job = task.check()
        text = (
            generate_text(task, on_token=on_token)
            if task.tp == 1
            else _generate_on_ranks(task, job, on_token)
        )
    shown = f"{task.prompt}{text}" if task.template is None else text
    if not output.as_json and sys.stdout.isatty():  # an untrained model writes control characters too
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    if not output.as_json:  # the object holds it
        output.print(shown)
    output.result({"checkpoint": str(checkpoint), "text": text, **settings})
    return 0


def _generate_on_ranks(task: GenerateTask, job: Job, on_token: Callable[[int], None]) -> str:
    """Let ranks on this machine write it together."""
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
            said = next((text.strip().splitlines()[-1] for text in logs if text.strip()), "it said nothing")
            rule, fix = f"a rank died: {said}", "Use more ranks (--tp) if memory ran out, or --tp 1"
            raise RunFailedError(
                Problem("generate-rank-died", rule, path=task.checkpoint, fix=fix)
            ) from error
    if not texts:
        raise KeyboardInterrupt
    return texts[0]


def _advance(bar: Progress, task: TaskID, written: int) -> None:
    bar.update(task, completed=written)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means."""
    if (path / MANIFEST).is_file():
        return path
    for root in (path, path / "checkpoints"):
        found = find_newest(root)
        if found is not None:
            return found[0]
    fix = "Give a checkpoint, a folder of checkpoints, or the folder of a run"
    raise UserError(Problem("checkpoint-missing", "holds no checkpoint", path=str(path), fix=fix))

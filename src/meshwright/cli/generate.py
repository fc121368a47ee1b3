"""``meshwright generate``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from meshwright.cli.app import require_packages
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.launch.environment import prepare_environment
from meshwright.prepare.templates import load_template
from meshwright.prepare.tokenizer import TOKENIZER_FILE
from meshwright.spec.cluster import count_cores
from meshwright.spec.hf_reader import CONFIG_FILE
from meshwright.survive.checkpoint.manifest import MANIFEST, find_newest


def write_text(
    output: Output, path: Path, prompt: str, template: str | None, settings: dict[str, Any]
) -> int:
    """Generate from a checkpoint, the newest of a folder or a run, or from a Hugging Face folder."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="generating text")
    checkpoint = path if (path / CONFIG_FILE).is_file() else find_checkpoint(path)
    tokenizer = str(checkpoint.absolute() / TOKENIZER_FILE)
    chat = None if template is None else load_template(template, Path.cwd(), tokenizer, key="--template")
    prepare_environment(threads=count_cores())
    from meshwright.run.generate import generate_text  # noqa: PLC0415

    with Progress(console=output.errors, transient=True, disable=not output.errors.is_terminal) as bar:
        task = bar.add_task("writing", total=settings["tokens"])
        heard = partial(_advance, bar, task)
        text = generate_text(checkpoint, prompt, template=chat, heard=heard, **settings)
    shown = f"{prompt}{text}" if chat is None else text
    if not output.as_json and sys.stdout.isatty():  # an untrained model writes control characters too
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    if not output.as_json:  # the object holds it
        output.say(shown)
    output.result(
        {"checkpoint": str(checkpoint), "prompt": prompt, "template": template, "text": text, **settings}
    )
    return 0


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

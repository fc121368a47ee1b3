"""``meshwright generate``."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from rich.progress import Progress, TaskID

from meshwright.cli.output import Output
from meshwright.saved import find_model, generate


def write_text(output: Output, path: str, settings: dict[str, Any]) -> int:
    """Generate text and print it.

    Args:
        output: Where to print.
        path: A checkpoint, a folder of checkpoints, a run, or a Hugging Face folder.
        settings: Keyword arguments of ``generate``.
    """
    model = find_model(path)
    with Progress(console=output.errors, transient=True, disable=not output.errors.is_terminal) as bar:
        advance = partial(_advance, bar, bar.add_task("generating", total=settings["tokens"]))
        text = generate(model, **settings, on_token=advance)
    is_chat = settings.get("chat") or settings["template"] is not None
    shown = text if is_chat else f"{settings['prompt']}{text}"
    if not output.as_json and sys.stdout.isatty():  # an untrained model generates control characters
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    if not output.as_json:  # the object holds it
        output.print(shown)
    output.result({"checkpoint": str(model), "text": text, **settings})
    return 0


def _advance(bar: Progress, task: TaskID, tokens: int) -> None:
    bar.update(task, completed=tokens)

"""``meshwright init``: writes a commented job file, by flags or by a few questions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.output import Output
from meshwright.core.units import format_plural
from meshwright.job_files import DEVICES, MODEL, require_new_job, write_job

if TYPE_CHECKING:
    from meshwright.spec.job import Job


@dataclass(frozen=True)
class InitRequest:
    """The arguments of the command; None for those that were left out."""

    model: str | None
    data: str | None
    gpus: str | None
    text_field: str | None
    out: Path
    force: bool


def init_job(output: Output, request: InitRequest) -> int:
    """Write the file and check that it loads."""
    out = request.out
    require_new_job(out, request.force)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not output.as_json
    model = request.model or _ask(asks, "Model (a preset, or a Hugging Face folder)", MODEL)
    data = request.data or _ask(asks, "Data (a file, folder or glob; empty for built-in data)", "")
    devices = request.gpus or _ask(asks, "Devices (local, a number, or such as 8x8xh100-sxm)", DEVICES)
    written = write_job(
        out,
        model=model,
        data=data,
        devices=devices,
        text_field=request.text_field,
        choose_field=_ask_field if asks else None,
        overwrite=request.force,
    )
    spec = written.spec
    output.print(f"wrote {out}: {model} on {_describe_devices(spec)}")
    if written.text_field:
        output.print(f"  the text is in the field {written.text_field!r} (data.text_field)")
    output.print(f"  meshwright plan {out}")
    output.print(f"  meshwright train {out}")
    if written.note:
        output.warn(written.note)
    output.result({"path": str(out), "model": model, "data": spec.data.path, "devices": devices})
    return 0


def _describe_devices(job: Job) -> str:
    cluster = job.cluster
    if cluster.device == "cpu":
        return f"{format_plural(cluster.world_size, 'CPU process', 'es')}"
    return f"{cluster.world_size} x {cluster.device_name}"


def _ask_field(names: Sequence[str]) -> str:
    return _ask(True, f"Field with the text ({', '.join(names)})", names[0])


def _ask(asks: bool, question: str, default: str) -> str:
    """The answer on a terminal, else the default."""
    if not asks:
        return default
    return str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()

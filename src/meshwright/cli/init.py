"""``meshwright init``: writes a commented job file, by flags or by a few questions."""

from __future__ import annotations

import glob
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from meshwright.api import load_job
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural
from meshwright.runs.data_fields import find_fields
from meshwright.spec.cluster import count_cores, find_gpus
from meshwright.spec.job import Job
from meshwright.spec.job_template import DataFields, write_job_text
from meshwright.spec.load import other_format_problem
from meshwright.spec.paths import BUILTIN

MODEL, DEVICES = "demo-2m", "local"


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
    if problem := other_format_problem(out):
        raise UserError(problem)
    if out.exists() and not request.force:
        fix = "Choose another file with -o, or overwrite it with --force"
        raise UserError(Problem("init-exists", "already exists", path=str(out), fix=fix))
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not output.as_json
    model = request.model or _ask(asks, "Model (a preset, or a Hugging Face folder)", MODEL)
    data = request.data or _ask(asks, "Data (a file, folder or glob; empty for built-in data)", "")
    devices = request.gpus or _ask(asks, "Devices (local, a number, or such as 8x8xh100-sxm)", DEVICES)
    _require_data(data)
    fields = _choose_fields(data, Path(model), request.text_field, asks)
    text = write_job_text(model, data or None, devices, out, fields)
    draft = out.with_name(f".{out.stem}.{os.getpid()}.toml")
    try:
        draft.write_text(text, encoding="utf-8")
        job = load_job(draft)
        draft.replace(out)
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Choose another file"
        raise UserError(Problem("init-not-writable", rule, path=str(out), fix=fix)) from None
    finally:
        with suppress(OSError):
            draft.unlink()
    spec = job.spec
    output.print(f"wrote {out}: {model} on {_describe_devices(spec)}")
    if fields.text_field:
        output.print(f"  the text is in the field {fields.text_field!r} (data.text_field)")
    output.print(f"  meshwright plan {out}")
    output.print(f"  meshwright train {out}")
    if note := _explain_devices(spec):
        output.warn(note)
    output.result({"path": str(out), "model": model, "data": spec.data.path, "devices": devices})
    return 0


def _describe_devices(job: Job) -> str:
    cluster = job.cluster
    if cluster.device == "cpu":
        return f"{format_plural(cluster.world_size, 'CPU process', 'es')}"
    return f"{cluster.world_size} x {cluster.device_name}"


def _explain_devices(job: Job) -> str:
    """A note for a machine with fewer devices than the job; empty if it has enough."""
    cluster = job.cluster
    named, wanted = "name their type, such as --gpus 8xh100-sxm", cluster.devices_per_node
    if cluster.preset != "local":
        return ""
    if cluster.device == "cpu" and wanted > (cores := count_cores()):
        here = f"this machine has no GPU: {wanted} processes share {format_plural(cores, 'CPU core')}"
        return f"{here}. To plan for GPUs that are elsewhere, {named}"
    if cluster.device == "cuda" and wanted > (gpus := len(find_gpus())):
        here = f"this machine has {format_plural(gpus, 'GPU')}: train needs one with {wanted}"
        return f"{here}. To plan for GPUs that are elsewhere, {named}"
    return ""


def _choose_fields(data: str, model: Path, text_field: str | None, asks: bool) -> DataFields:
    """How the records of the data are read; on a terminal it asks for the field if none is obvious.

    Raises:
        UserError: No field is obviously the text, and none is named.
    """
    if text_field is not None:
        return DataFields(text_field=text_field)
    found = find_fields(data, model)
    if found.chosen is not None:
        return found.chosen
    names = ", ".join(found.names)
    if asks:
        return DataFields(text_field=_ask(asks, f"Field with the text ({names})", found.names[0]))
    rule, fix = f"has the fields {names}, and none is obviously the text", "Name one with --text-field"
    raise UserError(Problem("init-text-field", rule, path="data", value=data, fix=fix, is_argument=True))


def _ask(asks: bool, question: str, default: str) -> str:
    """The answer on a terminal, else the default."""
    if not asks:
        return default
    return str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()


def _require_data(data: str) -> None:
    """Refuse a path or a glob without a match; a file's name may look like a glob."""
    path = os.path.expanduser(data)  # noqa: PTH111  (Path.expanduser raises for an unknown user)
    matches = Path(path).exists() or glob.glob(path, recursive=True)  # noqa: PTH207  (takes absolute patterns)
    if not data or data.startswith(BUILTIN) or matches:
        return
    rule, fix = "does not exist", "Check the path, or leave it out for built-in data"
    raise UserError(Problem("init-data", rule, path="data", value=data, fix=fix, is_argument=True))

"""Job files in the public API: writes a commented one, its JSON Schema, and the nearest legal layouts."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import MeshwrightError, Problem, UserError
from meshwright.core.units import format_plural

if TYPE_CHECKING:
    from meshwright.plan.search.alternatives import NearestLegal
    from meshwright.spec.job import Job
    from meshwright.spec.job_template import DataFields

MODEL, DEVICES = "demo-2m", "local"
"""Model and devices of a job file that names none."""


@dataclass(frozen=True)
class WrittenJob:
    """A job file that was written and loads. Made by :func:`write_job`."""

    path: Path
    spec: Job
    """The job, loaded from the file."""
    text_field: str | None
    """Field of the records that has the text; None if the data have no records."""
    note: str
    """A note for a machine with fewer devices than the job; empty if it has enough."""


def write_job(
    path: str | Path = "job.toml",
    *,
    model: str = MODEL,
    data: str = "",
    devices: str = DEVICES,
    text_field: str | None = None,
    choose_field: Callable[[Sequence[str]], str] | None = None,
    overwrite: bool = False,
) -> WrittenJob:
    """Write a commented job file, and check that it loads.

    Args:
        path: Path of the file; it must end in ``.toml``.
        model: A preset, or a Hugging Face folder.
        data: A file, folder or glob; empty for built-in data.
        devices: ``local``, a number, or a cluster such as ``8x8xh100-sxm``.
        text_field: Field of the records that has the text; found in the first records if left out.
        choose_field: Called with the names of the fields if none is obviously the text.
        overwrite: Whether to overwrite a file.

    Raises:
        UserError: The file exists, an argument is wrong, or no field is obviously the text. Nothing was
            written.
    """
    from meshwright.runs.loaded_job import LoadedJob  # noqa: PLC0415
    from meshwright.spec.job_template import write_job_text  # noqa: PLC0415

    out = Path(path)
    require_new_job(out, overwrite)
    _require_data(data)
    fields = _choose_fields(data, Path(model), text_field, choose_field)
    text = write_job_text(model, data or None, devices, out, fields)
    draft = out.with_name(f".{out.stem}.{os.getpid()}.toml")
    try:
        draft.write_text(text, encoding="utf-8")
        LoadedJob.load(str(draft), (), None, to_run=False)
        draft.replace(out)
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Choose another file"
        raise UserError(Problem("init-not-writable", rule, path=str(out), fix=fix)) from None
    finally:
        with suppress(OSError):
            draft.unlink()
    spec = LoadedJob.load(str(out), (), None, to_run=False).spec  # with its name
    return WrittenJob(out, spec, fields.text_field, _explain_devices(spec))


def require_new_job(path: Path, overwrite: bool) -> None:
    """Refuse a file that cannot become a job file.

    Raises:
        UserError: It exists and must not be overwritten, or it is not a TOML file.
    """
    from meshwright.spec.load import other_format_problem  # noqa: PLC0415

    if problem := other_format_problem(path):
        raise UserError(problem)
    if path.exists() and not overwrite:
        fix = "Choose another file with -o, or overwrite it with --force"
        raise UserError(Problem("init-exists", "already exists", path=str(path), fix=fix))


def _require_data(data: str) -> None:
    """Refuse a path or a glob without a match; a file's name may look like a glob."""
    from meshwright.spec.paths import BUILTIN  # noqa: PLC0415

    path = os.path.expanduser(data)  # noqa: PTH111  (Path.expanduser raises for an unknown user)
    matches = Path(path).exists() or glob.glob(path, recursive=True)  # noqa: PTH207  (takes absolute patterns)
    if not data or data.startswith(BUILTIN) or matches:
        return
    rule, fix = "does not exist", "Check the path, or leave it out for built-in data"
    raise UserError(Problem("init-data", rule, path="data", value=data, fix=fix, is_argument=True))


def _choose_fields(
    data: str, model: Path, text_field: str | None, choose_field: Callable[[Sequence[str]], str] | None
) -> DataFields:
    """How the records of the data are read.

    Raises:
        UserError: No field is obviously the text, and none is named.
    """
    from meshwright.runs.data_fields import find_fields  # noqa: PLC0415
    from meshwright.spec.job_template import DataFields  # noqa: PLC0415

    if text_field is not None:
        return DataFields(text_field=text_field)
    found = find_fields(data, model)
    if found.chosen is not None:
        return found.chosen
    if choose_field is not None:
        return DataFields(text_field=choose_field(found.names))
    rule = f"has the fields {', '.join(found.names)}, and none is obviously the text"
    fix = "Name one with --text-field"
    raise UserError(Problem("init-text-field", rule, path="data", value=data, fix=fix, is_argument=True))


def _explain_devices(job: Job) -> str:
    """A note for a machine with fewer devices than the job; empty if it has enough."""
    from meshwright.spec.cluster import count_cores, find_gpus  # noqa: PLC0415

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


def job_schema() -> dict[str, Any]:
    """The JSON Schema of job files, for editors: the object of ``meshwright schema``."""
    from meshwright.spec.json_schema import job_schema as build  # noqa: PLC0415

    return build()


def find_nearest_legal(error: MeshwrightError) -> list[NearestLegal]:
    """The nearest legal layouts, each with its predicted step time and memory.

    Args:
        error: From :func:`load_job`. If it is not about the layout, the list is empty.
    """
    from meshwright.spec.load import SpecError  # noqa: PLC0415

    if not isinstance(error, SpecError) or error.job is None:
        return []
    from meshwright.plan.search.alternatives import find_nearest_legal as find  # noqa: PLC0415

    return find(error.job, error.problems)

"""Published measured runs: reads a CSV row as a workload and a layout, and records defaults of blank cells.

Other modules of this package read device, model, software and layout; this one combines them. Besides the
columns, the notes of a row name recipes, overlap and sharding.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import compiled_profile
from meshwright.spec.layout import Layout
from meshwright.validation.cells import OUT_OF_MEMORY, Cells, NotExpressedError, find_stated
from meshwright.validation.devices import build_cluster
from meshwright.validation.frameworks import (
    read_compiled,
    read_precision,
    read_profile,
    read_recipe,
    with_available_attention,
)
from meshwright.validation.layouts import (
    build_layout,
    choose_micro_batch,
    count_devices,
    read_global_batch,
)
from meshwright.validation.models import build_model
from meshwright.validation.sources import source_of

REQUIRED_COLUMNS = ("model_name", "layers", "hidden", "seq_len", "gpu")
"""Columns that a table must have; one that it lacks otherwise counts as blank in every row."""
ADAPTERS = re.compile(r"\bq?lora\b|\bdora\b|\bpeft\b|\badapters\b", re.IGNORECASE)
"""Training of adapters on frozen weights: refused, never predicted as full training."""
_DOCUMENTS = re.compile(r"\bvar(iable)?[ -]?len(gth)?\b|document mask|block-diagonal")
"""Notes of attention that stays within packed documents."""
LONG_FOR_DOCUMENTS = 3
"""Sequence length over width from which attention over the whole sequence is a quarter of the linear layers:
per token and layer, causal attention is 2·s·h operations, and linear layers are about 24·h²."""
COUNTED_CONFIDENCE = "found"
"""Confidence of rows that count in the figures."""


@dataclass(frozen=True)
class Case:
    """One published run that can be predicted."""

    id: str
    workload: Workload
    layout: Layout
    step_s: float | None
    memory_bytes: float | None
    confidence: str
    filled: tuple[str, ...]
    """Defaults of blank cells, and how notes were read."""
    model_name: str = ""
    source: str = ""
    """The repository or paper that published it."""
    memory_kind: str = "reserved"
    """What the published memory is: `allocated` (live tensors), `reserved` (by the allocator), `device` (with
    the context, as in nvidia-smi), or `formula` (calculated, not measured)."""

    @property
    def family(self) -> str:
        """The row's id without its trailing number."""
        return family_of(self.id)

    @property
    def is_counted(self) -> bool:
        """Whether the row counts in the figures."""
        return self.confidence == COUNTED_CONFIDENCE


@dataclass(frozen=True)
class Row:
    """A row as read: a case, or the reason why there is none."""

    id: str
    case: Case | None
    reason: str
    step_s: float | None
    memory_bytes: float | None
    confidence: str = ""
    source: str = ""
    """The repository or paper that published it."""

    @property
    def family(self) -> str:
        """The row's id without its trailing number."""
        return family_of(self.id)


def family_of(row_id: str) -> str:
    """A row's id without its trailing number."""
    return re.sub(r"[-_ ]?\d+$", "", row_id) or row_id


def read_rows(path: Path) -> list[Row]:
    """Every run of a table; a bad cell excludes its row only. Layouts that ran out of memory are no runs.

    Raises:
        UserError: The file is not a table of runs.
    """
    table = read_table(path, REQUIRED_COLUMNS, "docs/validate.md")
    return [read_row(number, cells) for number, cells in table if not ran_out_of_memory(cells)]


def ran_out_of_memory(cells: Mapping[str, object]) -> bool:
    """Whether a layout ran out of memory: `result`, or the cell of a measurement, is `OOM`."""
    names = ("result", "step_time_s", "tokens_per_s_per_gpu", "memory_gb_per_gpu")
    return any(OUT_OF_MEMORY.match(str(cells.get(name) or "").strip().lower()) for name in names)


def read_table(path: Path, columns: Sequence[str], page: str) -> list[tuple[int, dict[str, str]]]:
    """The cells of each row of a table, with its line number.

    Raises:
        UserError: The file cannot be read, or lacks one of the columns that ``page`` lists.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                rule = f"has no column {', '.join(missing)}"
                raise UserError(Problem("validate-columns", rule, path=str(path), fix=f"See {page}"))
            return [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(Problem("validate-unreadable", f"cannot be read: {error}", path=str(path))) from None


def read_row(number: int, raw: Mapping[str, object]) -> Row:
    """One row, with its line number in the file."""
    cells = Cells(number, raw)
    row_id = cells.text("id") or f"line {number}"
    source = source_of(cells.text("source"), family_of(row_id))
    step_s = memory = None
    try:
        step_s, memory_gb = cells.number_of("step_time_s"), cells.number_of("memory_gb_per_gpu")
        memory = None if memory_gb is None else memory_gb * 1e9
        case = _build_case(cells, row_id, step_s, memory)
    except NotExpressedError as reason:
        return Row(row_id, None, str(reason), step_s, memory, cells.text("confidence"), source)
    return Row(row_id, case, "; ".join(case.filled), case.step_s, memory, case.confidence, source)


def _build_case(cells: Cells, row_id: str, step_s: float | None, memory: float | None) -> Case:
    names = f"{cells.text('model_name')} {cells.note} {cells.text('framework')}"
    if found := find_stated(ADAPTERS, names):
        raise NotExpressedError(f"{found[0]}: training of adapters is not planned")
    devices = count_devices(cells)
    cluster = build_cluster(cells, devices)
    profile = read_profile(cells)
    layout = build_layout(cells, profile, cluster, devices)
    precision = read_precision(cells)
    seq_len = cells.count("seq_len")
    model = build_model(cells, layout.tp)
    if _DOCUMENTS.search(cells.note):
        if seq_len > LONG_FOR_DOCUMENTS * model.hidden_size:
            raise NotExpressedError("attention within packed documents: their lengths are not published")
        cells.remark("attention within packed documents: predicted over the whole sequence")
    compiled = read_compiled(cells, precision, profile)
    if compiled:
        triton, fp8 = "triton blocks" in cells.note, "weight gradients in fp8" in cells.note
        profile = compiled_profile(profile, triton, model.num_experts is not None, fp8)
    profile = with_available_attention(profile, model, cluster, cells)
    workload = Workload(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch=read_global_batch(cells, layout, seq_len),
        precision=precision,
        profile=profile,
        recipe=read_recipe(cells, precision, profile),
        compiled=compiled,
        residual_bytes=4.0 if "float32 residual" in cells.note else 2.0,
    )
    if layout.micro_batch is None:
        layout = dataclasses.replace(layout, micro_batch=choose_micro_batch(cells, workload, layout))
    if step_s is None:
        step_s = _step_of_rate(cells, workload, devices)
    return Case(
        id=row_id,
        workload=workload,
        layout=layout,
        step_s=step_s,
        memory_bytes=memory,
        confidence=cells.text("confidence") or COUNTED_CONFIDENCE,
        filled=tuple(cells.filled),
        model_name=cells.text("model_name"),
        source=source_of(cells.text("source"), family_of(row_id)),
        memory_kind=_memory_kind(cells),
    )


def _step_of_rate(cells: Cells, workload: Workload, devices: int) -> float | None:
    """A step's time from tokens per second, where only those are published."""
    rate = cells.number_of("tokens_per_s_per_gpu")
    if rate is None:
        return None
    cells.remark("step time from tokens per second")
    return workload.global_batch * workload.seq_len / (rate * devices)


def _memory_kind(cells: Cells) -> str:
    note = cells.note
    if "not allocator peak" in note or "theoretical" in note:
        return "formula"
    if re.search(r"peak allocated|max_?(memory_)?allocated", note):
        return "allocated"
    framework = cells.text("framework").lower()
    if "nvidia-smi" in note or "deepspeed" in framework:
        return "device"
    return "reserved"

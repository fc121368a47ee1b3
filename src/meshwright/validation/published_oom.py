"""Published layouts that ran out of memory, read like the runs of ``published.py``.

The table has a column ``result`` in place of the measurements and names no framework: its source does.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.validation.published import Row, read_row, read_table

COLUMNS = ("source", "model_name", "layers", "hidden", "gpu", "num_gpus", "tp", "pp", "dp", "result")
SOURCES = (
    ("bigscience", "megatron-deepspeed"),
    ("torchtitan", "torchtitan-fsdp2"),
    ("2104.04473", "deepspeed-zero"),
    ("nanotron", "nanotron"),
)
"""Words of a source, and the framework that it reports on. Narayanan et al. ran ZeRO-3 by DeepSpeed."""


def read_oom(path: Path) -> list[Row]:
    """The layouts of a table that ran out of memory, each with an id of its line.

    A micro-batch that is not published is taken as one sample: if that does not fit, nothing does.

    Raises:
        UserError: The file is not such a table.
    """
    rows = read_table(path, COLUMNS, "docs/memory-model.md")
    return [_read(number, cells) for number, cells in rows if cells["result"] == "OOM"]


def _read(number: int, cells: dict[str, str]) -> Row:
    source = cells["source"].lower()
    framework = next((name for word, name in SOURCES if word in source), "")
    micro_batch = cells.get("micro_batch") or "1"
    data = int(cells["dp"] or 1)
    filled = {
        "id": f"oom-{number:03d}",
        "framework": framework,
        "micro_batch": micro_batch,
        "global_batch": cells.get("global_batch") or str(data * int(micro_batch)),
        "recompute": cells.get("recompute") or "none",
    }
    return read_row(number, {**cells, **filled})

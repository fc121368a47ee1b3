"""Rows of a table of published runs: one complete row, with changed cells."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.validation.published import Case, Row, read_row

PLAIN = {
    "id": "made-up-001", "source": "", "model_name": "GPT-3.6B", "params_b": "3.6", "layers": "30",
    "hidden": "3072", "heads": "32", "kv_heads": "32", "ffn_hidden": "12288", "vocab": "51200",
    "seq_len": "2048", "gpu": "H100-80GB-SXM", "num_gpus": "64", "tp": "2", "pp": "1", "dp": "32", "cp": "1",
    "ep": "1", "interleave": "1", "zero_stage": "1", "micro_batch": "4", "global_batch": "512",
    "recompute": "full", "sequence_parallel": "y", "precision": "bf16", "step_time_s": "2.5",
    "memory_gb_per_gpu": "", "confidence": "found", "note": "", "framework": "megatron",
}  # fmt: skip


@pytest.fixture
def read() -> Callable[..., Row]:
    """``read(tp="4")`` reads the complete row with this cell as line 7."""

    def make(**cells: str) -> Row:
        return read_row(7, {**PLAIN, **cells})

    return make


@pytest.fixture
def case(read) -> Callable[..., Case]:
    """``case(tp="4")`` is the case of that row. It fails if the row cannot be expressed."""

    def make(**cells: str) -> Case:
        row = read(**cells)
        assert row.case is not None, row.reason
        return row.case

    return make


@pytest.fixture
def table(tmp_path) -> Callable[..., Path]:
    """Write a CSV file with one complete row per argument, with the cells of the argument."""

    def make(*rows: dict[str, str]) -> Path:
        path = tmp_path / "runs.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, PLAIN)
            writer.writeheader()
            writer.writerows({**PLAIN, **cells} for cells in rows)
        return path

    return make

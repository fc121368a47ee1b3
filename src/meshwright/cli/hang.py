"""``meshwright hang``."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import Output
from meshwright.runs.hang import inspect_run


def show_hang(output: Output, run_dir: Path) -> int:
    """Print what a running run waits for."""
    found = inspect_run(run_dir)
    output.print(found.verdict)
    output.result({"run_dir": str(run_dir), "hangs": found.is_hang, **found.as_dict()})
    return 0

"""``meshwright hang``."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import find_hang
from meshwright.cli.output import Output


def show_hang(output: Output, run_dir: Path) -> int:
    """Print what a running run waits for."""
    found = find_hang(run_dir)
    output.print(found.verdict)
    output.result({"run_dir": str(run_dir), "hangs": found.is_hang, **found.as_dict()})
    return 0

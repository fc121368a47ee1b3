"""``meshwright agent``."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import join_run
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import RunFailedError


def run_agent(output: Output, join: str, token_file: Path, run_dir: Path | None, wait_s: float) -> int:
    """Run the ranks of this node; returns the exit status."""
    ok = join_run(join, token_file, run_dir=run_dir, wait_s=wait_s, reporter=ConsoleReporter(output))
    output.print(
        "this node has done its part of the run"
        if ok
        else "the run has ended; the supervisor's command says why"
    )
    output.result({"ok": ok})
    return 0 if ok else RunFailedError.exit_status

"""Trains a job whose ranks make one wrong collective: a command of its own, for ``meshwright faults``.

Prints the problems as JSON. The ranks are those of ``verify.wrong_call``; ``meshwright train`` cannot start
them.
"""

from __future__ import annotations

import sys

from meshwright.core.errors import MeshwrightError
from meshwright.core.events import to_json
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import SILENT
from meshwright.runs.start import start_training

ENTRY = "meshwright.verify.wrong_call:run_rank"


def main(source: str, *overrides: str) -> int:
    """Train; returns the exit status."""
    try:
        start_training(LoadedJob.load(source, overrides, to_run=True), False, SILENT, ENTRY)
    except MeshwrightError as error:
        sys.stdout.write(to_json({"errors": [problem.as_dict() for problem in error.problems]}) + "\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

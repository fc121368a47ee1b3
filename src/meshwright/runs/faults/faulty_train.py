"""The command that trains a job with a fault inside its ranks, for ``meshwright faults``.

Prints losses and problems as JSON. The ranks are those of ``verify``; ``meshwright train`` cannot start them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.events import to_json
from meshwright.elastic.faults.schedule import FAULT_VARIABLE, parse_fault
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import SILENT
from meshwright.runs.start import start_training

ENTRIES = {
    "wrong_collective": "meshwright.verify.wrong_call:run_rank",
    "corrupt_gradient": "meshwright.verify.bad_gradient:run_rank",
}
"""Entry point of the ranks, by the kind of fault."""
SAVE_AGAIN = "--save-again"
"""First argument: resume, and save what was loaded."""
SAVING_ENTRY = "meshwright.verify.save_again:run_rank"


def main(*arguments: str) -> int:
    """Train; returns the exit status."""
    again = arguments[0] == SAVE_AGAIN
    source, overrides = arguments[again], arguments[again + 1 :]
    entry = SAVING_ENTRY if again else ENTRIES[parse_fault(os.environ[FAULT_VARIABLE].splitlines()[0]).kind]
    try:
        run = start_training(LoadedJob.load(source, overrides, to_run=True), again, SILENT, entry)
    except MeshwrightError as error:
        _print({"errors": [problem.as_dict() for problem in error.problems]})
        return error.exit_status
    _print({"losses": run.record.losses, "errors": []})
    return 0


def _print(result: dict[str, Any]) -> None:
    sys.stdout.write(to_json(result) + "\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

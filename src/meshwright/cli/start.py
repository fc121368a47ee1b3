"""Where ``meshwright train`` begins: torch is loaded for the ranks while this process loads the planner.

Reading the job is quick and says what the ranks need; everything else, planning, data, the run's folder, goes
on beside the import of torch, which takes longer than all of it.
"""

from __future__ import annotations

import os

from meshwright.cli.output import Output
from meshwright.cli.ranks import apply_environment, list_preload
from meshwright.core.errors import UserError
from meshwright.launch.local import end_server, start_server
from meshwright.spec.load import load_job


def start_training(output: Output, source: str, overrides: list[str], resume: bool) -> int:
    """Train, with the ranks' server on its way before the job is looked at closely."""
    try:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # else the ranks are there already
            _preload_torch(output, source, overrides)
        from meshwright.cli.train import run_training  # noqa: PLC0415  (the planner: a third of a second)

        return run_training(output, source, overrides, resume)
    except BaseException:
        end_server()  # or whoever reads our output would wait for it
        raise


def _preload_torch(output: Output, source: str, overrides: list[str]) -> None:
    try:
        job = load_job(source, overrides)
    except UserError:
        return  # said by whoever reads the job in earnest
    apply_environment(output, job)
    start_server(list_preload(job))

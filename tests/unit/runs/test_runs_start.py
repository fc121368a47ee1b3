"""The first moments of ``meshwright train``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.runs.ranks import PRELOAD, list_preload
from meshwright.spec.load import load_job

WATCHED = """
import json, os, sys
from meshwright.api import load_job
from meshwright.runs import start
from meshwright.core.errors import UserError
from multiprocessing import forkserver

begun = []
def watch(preload):
    planner = [name for name in sys.modules if name.startswith(("meshwright.plan", "meshwright.audit"))]
    begun.append({"preload": preload, "planner": planner, "threads": os.environ.get("OMP_NUM_THREADS")})
    real(preload)
real, start.start_server = start.start_server, watch
try:
    load_job(sys.argv[1], *sys.argv[2:]).train()
except UserError as error:
    refused = error.problems[0].code
print(json.dumps({"begun": begun, "refused": refused, "server": forkserver._forkserver._forkserver_pid}))
"""


def begin(job_file: Path, *overrides: str) -> dict:
    """Start a job that is refused before its ranks are."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(job_file), *overrides],
        capture_output=True,
        text=True,
        check=True,
        cwd=job_file.parent,
        env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_is_loaded_beside_the_planner_and_not_for_a_run_that_is_refused(job_file: Path):
    """The ranks' server begins before the planner is imported, with the environment set, and is ended."""
    found = begin(job_file, "layout.dp_replicate=1", "data.path=nowhere")
    assert found["refused"] == "data-path-missing"
    assert found["server"] is None
    (begun,) = found["begun"]
    assert begun["planner"] == []
    assert begun["threads"] == "1"
    assert begun["preload"] == list(PRELOAD)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["layout.dp_replicate=1"], 1),
        (["layout.dp_shard=2"], 2),
        ([], 2),
        (["cluster.devices_per_node=1"], 1),
    ],
)
def test_only_several_ranks_are_born_with_what_they_would_share(
    job_file: Path, overrides: list[str], ranks: int
):
    """A layout that is still open may become as many ranks as the cluster has devices."""
    assert ("torch._dynamo" in list_preload(load_job(str(job_file), overrides))) == (ranks > 1)


def test_a_job_with_a_mistake_starts_no_server(job_file: Path):
    """It is refused by whoever reads it in earnest, with every problem."""
    found = begin(job_file, "train.steps=-1")
    assert found["begun"] == []
    assert found["server"] is None

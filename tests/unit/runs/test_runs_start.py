"""The start of ``Job.train``: the fork server begins to import torch before the planner is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.runs.ranks import PRELOAD, list_preload
from meshwright.spec.load import load_job

SCRIPT = """
import json, os, sys
from meshwright.api import load_job
from meshwright.runs import start
from meshwright.core.errors import UserError
from multiprocessing import forkserver

started = []
def watch(preload):
    planner = [name for name in sys.modules if name.startswith(("meshwright.plan", "meshwright.audit"))]
    started.append({"preload": preload, "planner": planner, "threads": os.environ.get("OMP_NUM_THREADS")})
    real(preload)
real, start.start_server = start.start_server, watch
try:
    load_job(sys.argv[1], *sys.argv[2:]).train()
except UserError as error:
    refused = error.problems[0].code
print(json.dumps({"started": started, "refused": refused, "server": forkserver._forkserver._forkserver_pid}))
"""


def start_refused_job(job_file: Path, *overrides: str) -> dict:
    """Start a job that is refused before its ranks start."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(job_file), *overrides],
        capture_output=True,
        text=True,
        check=True,
        cwd=job_file.parent,
        env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_fork_server_starts_before_the_planner_and_ends_if_the_job_is_refused(job_file: Path):
    """It starts with OMP_NUM_THREADS set."""
    found = start_refused_job(job_file, "layout.dp_replicate=1", "data.path=nowhere")
    assert found["refused"] == "data-path-missing"
    assert found["server"] is None
    (started,) = found["started"]
    assert started["planner"] == []
    assert started["threads"] == "1"
    assert started["preload"] == list(PRELOAD)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["layout.dp_replicate=1"], 1),
        (["layout.dp_shard=2"], 2),
        ([], 2),
        (["cluster.devices_per_node=1"], 1),
    ],
)
def test_torch_dynamo_is_preloaded_only_for_several_ranks(job_file: Path, overrides: list[str], ranks: int):
    """An open layout counts as many ranks as the cluster has devices."""
    assert ("torch._dynamo" in list_preload(load_job(str(job_file), overrides))) == (ranks > 1)


def test_an_invalid_job_starts_no_fork_server(job_file: Path):
    found = start_refused_job(job_file, "train.steps=-1")
    assert found["started"] == []
    assert found["server"] is None

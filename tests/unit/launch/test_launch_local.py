"""The fork server and its ranks, without training."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STARTED = """
from multiprocessing import forkserver
from pathlib import Path
from meshwright.launch import local

local._start_forkserver()
print(Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_fork_server_ignores_group_signals_while_it_starts():
    """Ctrl-C reaches the whole process group. An interpreter that is starting must not handle it."""
    status = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True
    ).stdout
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert blocked >> (number - 1) & 1, number


SERVERS = """
import os
from multiprocessing import forkserver
from meshwright.launch.local import end_server, start_server

def pid_with(*modules):
    start_server(modules)
    return forkserver._forkserver._forkserver_pid

first = pid_with("json", "decimal")
assert pid_with("json") == first, "one that has more was replaced"
second = pid_with("json", "fractions")
assert second != first, "one that lacks a module was kept"
assert forkserver._forkserver._preload_modules == ["json", "fractions"]
end_server()
for gone in (first, second):
    assert not os.path.exists(f"/proc/{gone}"), "a server outlived its end"
assert pid_with("json") not in (None, second), "none was started after the end"
end_server()
end_server()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_fork_server_is_replaced_only_if_it_lacks_a_module():
    """Several launches of one process share a server. A stopped server ends at once and closes its output."""
    done = subprocess.run([sys.executable, "-c", SERVERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RANK_SCRIPT = """
import gc, json, os, sys
from pathlib import Path
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.local import start_server

def look(run_dir, tell):
    cache = os.environ["XDG_CACHE_HOME"]
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    tell({"event": "state", "rank": 0, "enabled": enabled, "frozen": frozen, "cache": cache})
    return 0

if __name__ == "__main__":
    reported = []
    preload = ("meshwright.launch.forkserver_preload",)
    start_server(preload)
    os.environ["XDG_CACHE_HOME"] = "set after the server has started"
    Supervisor("rank:look", Path(), 1, 0, 5.0, reported.append, preload=preload).run()
    print(json.dumps(reported), gc.isenabled())
"""


def test_ranks_enable_garbage_collection_and_freeze_preloaded_objects(tmp_path: Path):
    """The server imports with garbage collection disabled. Ranks and the command must not inherit that."""
    (tmp_path / "rank.py").write_text(RANK_SCRIPT)
    done = subprocess.run(
        [sys.executable, "rank.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    reported, enabled = done.rsplit(" ", 1)
    (state,) = json.loads(reported)
    assert state["enabled"]
    assert state["cache"] == "set after the server has started"
    assert state["frozen"] > 1000
    assert enabled.strip() == "True"

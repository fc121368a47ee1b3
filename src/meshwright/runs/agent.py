"""``meshwright agent``: runs the ranks of this node in a run that another machine supervises."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.core.object_path import AnyPath, parse_location
from meshwright.core.packages import require_packages
from meshwright.data.fingerprint import MISSING, fingerprint_folder
from meshwright.elastic.node_agent import NodeAgent
from meshwright.launch.assignment import ASSIGNMENT_FILE, Assignment
from meshwright.launch.caught_signals import caught_signals
from meshwright.launch.channel import Message
from meshwright.launch.environment import prepare_environment
from meshwright.launch.join import join
from meshwright.launch.local import LocalAgent, end_server, start_server
from meshwright.launch.lock import RunLock
from meshwright.launch.network import Address
from meshwright.launch.remote_nodes import name_node
from meshwright.launch.token_file import read_token
from meshwright.runs.ranks import PRELOAD, PRELOAD_SHARED
from meshwright.runs.reporter import SILENT, Reporter

NODE_RUNS = Path("node-runs")
"""Folder of the folders of nodes, if none is given. It is not `runs`: they hold a part of a run each."""
NONCE_WAIT_S = 3.0
"""How long a file that the supervisor wrote may take to appear on a network file system."""


def join_run(
    address: str,
    token_file: Path,
    run_dir: Path | None = None,
    wait_s: float = 60.0,
    reporter: Reporter = SILENT,
) -> bool:
    """Run the ranks of this node until the run ends; returns whether it succeeded.

    Args:
        address: ``HOST:PORT`` of the supervisor.
        token_file: A copy of the token file of the run, with mode 0600.
        run_dir: Folder for the files and logs of this node; by default ``node-runs/NAME-node-N``.
        wait_s: How long to wait for the supervisor.
        reporter: Receives messages.

    Raises:
        UserError: The token file cannot be used, or the supervisor refused this node.
        RunFailedError: The supervisor did not answer, or is gone.
    """
    where, token = Address.parse(address, "join"), read_token(token_file)
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="training")
    prepare_environment(threads=1)
    preload = (*PRELOAD, *PRELOAD_SHARED)
    start_server(preload)
    setup = _NodeFolder(run_dir, reporter)
    try:
        reporter.progress(f"joining the run at {where}")
        supervisor = join(where, token, wait_s)
        with caught_signals(lambda: None) as stops, setup:
            agent = NodeAgent(
                dial=lambda: join(where, token, 0.0),
                start_agent=lambda: LocalAgent.start(preload),
                setup=setup,
                torch=version("torch"),
                stops=stops,
            )
            return agent.run(supervisor)
    finally:
        end_server()


@dataclass
class _NodeFolder:
    """The run folder of this node."""

    run_dir: Path | None
    reporter: Reporter
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _locked: Path | None = None

    def __enter__(self) -> _NodeFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def notify(self, text: str) -> None:
        """Show a line."""
        self.reporter.progress(text)

    def prepare(self, command: Message) -> tuple[Path, Sequence[Problem]]:
        """Check what this node must reach, and write its run folder."""
        name = re.sub(r"[^A-Za-z0-9.-]", "-", str(command["name"])).lstrip(".")[:100]
        node = int(command["node"])
        folder = (self.run_dir or NODE_RUNS / f"{name}-node-{node}").resolve()
        host = name_node(node, socket.gethostname())
        problems = check_reach(command, host)
        if problems:
            return folder, problems
        try:
            self._write(folder, command["files"])
        except OSError as error:
            rule, fix = f"cannot be written on {host}: {error.strerror or error}", "Use --run-dir there"
            return folder, [Problem("run-not-writable", rule, str(folder), fix=fix)]
        except UserError as error:
            return folder, error.problems
        return folder, []

    def update(self, files: Mapping[str, str]) -> None:
        """Write the files of another layout."""
        assert self._locked is not None, "the node has joined"
        self._write(self._locked, files)

    def _write(self, folder: Path, files: Mapping[str, str]) -> None:
        """Lock the folder, and write the files of its ranks."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if self._locked != folder:
            self._stack.enter_context(RunLock.take(folder))
            self._locked = folder
        for name, text in files.items():
            if name != ASSIGNMENT_FILE and name == Path(name).name:
                replace_text(folder / name, text)
        assignment = Assignment(**json.loads(files[ASSIGNMENT_FILE]))
        replace(assignment, run_dir=str(folder)).write()


def check_reach(command: Message, node: str) -> list[Problem]:
    """Reasons why a node cannot take part: checkpoints or data that it does not reach."""
    problems = []
    for store in command["checkpoints"]:
        if not _reads(parse_location(store["path"]) / store["file"], store["nonce"]):
            rule = f"is not reached by {node}: it does not see the file that the supervisor wrote there"
            fix = "Use a folder that all nodes share, or an object store (s3://...)"
            problems.append(Problem("node-checkpoints", rule, "checkpoint.dir", store["path"], fix))
    for folder, expected in command["data"].items():
        found = fingerprint_folder(Path(folder))
        if found != expected:
            what = "has no such folder" if found == MISSING else "has other data there"
            fix = "Share the folder of prepared data with all nodes, or copy it to the same path"
            problems.append(Problem("node-data", f"differs: {node} {what}", folder, fix=fix))
    return problems


def _reads(path: AnyPath, nonce: str) -> bool:
    deadline = time.monotonic() + NONCE_WAIT_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == nonce:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)

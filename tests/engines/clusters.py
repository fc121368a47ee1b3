"""Real Spark and Flink clusters on this machine, ended by the ids of their processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get_json(url: str) -> Any:
    """An answer of a REST interface; None while it does not answer."""
    with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
    return None


def wait_for(what: str, condition, seconds: float = 120) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.2)


def kill_session(process: subprocess.Popen) -> None:
    """Kill -9 a process and everything that it started: Python workers have process groups of their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()


class Started:
    """Processes of a cluster, each with a session of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, {**os.environ, **environment}
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
            )

    def kill_busy(self, sessions: set[int]) -> bool:
        """Kill one of the processes that run tasks; False if none does."""
        for name, process in self.processes.items():
            if process.pid in sessions and process.poll() is None:
                kill_session(process)
                del self.processes[name]
                return True
        return False

    def kill_any(self, prefix: str) -> None:
        """Kill one of the processes with this name that are left."""
        name = next(name for name in self.processes if name.startswith(prefix))
        kill_session(self.processes.pop(name))

    def end(self) -> None:
        for process in self.processes.values():
            kill_session(process)


@contextmanager
def spark_cluster(folder: Path, workers: int = 3) -> Iterator[tuple[Started, str]]:
    """A master and workers with one core each."""
    import pyspark

    home = str(Path(pyspark.__file__).parent)
    port, page = free_port(), free_port()
    environment = {"SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "512m"}
    environment["PYSPARK_PYTHON"] = sys.executable
    cluster = Started(folder, environment)
    command = [f"{home}/bin/spark-class", "org.apache.spark.deploy"]
    address = f"spark://127.0.0.1:{port}"
    try:
        ports = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page))
        cluster.start("master", command[0], f"{command[1]}.master.Master", *ports)
        for number in range(workers):
            options = ("--cores", "1", "--memory", "1g", "--webui-port", str(free_port()))
            place = ("--work-dir", str(folder / f"worker-{number}"), address)
            cluster.start(f"worker-{number}", command[0], f"{command[1]}.worker.Worker", *options, *place)
        page_url = f"http://127.0.0.1:{page}/json/"
        wait_for("Spark", lambda: (get_json(page_url) or {}).get("aliveworkers") == workers)
        yield cluster, address
    finally:
        cluster.end()


@contextmanager
def flink_cluster(folder: Path, managers: int = 3) -> Iterator[tuple[Started, str]]:
    """A job manager and task managers with two slots each."""
    import pyflink

    home = Path(pyflink.__file__).parent
    rest, rpc = free_port(), free_port()
    settings = {
        "jobmanager.rpc.address": "127.0.0.1",
        "jobmanager.rpc.port": rpc,
        "jobmanager.bind-host": "127.0.0.1",
        "jobmanager.memory.process.size": "1024m",
        "taskmanager.bind-host": "127.0.0.1",
        "taskmanager.host": "127.0.0.1",
        "taskmanager.memory.process.size": "1400m",
        "taskmanager.numberOfTaskSlots": 2,
        "rest.address": "127.0.0.1",
        "rest.bind-address": "127.0.0.1",
        "rest.port": rest,
        "heartbeat.timeout": 8000,
        "heartbeat.interval": 2000,
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "io.tmp.dirs": str(folder / "tmp"),
    }
    conf = folder / "conf"
    shutil.copytree(home / "conf", conf)
    for name in ("config.yaml", "flink-conf.yaml"):
        (conf / name).unlink(missing_ok=True)
    (conf / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    (folder / "tmp").mkdir()
    environment = {"FLINK_CONF_DIR": str(conf), "FLINK_LOG_DIR": str(folder), "FLINK_PID_DIR": str(folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cluster = Started(folder, environment)
    url = f"http://127.0.0.1:{rest}/overview"
    try:
        cluster.start("jobmanager", str(home / "bin/jobmanager.sh"), "start-foreground")
        for number in range(managers):
            cluster.start(f"taskmanager-{number}", str(home / "bin/taskmanager.sh"), "start-foreground")
        wait_for("Flink", lambda: (get_json(url) or {}).get("taskmanagers") == managers)
        yield cluster, f"127.0.0.1:{rest}"
    finally:
        cluster.end()

"""An engine by its name, and why one cannot be used here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from meshwright.core.errors import Problem, UserError
from meshwright.core.packages import has_package, require_packages
from meshwright.data.engines.engine import Engine

ENGINES = ("reference", "embedded", "spark", "ray", "flink")
LOCAL = ("reference", "embedded")
"""Engines without a cluster."""
JAVA_VERSION = 17
_EXTRAS = {"spark": ("pyspark", "prepare-spark"), "ray": ("ray", "prepare-ray")}


def default_engine() -> tuple[str, str]:
    """The engine without a choice, and the reason."""
    missing = [name for name in ("duckdb", "pyarrow") if not has_package(name)]
    if missing:
        packages = " and ".join(missing)
        return "reference", f"one process, because {packages} is not installed (extra 'data')"
    return "embedded", "processes of this machine and DuckDB"


def check_engine(name: str, address: str | None, parallelism: int | None) -> None:
    """Refuse an engine, an address or a parallelism that cannot be used.

    Raises:
        UserError: With the package that is missing, or the rule.
    """
    if name not in ENGINES:
        rule = "is not an engine"
        raise _argument("engine", name, rule, f"Use one of {', '.join(ENGINES)}")
    if address is not None and name in LOCAL:
        raise _argument(
            "address", address, f"has no effect: the engine {name} has no cluster", "Leave it out"
        )
    if parallelism is not None and parallelism < 1:
        raise _argument("parallelism", parallelism, "is not a number of tasks at once", "Use 1 or more")
    if name == "reference":
        if parallelism not in (None, 1):
            rule = "has no effect: the engine reference is one process"
            raise _argument("parallelism", parallelism, rule, "Leave it out, or use --engine embedded")
        return
    if address is not None:
        check_address(name, address)
    _check_packages(name)


def _check_packages(name: str) -> None:
    if name == "flink" and not has_package("pyflink"):
        raise UserError(
            Problem(
                "install-missing-flink",
                "the package 'apache-flink' is not installed here, and the engine flink needs it",
                fix="It has an environment of its own: make setup-flink, then .venv-flink/bin/meshwright",
            )
        )
    if name in _EXTRAS:
        require_packages(_EXTRAS[name], needed_for=f"the engine {name}")
    require_packages(("pyarrow", "data"), needed_for=f"the engine {name}")
    if name == "embedded":
        require_packages(("duckdb", "data"), needed_for="the engine embedded")
    if name in ("spark", "flink"):
        check_java(name)


def check_address(engine: str, address: str) -> None:
    """Refuse an address that the cluster of an engine cannot have.

    Raises:
        UserError: With an example.
    """
    if engine == "spark":
        if not re.match(r"(spark|k8s)://.|yarn$|local(\[|$)", address):
            raise _argument(
                "address", address, "is not the master of a Spark cluster", "Use spark://host:7077"
            )
        return
    if engine == "ray" and (address in ("auto", "local") or address.startswith("ray://")):
        return
    example = "host:6379" if engine == "ray" else "host:8081, the REST port"
    try:
        place = urlsplit(f"//{address}")
        has_port = place.port is not None or engine == "flink"  # it has a default
        valid = bool(place.hostname) and place.netloc == address and has_port
    except ValueError:  # the port
        valid = False
    if not valid:
        raise _argument("address", address, "is not a host and a port", f"Use {example}")


def build_engine(name: str, parallelism: int | None = None, address: str | None = None) -> Engine:
    """Start an engine; not ``reference``, which is ``prepare.prepare_corpus``.

    Args:
        name: One of ``ENGINES``.
        parallelism: Tasks at once; the cores of this machine if left out.
        address: Address of a cluster that runs.

    Raises:
        UserError: It cannot be used here.
    """
    check_engine(name, address, parallelism)
    count = parallelism or len(os.sched_getaffinity(0))
    if name == "spark":
        from meshwright.data.engines.spark import SparkEngine  # noqa: PLC0415 - slow imports

        return SparkEngine(count, address)
    if name == "ray":
        from meshwright.data.engines.ray import RayEngine  # noqa: PLC0415

        return RayEngine(count, address)
    if name == "flink":
        from meshwright.data.engines.flink import FlinkEngine  # noqa: PLC0415

        return FlinkEngine(count, address)
    from meshwright.data.engines.embedded import EmbeddedEngine  # noqa: PLC0415

    return EmbeddedEngine(count)


def check_java(engine: str) -> None:
    """Refuse a machine without Java 17.

    Raises:
        UserError: With the package to install.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    found = java_version(java) if java else None
    if found is None or found < JAVA_VERSION:
        what = "no Java is installed" if found is None else f"Java {found} is installed"
        raise UserError(
            Problem(
                "install-missing-java",
                f"{what}, and the engine {engine} needs Java {JAVA_VERSION} or newer",
                fix="On Debian and Ubuntu: apt-get install openjdk-17-jre-headless",
            )
        )


def java_version(java: str) -> int | None:
    """The major version of a Java; None if it does not run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _argument(name: str, value: object, rule: str, fix: str) -> UserError:
    return UserError(Problem("api-argument", rule, path=name, value=value, fix=fix, is_argument=True))

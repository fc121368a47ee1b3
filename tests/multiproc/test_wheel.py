"""The built wheel works outside of the repository: presets, built-in data and tables are in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel: what pip puts into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *build, "--wheel-dir", folder, ROOT]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_every_file_of_the_package(installed: Path) -> None:
    source = ROOT / "src" / "meshwright"
    wanted = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    packed = {path.relative_to(installed / "meshwright") for path in (installed / "meshwright").rglob("*")}
    assert len(wanted) > 300
    assert wanted <= packed, sorted(map(str, wanted - packed))


def test_the_wheel_declares_its_command_and_extras(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    package = PathDistribution(folder)
    (command,) = package.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("meshwright", "meshwright.cli:main")
    extras = [text for text in package.requires or () if "extra ==" in text]
    assert any(text.startswith("torch") and "run" in text.partition("extra ==")[2] for text in extras)
    assert not any(text.startswith("torch") for text in package.requires or () if text not in extras)


@pytest.mark.slow
def test_commands_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`plan` of presets, `init`, `train` and `prepare` of built-in data, `report`; in another folder.

    The wheel comes before the editable install on the path, and a package is imported from one place only.
    """
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def meshwright(*arguments: str) -> str:
        return run("-m", "meshwright", *arguments)

    assert Path(run("-c", "import meshwright; print(meshwright.__file__)").strip()).is_relative_to(installed)
    assert json.loads(meshwright("plan", "llama3-8b", "--on", "8xh100-sxm", "--json"))["fit"] > 0
    meshwright("init", "--model", "tiny", "--gpus", "1")
    trained = json.loads(meshwright("train", "job.toml", "train.steps=2", "run_dir=first", "--json"))
    assert trained["audit_ok"]
    meshwright("report", "first", "-o", "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()
    (tmp_path / "corpus.toml").write_text('sources = ["builtin:python-stdlib"]\nout = "shards"\n')
    assert json.loads(meshwright("prepare", "corpus.toml", "--json"))["tokens"] > 0

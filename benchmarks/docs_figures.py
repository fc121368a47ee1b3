"""Regenerates the command outputs and pictures that the README and the docs quote: ``make docs-figures``.

A quoted output is a console block below a comment that names its command, and optionally words of the first
line of the table or paragraph to quote:

    <!-- output: meshwright plan llama3-70b --on 8x8xh100-sxm -v; Step time -->

Planning commands only: they need no devices, and give the same text on every machine. The machine is replaced
by one with two cores, and no search has a time limit. ``--measured`` also redraws the pictures of real runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from meshwright.cli import main as run_command

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
QUOTED = re.compile(
    r"<!-- output: (?P<command>meshwright .*?)(?:; (?P<part>.*?))? -->\n```console\n.*?^```",
    re.DOTALL | re.MULTILINE,
)
JOB = re.compile(r"^```toml\n# job\.toml\n(.*?)^```", re.DOTALL | re.MULTILINE)
SEARCH_TIME = re.compile(r"(layouts evaluated) in [^;]+;")
CORES, MEMORY_BYTES = 2, 24_000_000_000
"""The machine that ``local`` is."""
UNLIMITED_S = 3600.0
PICTURES = {
    **{
        f"schedule-{name}.svg": f"meshwright schedule pipeline --schedule {name} -o"
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v")
    },
    "plan-llama3-70b.png": "meshwright plan llama3-70b --on 8x8xh100-sxm --picture",
}
"""Pictures that are drawn without devices, with the command that draws each."""


@functools.cache
def output_of(command: str) -> str:
    """What a command prints, in a folder with the README's ``job.toml``; errors included."""
    found = JOB.search((ROOT / "README.md").read_text())
    assert found is not None, "the README has a job.toml"
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.ExitStack() as stack:
        Path("job.toml").write_text(found[1])
        Path("examples").symlink_to(ROOT / "examples")
        for name, value in {
            "meshwright.spec.load.count_cores": lambda: CORES,
            "meshwright.spec.load.machine_memory_bytes": lambda: MEMORY_BYTES,
            "meshwright.spec.load.find_gpus": list,
            "meshwright.plan.search.find.BUDGET_S": UNLIMITED_S,
            "meshwright.plan.search.failure.SUGGEST_S": UNLIMITED_S,
            "meshwright.plan.search.failure.TRY_S": UNLIMITED_S,
            "meshwright.plan.sizing.SIZE_S": UNLIMITED_S,
            "meshwright.runs.explain.WHY_BUDGET_S": UNLIMITED_S,
            "sys.argv": shlex.split(command),
        }.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        with contextlib.suppress(SystemExit):
            run_command()
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def quote(command: str, part: str | None) -> str:
    """The block: the whole output below its command, or the paragraph from the first line with ``part``."""
    text = output_of(command)
    if part is None:
        return f"$ {command}\n{text}"
    start = re.search(rf"^.*{re.escape(part)}", text, re.MULTILINE)
    assert start is not None, f"{command} prints no line with {part!r}"
    return text[start.start() :].partition("\n\n")[0]


def rewrite(page: str, keep_times: bool = False) -> str:
    """The page with every quoted output as it is now.

    Args:
        page: Its text.
        keep_times: Whether the seconds of a search stay as they are.
    """

    def block(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        body = quote(match["command"], match["part"])
        if keep_times and (before := SEARCH_TIME.search(match[0])):
            body = SEARCH_TIME.sub(before[0], body)
        return f"{head}\n```console\n{body}\n```"

    return QUOTED.sub(block, page)


def draw(name: str, folder: Path) -> Path:
    """Draw one picture into a folder."""
    path = folder / name
    output_of(f"{PICTURES[name]} {path}")
    return path


def draw_measured() -> None:
    """The simulated and the measured pipeline of a real run on two ranks."""
    python = [sys.executable, "-m", "meshwright"]
    job = ["train", str(ROOT / "examples" / "quickstart.toml"), "layout.pp=2", "train.steps=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*python, *job], cwd=folder, env=environment, check=True)
        (run,) = Path(folder, "runs").iterdir()
        picture = FIGURES / "pipeline-measured.svg"
        subprocess.run([*python, "audit", str(run), "-o", str(picture)], env=environment, check=False)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewrite(path.read_text(), keep_times=True))
    for name in PICTURES:
        draw(name, FIGURES)
    if "--measured" in sys.argv:
        draw_measured()

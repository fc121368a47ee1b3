"""Regenerates the command outputs and pictures that the README and the docs quote.

    make docs-figures      # planning: the same text on every machine; a test compares it
    make docs-measured     # runs on this machine: outputs with times, the timeline, the report's screenshot

A quoted output is a console block below a comment that names its command, and optionally words of the first
line of the table or paragraph to quote:

    <!-- output: meshwright plan llama3-70b --on 8x8xh100-sxm -v; Step time -->

Such commands need no devices. The machine is replaced by one with two cores, and no search has a time limit.
Outputs of real runs are below such a comment, and above a line with date and machine:

    <!-- measured: meshwright train job.toml && meshwright audit runs/job-1 -->

Commands run in a folder with the page's files: blocks whose first line is a comment with a file name, such as
``# job.toml``. A page without a ``job.toml`` uses the README's. The commands of a page share the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from PIL import Image

from meshwright.cli import main as run_command

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = r"(?:; (?P<part>[^\n]*?))? -->\n```console\n.*?^```"
QUOTED = re.compile(r"<!-- output: (?P<command>meshwright [^\n]*?)" + _BLOCK, re.DOTALL | re.MULTILINE)
MEASURED = re.compile(
    r"<!-- measured: (?P<commands>[^\n]*?)" + _BLOCK + r"(?:\n\n\*Measured on [^\n]*\*$)?",
    re.DOTALL | re.MULTILINE,
)
STAMP = re.compile(r"\*(?:Measured|Recorded) on \d{1,2} [A-Z][a-z]+ 20\d\d: [^\n]+\.\*")
"""The line below an output that depends on the machine."""
FILE = re.compile(r"^```\w*\n# ([\w-]+\.(?:toml|csv))\n(.*?)^```", re.DOTALL | re.MULTILINE)
SEARCH_TIME = re.compile(r"(layouts evaluated) in [^;]+;")
STEP_LINE, RANK_ROW = re.compile(r"step \d+/"), re.compile(r" +(\d+)  [a-z]+ .*(?:equal|within)")
CORES, MEMORY_BYTES = 2, 24_000_000_000
"""The machine that ``local`` is."""
UNLIMITED_S = 3600.0
PICTURES = {
    **{
        f"schedule-{name}.svg": f"meshwright schedule pipeline --schedule {name} -o"
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v")
    },
    "collective-ring.svg": "meshwright schedule collective --algorithm ring --ranks 4 -o",
    "collective-tree.svg": "meshwright schedule collective --algorithm tree --ranks 8 -o",
    "collective-hierarchical.svg": (
        "meshwright schedule collective --algorithm hierarchical --ranks 4 --ranks-per-node 2 -o"
    ),
    "collective-fastest.svg": "meshwright simulate collective --on 2x8xh100-sxm -o",
    "plan-llama3-70b.png": "meshwright plan llama3-70b --on 8x8xh100-sxm --picture",
    "simulate-step.svg": (
        "meshwright simulate step llama3-8b layout.pp=4 layout.tp=2 layout.dp_shard=2 layout.micro_batch=1 "
        "train.global_batch=16 --on 2x8xh100-sxm -o"
    ),
    "simulate-failures.svg": "meshwright simulate failures llama3-405b --on 2048x8xh100-sxm --runs 1000 -o",
}
"""Pictures that are drawn without devices, with the command that draws each."""
PNG_COLORS = 128
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREEN = "1100,1130"
"""Width and height of the screenshot in pixels."""


def files_of(page: str) -> str:
    """The blocks of a page that are files."""
    return "\n".join(match[0] for match in FILE.finditer(page))


def write_files(page: str, folder: Path) -> None:
    """Put the files that a page shows into a folder, with the examples and the README's job."""
    for name, text in (*FILE.findall(README.read_text()), *FILE.findall(page)):
        (folder / name).write_text(text)
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)


@functools.cache
def output_of(command: str, page: str = "") -> str:
    """What a planning command prints, errors included."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.ExitStack() as stack:
        write_files(page, Path())
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


def quote(command: str, text: str, part: str | None) -> str:
    """The block: the whole output below its command, or the paragraph from the first line with ``part``.

    A first paragraph stays below its command.
    """
    if part is None:
        return f"$ {command}\n{text}"
    start = re.search(rf"^.*{re.escape(part)}", text, re.MULTILINE)
    assert start is not None, f"{command} prints no line with {part!r}:\n{text}"
    paragraph, _, rest = text[start.start() :].partition("\n\n")
    return paragraph if start.start() else f"$ {command}\n{paragraph}" + ("\n..." if rest else "")


def rewrite(page: str, keep_times: bool = False) -> str:
    """The page with every quoted output of planning as it is now.

    Args:
        page: Its text.
        keep_times: Whether the seconds of a search stay as they are.
    """
    files = files_of(page)

    def block(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        body = quote(match["command"], output_of(match["command"], files), match["part"])
        if keep_times and (before := SEARCH_TIME.search(match[0])):
            body = SEARCH_TIME.sub(before[0], body)
        return f"{head}\n```console\n{body}\n```"

    return QUOTED.sub(block, page)


def draw(name: str, folder: Path) -> Path:
    """Draw one picture into a folder."""
    path = folder / name
    output_of(f"{PICTURES[name]} {path}")
    if path.suffix == ".png":
        shrink(path)
    return path


def shrink(path: Path) -> None:
    """Store a picture with few colours: a third of its size."""
    picture = Image.open(path).convert("RGB").quantize(PNG_COLORS, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


# Outputs of real runs


def run(command: str, folder: Path) -> str:
    """What a command prints in a folder: both streams in the order of their lines."""
    program, *arguments = shlex.split(command)
    start = [sys.executable, "-m", "meshwright"] if program == "meshwright" else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return trim(done.stdout.replace(f"{folder}/", ""))


def trim(text: str) -> str:
    """The output without steps between the first and the last, and without rows of ranks after the first."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    steps = [number for number, line in enumerate(lines) if STEP_LINE.match(line)]
    rows = {number: row[1] for number, line in enumerate(lines) if (row := RANK_ROW.match(line))}
    hidden = {*steps[1:-1], *(number for number, rank in rows.items() if rank != next(iter(rows.values())))}
    return "\n".join(
        "..." if number in hidden else line
        for number, line in enumerate(lines)
        if number not in hidden or number - 1 not in hidden
    )


def stamp() -> str:
    """Date and machine of a measurement."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    where = (
        f"{os.cpu_count()} cores, {found[1] if found else platform.machine()}, load {LOAD:.1f} before the run"
    )
    today = datetime.datetime.now(tz=datetime.UTC)
    versions = f"Python {platform.python_version()}, torch {version('torch').partition('+')[0]}"
    return f"*Measured on {today.day} {today:%B %Y}: {where}, {versions}.*"


LOAD = os.getloadavg()[0]


def remeasure(page: str) -> str:
    """The page with every measured output as it is now, on this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(page, folder)

        def block(match: re.Match[str]) -> str:
            head = match[0].partition("\n")[0]
            commands = match["commands"].split(" && ")
            texts = [(command, run(command, folder)) for command in commands]
            if match["part"]:
                body = quote(*texts[-1], match["part"])
            else:
                body = "\n\n".join(quote(*text, None) for text in texts)
            return f"{head}\n```console\n{body}\n```\n\n{stamp()}"

        return MEASURED.sub(block, page)


def draw_measured() -> None:
    """The timeline of a real pipeline on two ranks, and the report of the README's job with a killed rank."""
    from hang_examples import Training  # noqa: PLC0415  (it imports this module)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files("", folder)
        run("meshwright train examples/quickstart.toml layout.pp=2 train.steps=8 run_dir=pipeline", folder)
        run(f"meshwright audit pipeline -o {FIGURES / 'pipeline-measured.svg'}", folder)
        with contextlib.chdir(folder):
            training = Training("train.steps=200", "train.eval_every=40", folder="runs/job-1")
            training.wait_for_step(83)
            training.send(1, signal.SIGKILL)
            training.process.wait()
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            print(f"no {', '.join(BROWSERS)}: docs/figures/report.png stays as it is")
            return
        picture = FIGURES / "report.png"
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--timeout=5000")
        target = (
            f"--window-size={SCREEN}",
            f"--screenshot={picture}",
            f"file://{folder}/runs/job-1/report.html",
        )
        command = [browser, *options, f"--user-data-dir={folder}/browser", *target]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # it reports the missing desktop
        shrink(picture)


if __name__ == "__main__":
    if "--measured" in sys.argv:
        names = [name for name in sys.argv[1:] if name.endswith(".md")]
        for path in PAGES:
            if path.name in names or not names:
                path.write_text(remeasure(path.read_text()))
        if not names:
            draw_measured()
    else:
        for path in PAGES:
            path.write_text(rewrite(path.read_text(), keep_times=True))
        for name in PICTURES:
            draw(name, FIGURES)

"""Peak memory and speed of the preparation of a text file: training BPE and encoding.

    python benchmarks/prepare_memory.py FILE [--tokenizer bpe:32000] [--most-mb 500]

Prepares FILE in a child process and prints one JSON object. ``peak_rss_mb`` is the kernel's figure for the
child (``VmHWM``), which has threads and no processes of its own. The status is 1 if the peak is above
``--most-mb``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from meshwright.data.corpus import CorpusStats
from meshwright.data.prepare import CorpusSpec, prepare_corpus

MB = 1e6


def measure(file: Path, tokenizer: str, quiet: bool = True) -> dict[str, object]:
    """Prepare a file in a child process; its peak memory and CPU time."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        command = [sys.executable, __file__, str(file), "--tokenizer", tokenizer, "--child", folder]
        child = os.posix_spawn(sys.executable, [*command, *(["--quiet"] if quiet else [])], os.environ)
        _, status, usage = os.wait4(child, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit("the preparation failed")
        report = json.loads((Path(folder) / "report.json").read_text())
    return {
        "file_mb": file.stat().st_size / MB,
        "tokenizer": tokenizer,
        "cores": len(os.sched_getaffinity(0)),
        "tokens": report["tokens"],
        "peak_rss_mb": report["peak_rss_bytes"] / MB,
        "seconds": report["seconds"],
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "mb_per_s": file.stat().st_size / MB / report["seconds"],
    }


def prepare(file: Path, tokenizer: str, folder: Path, quiet: bool) -> None:
    """The child: prepare the file and write the report."""
    shown = ""

    def show(phase: str, tally: CorpusStats) -> None:
        nonlocal shown
        line = f"{phase} {tally.read_bytes / tally.total_bytes:.0%}"
        if line != shown and not quiet:
            print(line, file=sys.stderr)
        shown = line

    spec = CorpusSpec(sources=(str(file.absolute()),), out="out", tokenizer=tokenizer)
    report = prepare_corpus(spec, folder, show)
    # Not ru_maxrss, which includes the parent's memory at the fork.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    (folder / "report.json").write_text(json.dumps({**report.as_dict(), "peak_rss_bytes": peak}))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", default="bpe:32000")
    parser.add_argument("--most-mb", type=float, default=500)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        prepare(arguments.file, arguments.tokenizer, arguments.child, arguments.quiet)
        return 0
    result = measure(arguments.file, arguments.tokenizer, arguments.quiet)
    print(json.dumps(result))
    return int(result["peak_rss_mb"] > arguments.most_mb)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())

"""The files of a source, in an order that does not depend on the file system.

A source is ``builtin:python-stdlib``, a file, a folder or a glob. ``corpus`` reads the files.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.core.errors import Problem
from meshwright.spec.paths import BUILTIN

STDLIB = f"{BUILTIN}python-stdlib"

_STDLIB_SKIPPED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
    }  # the last: tables
)

Quarantine = Callable[[str, str], None]
"""Called with the name of something unreadable, and the reason."""


def source_problem(source: str, base: Path) -> Problem | None:
    """The problem with a source, checked before reading starts."""
    if source == STDLIB:
        return None
    if source.startswith(BUILTIN):
        return Problem(
            code="data-source-unknown",
            path=printable(source),
            rule="is not a builtin corpus",
            fix=f"Use {STDLIB}, or the path of a file or folder",
        )
    path = _absolute(source, base)
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - Path.exists would hide which error it was
        if stat.S_ISDIR(mode):
            os.scandir(path).close()
        elif stat.S_ISREG(mode):
            path.open("rb").close()
        else:
            return _unreadable(source, "it is neither a file nor a folder")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if source and glob.has_magic(source) and _glob(path):
            return None
        return Problem(
            code="data-path-missing",
            path=printable(source) or "an empty source",
            rule=f"does not exist; relative paths start from {base.absolute()}",
            fix=f"Correct the path, or use {STDLIB} to try things out",
        )
    except OSError as error:
        return _unreadable(source, error.strerror or str(error))
    return None


def iter_files(
    source: str, base: Path, skipped: frozenset[str], quarantine: Quarantine
) -> Iterator[tuple[str, Path]]:
    """Names and paths of a source's files, in order.

    A folder lists its files sorted by name, then its subfolders sorted by name, without hidden entries,
    ``__pycache__`` and linked folders. A glob lists its matches, sorted.

    Args:
        source: A source without a :func:`source_problem`.
        base: Folder of relative sources.
        skipped: Real paths of folders to skip.
        quarantine: Called for folders that cannot be listed.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        yield from _walk("python-stdlib", root, (_is_stdlib_folder, _is_stdlib_file), skipped, quarantine)
        return
    path = _absolute(source, base)
    if path.is_dir():
        yield from _walk(source, path, (_is_plain, _is_plain), skipped, quarantine)
    elif path.exists():
        yield source, path
    else:
        for match in _glob(path):
            if not any(os.path.realpath(parent) in skipped for parent in match.parents):
                yield str(match.relative_to(base) if match.is_relative_to(base) else match), match


def locate(path: str, base: Path) -> Path:
    """Resolve a path of the user, relative to ``base``."""
    # Path.expanduser raises for a user who does not exist; this leaves the path, which is then missing.
    return base / os.path.expanduser(path)  # noqa: PTH111


def printable(name: str) -> str:
    """The name with undecodable bytes escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _walk(
    shown: str,
    root: Path,
    keep: tuple[Callable[[str], bool], Callable[[str], bool]],
    skipped: frozenset[str],
    quarantine: Quarantine,
) -> Iterator[tuple[str, Path]]:
    """The files below a folder; ``keep`` filters folders and files by name."""
    keep_folder, keep_file = keep

    def report(error: OSError) -> None:
        quarantine(f"{shown}/{os.path.relpath(error.filename, root)}", error.strerror or str(error))

    for folder, subfolders, files in os.walk(root, onerror=report):
        here = Path(folder)
        subfolders[:] = sorted(
            name for name in subfolders if keep_folder(name) and os.path.realpath(here / name) not in skipped
        )
        for name in sorted(filter(keep_file, files)):
            path = here / name
            yield f"{shown.rstrip('/')}/{path.relative_to(root).as_posix()}", path


def _is_plain(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _is_stdlib_folder(name: str) -> bool:
    return name not in _STDLIB_SKIPPED and not name.startswith((".", "config-"))


def _is_stdlib_file(name: str) -> bool:
    # _sysconfigdata is written when the interpreter is built: it holds that machine's paths.
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _unreadable(source: str, reason: str) -> Problem:
    return Problem(
        code="data-path-unreadable",
        path=printable(source),
        rule=f"cannot be read: {reason}",
        fix="Give the user who runs this permission to read it, or name another path",
    )


def _absolute(source: str, base: Path) -> Path:
    # An empty source must not mean the base folder itself; no path has a zero byte.
    return locate(source, base) if source else base / "\0"


def _glob(path: Path) -> list[Path]:
    try:
        # Path.glob takes no absolute patterns.
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    except ValueError:  # a zero byte
        return []
    # Path.is_dir raises where a link leads to a place that may not be searched.
    return sorted(match for match in matches if not os.path.isdir(match))  # noqa: PTH112

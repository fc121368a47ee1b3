"""Real text without a data set: the documentation packages of Debian, as JSON Lines.

    python benchmarks/debian_text.py OUT.jsonl [--most-mb 1000] [--packages linux-doc-6.1 python3.11-doc ...]

Downloads packages with ``apt-get download``, unpacks them with ``dpkg -x`` into a temporary folder, strips
HTML and man-page markup, and writes one record per file (``text``, ``source``). If the packages have less
text than ``--most-mb``, they are written again with a number in every line, so that nothing is a duplicate.
Nothing is installed, and nothing of it belongs into the repository: every package has a licence of its own.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAMES = (
    "linux-doc-6.1 rust-doc openjdk-17-doc python3.11-doc dict-gcide debian-handbook wordnet-base perl-doc "
    "cppreference-doc-en-html anarchism glibc-doc git-doc nodejs-doc postgresql-doc-15 sqlite3-doc manpages "
    "manpages-dev"
)
PACKAGES = _NAMES.split()
SUFFIXES = {".html", ".htm", ".txt", ".rst", ".md", ".xml", ".xhtml"}
MIN_CHARACTERS = 200
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
BLANK_LINES = re.compile(r"\n\s*\n\s*\n+")


def read_text(path: Path) -> str | None:
    """The text of a documentation file; None for other files."""
    data = path.read_bytes()
    name = path.name
    if name.endswith(".gz"):
        data, name = gzip.decompress(data), name[:-3]
    suffix = Path(name).suffix.lower()
    is_man = bool(re.fullmatch(r"\.[1-9]\w*", suffix))
    if suffix not in SUFFIXES and not is_man and "dict" not in str(path):
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    if suffix in (".html", ".htm", ".xml", ".xhtml"):
        text = html.unescape(TAGS.sub(" ", text))
    if is_man:
        text = re.sub(r"^\.\\?\"?\w*\s?|\\f\w|\\-", "", text, flags=re.MULTILINE)
    text = BLANK_LINES.sub("\n\n", text).strip()
    return text if len(text) >= MIN_CHARACTERS else None


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of all documentation below a folder, sorted."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            try:
                text = read_text(path)
            except (OSError, EOFError):
                continue
            if text is not None:
                yield str(path.relative_to(folder)), text


def download(packages: list[str], folder: Path) -> None:
    """Unpack packages into a folder; one that does not exist is named and left out."""
    for package in packages:
        got = subprocess.run(
            ["apt-get", "download", package], cwd=folder, capture_output=True, text=True, check=False
        )
        if got.returncode:
            print(f"{package}: not available", file=sys.stderr)
            continue
        for archive in folder.glob(f"{package}_*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), str(folder / package)], check=True)
            archive.unlink()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--most-mb", type=float, default=1000)
    parser.add_argument("--packages", nargs="*", default=PACKAGES)
    arguments = parser.parse_args()
    limit, size, count = arguments.most_mb * 1e6, 0, 0
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("w", encoding="utf-8") as out:
        download(arguments.packages, Path(folder))
        turn = 0
        while size < limit:
            before = size
            for name, text in documents(Path(folder)):
                body = text if turn == 0 else text.replace("\n", f"\n{turn} ")
                out.write(json.dumps({"text": body, "source": name}, ensure_ascii=False) + "\n")
                size += len(body.encode())
                count += 1
                if size >= limit:
                    break
            if size == before:
                raise SystemExit("the packages have no text")
            turn += 1
    print(json.dumps({"documents": count, "text_bytes": size, "passes": turn}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

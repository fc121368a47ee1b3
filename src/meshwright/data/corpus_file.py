"""Files with the state of the data of a run, named by their contents.

An in-memory snapshot has the name only: it has little room for counters. Every rank writes the same files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from meshwright.core.files import replace_text
from meshwright.data.epochs import CorpusState

_STATE: TypeAdapter[CorpusState] = TypeAdapter(CorpusState)
_KEY_DIGITS = 16


def parse_corpus(content: dict[str, Any]) -> CorpusState:
    """The state from JSON."""
    return _STATE.validate_python(content)


def write_corpus(run_dir: Path, corpus: CorpusState) -> str:
    """Write a state into the folder of a run; returns its key."""
    content = json.dumps(asdict(corpus), indent=1, sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:_KEY_DIGITS]
    path = _path(run_dir, key)
    if not path.exists():
        replace_text(path, content)
    return key


def read_corpus(run_dir: Path, key: str) -> CorpusState:
    """The state with a key."""
    return parse_corpus(json.loads(_path(run_dir, key).read_text(encoding="utf-8")))


def _path(run_dir: Path, key: str) -> Path:
    return run_dir / f"corpus-{key}.json"

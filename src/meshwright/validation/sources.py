"""The source of a published row: one publisher's repository or paper.

All files and versions of a source are left out together: rows of one source share machines, software and
the people who tuned them.
"""

from __future__ import annotations

import re

ALIASES: tuple[tuple[str, str], ...] = (
    (r"megatron-lm (readme|git)|2104\.04473|nvidia/megatron-lm", "NVIDIA/Megatron-LM"),
    (r"aleph-?alpha|2311\.05610", "Aleph-Alpha"),
    (r"bigscience", "bigscience"),
    (r"lambdalabsml", "LambdaLabsML"),
    (r"nousresearch", "NousResearch/torchtitan"),
    (r"torchtitan", "pytorch/torchtitan"),
    (r"meshwright", "meshwright"),
    (r"fms-fsdp|maximizing-training", "IBM/fms-fsdp"),
    (r"jzhang38", "jzhang38"),
)
"""Texts that name one source in several ways; first match wins."""
_PAPER = re.compile(r"arxiv[ :]*(\d{4}\.\d{4,5})", re.IGNORECASE)
_REPOSITORY = re.compile(r"(?:https?://)?(?:www\.)?(gist\.github\.com/[\w.-]+|[\w.-]+/[\w.-]+)")
_GITHUB = re.compile(r"(?:https?://)?(?:www\.)?github\.com/([\w.-]+/[\w.-]+)")


def source_of(text: str, family: str = "") -> str:
    """The source that a cell names; the row's family if the cell is blank.

    Args:
        text: The cell, such as `NVIDIA/NeMo docs/performance.md @9c5c5e97`.
        family: The family of the row.
    """
    plain = text.strip()
    found = next((name for pattern, name in ALIASES if re.search(pattern, plain.lower())), None)
    if found:
        return found
    if paper := _PAPER.search(plain):
        return f"arXiv {paper[1]}"
    if repository := _GITHUB.match(plain) or _REPOSITORY.match(plain):
        return repository[1]
    return plain.split()[0] if plain else family

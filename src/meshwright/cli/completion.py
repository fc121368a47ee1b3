"""Shell completion of presets, clusters and job keys. A shell calls these through ``--show-completion``.

Modules are imported when a shell asks: commands start as fast as without completion.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path


def complete_model(incomplete: str) -> list[str]:
    """Model presets, and files and folders."""
    from meshwright.spec.presets import preset_names  # noqa: PLC0415

    paths = glob.glob(f"{glob.escape(incomplete)}*")  # noqa: PTH207  (Path.glob takes no absolute pattern)
    files = [f"{path}/" if Path(path).is_dir() else path for path in paths]
    return [name for name in preset_names("models") if name.startswith(incomplete)] + sorted(files)


def complete_cluster(incomplete: str) -> list[str]:
    """Cluster presets behind the counts that were typed: ``8x8xh`` to ``8x8xh100-sxm``."""
    from meshwright.spec.presets import preset_names  # noqa: PLC0415

    found = re.match(r"(?:\d+x){0,2}", incomplete)
    counts = found[0] if found else ""
    begun = incomplete.removeprefix(counts).lower()
    return [f"{counts}{name}" for name in preset_names("clusters") if name.startswith(begun)]


def complete_key(incomplete: str) -> list[str]:
    """Keys of the job file with ``=``; one key with its choices.

    A key without choices comes twice, so that the shell adds no space behind its ``=``.
    """
    from meshwright.spec.job_keys import list_choices, list_keys  # noqa: PLC0415

    key, is_whole, value = incomplete.partition("=")
    if is_whole:
        return [f"{key}={choice}" for choice in list_choices(key) if choice.startswith(value)]
    names = [name for name in list_keys() if name.startswith(key)]
    if len(names) != 1:
        return [f"{name}=" for name in names]
    return [f"{names[0]}={choice}" for choice in list_choices(names[0]) or ("", "VALUE")]

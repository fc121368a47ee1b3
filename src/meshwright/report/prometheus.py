"""Metrics in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import math
import re
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Kind = Literal["gauge", "counter"]


class MetricText:
    """Collects metrics and writes them, each with its help and type once."""

    def __init__(self, prefix: str) -> None:
        """Start without metrics.

        Args:
            prefix: Prefix of all names.
        """
        self._prefix = prefix
        self._families: dict[str, tuple[Kind, str, list[str]]] = {}

    def add(
        self, name: str, kind: Kind, description: str, value: float | int | None, /, **labels: str | int
    ) -> None:
        """Add a sample. None is not known and is left out.

        Args:
            name: Without the prefix; of a counter with ``_total`` at the end.
            kind: ``gauge`` or ``counter``.
            description: One line.
            value: The sample.
            labels: Labels of the sample.
        """
        assert _NAME.fullmatch(name), f"not the name of a metric: {name}"
        assert (kind == "counter") == name.endswith("_total"), f"a counter ends with _total: {name}"
        if value is None:
            return
        full = f"{self._prefix}_{name}"
        _, _, samples = self._families.setdefault(full, (kind, description, []))
        shown = ",".join(f'{key}="{str(text).translate(_ESCAPES)}"' for key, text in labels.items())
        samples.append(f"{full}{f'{{{shown}}}' if shown else ''} {_format(value)}")

    def render(self) -> str:
        """All metrics, in the order in which they were added first."""
        lines = []
        for name, (kind, description, samples) in self._families.items():
            text = description.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
        return "".join(f"{line}\n" for line in lines)


def _format(value: float | int) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
    return repr(value)

"""What a rank is told beside the plan: where the data lie, where to write, what to resume."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ASSIGNMENT_FILE = "assignment.json"


@dataclass(frozen=True)
class Assignment:
    """One attempt at a run; the same for all its ranks."""

    run_dir: str
    data_dir: str
    """A prepared folder."""
    checkpoint_dir: str
    resume_from: str | None = None
    """A checkpoint, verified by whoever wrote this."""
    hf_weights: bool = False
    """The initial weights are those of ``model.hf``: every rank reads them there."""
    generation: int = 0
    """Which attempt this is."""

    def write(self) -> None:
        """Put it beside the plan."""
        path = Path(self.run_dir) / ASSIGNMENT_FILE
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> Assignment:
        """Read what was written there."""
        return cls(**json.loads((run_dir / ASSIGNMENT_FILE).read_text(encoding="utf-8")))

"""The settings of a rank besides the plan: data folder, output folder, checkpoint to resume."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ASSIGNMENT_FILE = "assignment.json"


@dataclass(frozen=True)
class Assignment:
    """The settings of one attempt of a run, shared by all ranks."""

    run_dir: str
    data_dir: str
    """Folder of the prepared data."""
    checkpoint_dir: str
    resume_from: str | None = None
    """A verified checkpoint."""
    hf_weights: bool = False
    """Whether ranks load the initial weights from ``model.hf``."""
    eval_sets: dict[str, str] = field(default_factory=dict)
    """Folder of each set of ``data.eval``, by name."""
    generation: int = 0
    """Number of the attempt."""
    stores: list[str] | None = None
    """The stores of checkpoints that the run has locked; None for all that the job names."""
    placement: list[list[int]] | None = None
    """Node and device of each rank; None: in order, as many on each node as it has devices."""
    full_plan: str | None = None
    """The plan, in the run folder, for all devices of the run; None if it is the current one."""
    corpus: dict[str, Any] | None = None
    """What is in ``data_dir`` (``data.epochs.CorpusState``); later documents are left out. None: all."""
    attempt: int = 0
    """When the attempt began, in milliseconds since 1970: names its drafts in object stores."""

    def write(self) -> None:
        """Write it next to the plan."""
        path = Path(self.run_dir) / ASSIGNMENT_FILE
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> Assignment:
        """Read it from a run's folder."""
        return cls(**json.loads((run_dir / ASSIGNMENT_FILE).read_text(encoding="utf-8")))

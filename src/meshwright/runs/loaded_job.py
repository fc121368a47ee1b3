"""A job with where it came from: the file and the overrides decide what the planner may change."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.spec.job import Job
from meshwright.spec.load import is_named, load_job, named_layout_keys, require_runnable
from meshwright.spec.presets import preset_names


@dataclass(frozen=True)
class LoadedJob:
    """A checked job, its source and its overrides."""

    source: str
    """Job file, plan file, or name of a model preset."""
    overrides: tuple[str, ...]
    on: str | None
    """Cluster given in place of the job's."""
    spec: Job = field(repr=False)

    @classmethod
    def load(
        cls, source: str, overrides: tuple[str, ...] = (), on: str | None = None, *, to_run: bool = False
    ) -> LoadedJob:
        """Read and check a job.

        Args:
            source: Path of a job or plan file, or the name of a model preset.
            overrides: ``key.path=value`` texts.
            on: A cluster such as ``8x8xh100-sxm`` in place of the job's.
            to_run: Whether the job must be one that this version can run, not only plan.
        """
        return cls(source, tuple(overrides), on, load_job(source, overrides, on, to_run=to_run))

    def named_layout_keys(self) -> list[str]:
        """Layout keys that the user wrote; the planner keeps their values."""
        return named_layout_keys(self.source, self.overrides)

    def names(self, key: str) -> bool:
        """Whether the user set a key, in the file or as an override."""
        return is_named(self.source, self.overrides, key)

    def with_overrides(self, *more: str, to_run: bool = True) -> LoadedJob:
        """The same source with further overrides."""
        return self.load(self.source, (*self.overrides, *more), self.on, to_run=to_run)

    def require_not_preset(self) -> None:
        """Check that the job is more than a bare preset.

        Raises:
            UserError: A preset alone can be planned, not run.
        """
        if not Path(self.source).exists() and self.source in preset_names("models"):
            rule = "is a model preset: it does not say what data to train on, nor how long"
            fix = f"Write a job file: meshwright init --model {self.source}"
            raise UserError(Problem("train-needs-job", rule, path=self.source, fix=fix))

    def require_runnable(self) -> None:
        """Check that this version can run the job, not only plan it.

        Raises:
            UserError: It is a bare preset, or the runtime does not support its layout.
        """
        self.require_not_preset()
        require_runnable(self.spec)

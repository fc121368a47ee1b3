"""Runs in the public API: the folder of a run, what was planned and what was measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.saved import evaluate

if TYPE_CHECKING:
    from meshwright.audit.compare import Audit
    from meshwright.audit.record import RunRecord
    from meshwright.elastic.hang import Verdict
    from meshwright.plan.contract import PlanContract
    from meshwright.report.pipeline_run import PipelineRun
    from meshwright.report.run_list import RunSummary
    from meshwright.report.run_report import RunReport
    from meshwright.runs.evaluate import Evaluation, HeldOutData


@dataclass(frozen=True)
class Run:
    """A run folder: what was planned and what was measured. Made by :meth:`Job.train` or :func:`load_run`."""

    run_dir: Path
    contract: PlanContract
    """The plan that the run was started with: ``plan.toml`` of the folder."""
    record: RunRecord
    """What the ranks reported, over all attempts in the folder."""
    _audit: Audit
    page: Path | None = None
    """The report page, if it was written."""
    rank: int = 0
    """This process's rank under torchrun; 0 otherwise."""
    by_ctrl_c: bool = False
    """Whether Ctrl-C stopped it just now, and not SIGTERM or SIGHUP."""

    @property
    def status(self) -> str:
        """``complete``, ``interrupted``, ``failed`` or ``unfinished``."""
        return self.record.outcome

    @property
    def losses(self) -> list[float | None]:
        """Training loss of each step of all attempts, as the last one that did the step has it.

        None for a step without target tokens.
        """
        return self.record.losses

    @property
    def eval_loss(self) -> float | None:
        """Newest loss on held-out data."""
        return self.record.eval_loss

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all ranks, by the median step."""
        return self.record.tokens_per_s

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, by the median step."""
        return self.record.mfu

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return None if self.record.checkpoint is None else Path(self.record.checkpoint)

    def audit(self) -> Audit:
        """Memory and collectives, predicted and measured. ``ok`` is True if all match."""
        return self._audit

    @functools.cached_property
    def pipeline(self) -> PipelineRun | None:
        """Planned, simulated and measured pipeline bubble; None without pipeline parallelism."""
        from meshwright.report.pipeline_run import find_pipeline  # noqa: PLC0415

        return find_pipeline(self.contract, self.record)

    def report(self) -> RunReport:
        """Curves, memory and audit over all attempts in the folder."""
        from meshwright.report.run_report import read_report  # noqa: PLC0415

        return read_report(self.run_dir)

    def write_page(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML page, ``report.html`` in the run folder if no path is given."""
        from meshwright.report.html import write_page  # noqa: PLC0415
        from meshwright.report.run_report import PAGE_FILE  # noqa: PLC0415

        page = self.run_dir / PAGE_FILE if path is None else Path(path)
        write_page(self.report(), page)
        return page

    def evaluate(
        self, data: HeldOutData, *overrides: str, samples: int | None = None, precision: str = "fp32"
    ) -> list[Evaluation]:
        """Evaluate the newest checkpoint on held-out sets; arguments as in :func:`evaluate`."""
        return evaluate(self.run_dir, data, *overrides, samples=samples, precision=precision)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright train --json``."""
        from meshwright.runs.summary import summarize_run  # noqa: PLC0415

        return summarize_run(self.contract, self.record, self._audit, self.run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, status={self.status!r}, steps={len(self.losses)})"


def load_run(run_dir: str | Path) -> Run:
    """Read the folder of a run, finished or not.

    Raises:
        UserError: It is not a run folder.
    """
    from meshwright.audit.compare import audit_run  # noqa: PLC0415
    from meshwright.audit.event_scan import read_record  # noqa: PLC0415
    from meshwright.plan.contract import PLAN_FILE, read_earlier_plans, read_plan  # noqa: PLC0415

    folder = Path(run_dir)
    record = read_record(folder)
    plan = read_plan(folder / PLAN_FILE)
    return Run(folder, plan, record, audit_run(plan, record, read_earlier_plans(folder)))


def find_hang(run_dir: str | Path) -> Verdict:
    """What a run that trains now on this machine waits for: the object of ``meshwright hang``.

    Watches it for two seconds. ``is_hang`` is False if it makes progress.

    Raises:
        UserError: It is not a run folder, it does not run here, or torchrun started it.
    """
    from meshwright.runs.hang import inspect_run  # noqa: PLC0415

    return inspect_run(Path(run_dir))


def list_runs(folder: str | Path = "runs") -> list[RunSummary]:
    """The runs in a folder, newest first.

    Raises:
        UserError: It is not a folder, or cannot be read.
    """
    from meshwright.report.run_list import list_runs as list_folder  # noqa: PLC0415

    return list_folder(Path(folder))

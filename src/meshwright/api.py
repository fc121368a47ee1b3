"""The public API: load a job, plan it, train it, check it.

Calls return objects and print nothing; pass a :class:`Reporter` to follow a long one. Planning needs no
torch. Training starts one process per rank on this machine; under ``torchrun`` the calling process is a rank.

    import meshwright as mw

    job = mw.load_job("job.toml", "train.steps=20")
    plan = job.plan()
    run = job.train()
    assert run.audit().ok

Runs are in ``run_folder.py``, saved models in ``saved.py``, job files in ``job_files.py``, pipeline schedules
in ``timelines.py``: this module has their names, too. Types of results are in ``results.py``.

Modules are imported when a function needs them: loading a job is fast, and training starts loading torch for
the ranks before this process loads the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from meshwright.collectives import (
    ProvedCollective,
    bench_collectives,
    build_collective,
    compare_collectives,
    draw_comparison,
    prove_collective,
    validate_collectives,
)
from meshwright.core.arguments import as_list
from meshwright.core.errors import require_argument
from meshwright.job_files import WrittenJob, find_nearest_legal, job_schema, write_job
from meshwright.run_folder import Run, find_hang, list_runs, load_run
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import SILENT, Reporter
from meshwright.saved import (
    copy_checkpoints,
    evaluate,
    export_checkpoint,
    generate,
    list_checkpoints,
    prune_checkpoints,
)
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job as JobSpec
from meshwright.spec.layout import Layout
from meshwright.timelines import (
    SimulatedSchedule,
    build_schedule,
    load_schedule,
    prove_schedule,
    simulate_schedule,
    write_trace,
)

if TYPE_CHECKING:
    from meshwright.data.pipeline.wordcount import WordCount
    from meshwright.data.prepare import PrepareReport
    from meshwright.layout.no_effect import UnusedSetting
    from meshwright.plan.contract import CollectiveTraffic, PlanContract, RankPrediction
    from meshwright.plan.search.find import Objective, SearchResult
    from meshwright.runs.dry_run import DryRun
    from meshwright.runs.explain import LayoutExplanation
    from meshwright.runs.faults.suite import FaultReport
    from meshwright.runs.probe import ProbeResult
    from meshwright.runs.prove import Proof
    from meshwright.runs.scaling import ScalingResult
    from meshwright.runs.size import SizedCluster
    from meshwright.runs.tune import TuneResult
    from meshwright.simulate.months import FailureSimulation
    from meshwright.simulate.step import StepTimeline
    from meshwright.validation.metrics import Validation

__all__ = [
    "FailureSettings",
    "Job",
    "Plan",
    "ProvedCollective",
    "Reporter",
    "Run",
    "SimulatedSchedule",
    "WrittenJob",
    "bench_collectives",
    "build_collective",
    "build_schedule",
    "compare_collectives",
    "copy_checkpoints",
    "count_words",
    "draw_comparison",
    "evaluate",
    "export_checkpoint",
    "find_hang",
    "find_nearest_legal",
    "generate",
    "job_schema",
    "join_run",
    "list_checkpoints",
    "list_runs",
    "load_job",
    "load_run",
    "load_schedule",
    "prepare_corpus",
    "probe",
    "prove_collective",
    "prove_schedule",
    "prune_checkpoints",
    "run_faults",
    "simulate_schedule",
    "validate",
    "validate_collectives",
    "write_job",
    "write_trace",
]


def load_job(source: str | Path, *overrides: str, on: str | None = None, to_run: bool = False) -> Job:
    """Read and check a job.

    Args:
        source: Path of a job file or a plan file, or the name of a model preset.
        overrides: ``key.path=value`` texts over the file's keys; the last one wins.
        on: A cluster such as ``8x8xh100-sxm`` (nodes x devices x preset) in place of the job's.
        to_run: Also check now that this version can run the job. Training checks it in any case.

    Raises:
        UserError: The job has mistakes; the error lists all of them.
    """
    for override in overrides:
        require_argument(
            isinstance(override, str), "override", override, "must be a text such as 'train.steps=20'"
        )
    return Job(LoadedJob.load(str(source), overrides, on, to_run=to_run))


@dataclass(frozen=True)
class Job:
    """A checked job. Make one with :func:`load_job`."""

    loaded: LoadedJob

    def __repr__(self) -> str:
        return f"Job({', '.join(map(repr, (str(self.loaded.source), *self.loaded.overrides)))})"

    @property
    def spec(self) -> JobSpec:
        """The settings: model, cluster, data, train, layout, checkpoint."""
        return self.loaded.spec

    @property
    def name(self) -> str:
        """Name of the job; run folders are called after it."""
        return self.spec.name

    def plan(
        self, *, by: Objective = "time", top: int = 50, explain: bool = True, reporter: Reporter = SILENT
    ) -> Plan:
        """Search the layouts, or predict the one that the job gives. Needs no torch.

        Args:
            by: What the best layout minimises: ``time`` of a step, ``cost`` in device time, or ``memory``.
            top: Number of layouts that are predicted exactly and returned as alternatives.
            explain: Whether the reasons compare the choice with its neighbours.
            reporter: Receives the progress of a long search.

        Raises:
            UserError: No layout fits; the error names changes that would.
        """
        from meshwright.plan.search.find import Objective  # noqa: PLC0415
        from meshwright.runs.planning import plan_job  # noqa: PLC0415

        objectives = get_args(Objective)
        require_argument(by in objectives, "by", by, f"must be one of {', '.join(objectives)}")
        require_argument(
            isinstance(top, int) and top >= 1, "top", top, "must be a whole number of at least 1"
        )
        return Plan(*plan_job(self.loaded, by, top, explain, reporter))

    def explain(self, *layout: str, reporter: Reporter = SILENT) -> LayoutExplanation:
        """Explain one layout, legal or not: why it is illegal or slower than the best.

        Args:
            layout: Its keys, such as ``layout.tp=4``.
            reporter: Receives the progress of the search for the best layout.
        """
        from meshwright.runs.explain import explain_layout  # noqa: PLC0415

        for key in layout:
            require_argument(isinstance(key, str), "layout", key, "must be a text such as 'layout.tp=4'")
        return explain_layout(self.loaded, layout, reporter)

    def size_cluster(
        self,
        tokens: float,
        deadline_s: float | None = None,
        max_cost: float | None = None,
        *,
        reporter: Reporter = SILENT,
    ) -> SizedCluster:
        """Find the smallest cluster that trains on ``tokens`` before a deadline and within a budget in USD.

        Without a deadline, find the fastest cluster within the budget.

        Raises:
            UserError: No cluster meets the limits; or the job is not a decoder on GPUs with an open layout.
        """
        from meshwright.plan.sizing import Goal  # noqa: PLC0415
        from meshwright.runs.size import size_job  # noqa: PLC0415

        limits = deadline_s is not None or max_cost is not None
        require_argument(limits, "deadline_s", None, "or max_cost must be given")
        for name, value in (("tokens", tokens), ("deadline_s", deadline_s), ("max_cost", max_cost)):
            require_argument(value is None or 0 < value < math.inf, name, value, "must be a number above 0")
        return size_job(self.loaded, Goal(tokens, deadline_s, max_cost), reporter)

    def train(
        self,
        *,
        resume: bool = False,
        listen: str | None = None,
        token_file: Path | None = None,
        reporter: Reporter = SILENT,
    ) -> Run:
        """Plan if needed, train, audit, and write the run's report page.

        Starts one process per rank on this machine. Under torchrun this process is one of the ranks: rank 0
        plans for all. A plain script needs no ``if __name__ == "__main__"``.

        Args:
            resume: Continue from the newest checkpoint.
            listen: ``HOST:PORT`` where agents of other nodes join, with ``cluster.nodes > 1``.
            token_file: The token that agents must have; written with mode 0600 if it does not exist.
            reporter: Receives messages, progress and the events of the ranks.

        Raises:
            UserError: The job cannot run here. Nothing has been written.
            RunFailedError: A rank died; ``error.run_dir`` is the folder of the run.
            InterruptedRunError: The run was stopped at once, without a checkpoint.
        """
        from meshwright.launch.network import ListenOptions  # noqa: PLC0415
        from meshwright.runs.start import start_training  # noqa: PLC0415

        trained = start_training(self.loaded, resume, reporter, listen=ListenOptions(listen, token_file))
        facts = (trained.run_dir, trained.plan, trained.record, trained.audit, trained.page)
        return Run(*facts, rank=trained.rank, by_ctrl_c=trained.by_ctrl_c)

    def prove(self, *, reporter: Reporter = SILENT) -> Proof:
        """Show that the layout computes what one process computes: losses, gradients, updates.

        Raises:
            UserError: The job cannot run, or its loss depends on the layout (batch norm).
            RunFailedError: A rank died.
        """
        from meshwright.runs.prove import prove_job  # noqa: PLC0415

        return prove_job(self.loaded, reporter)

    def dry_run(self, rank: int = 0, *, reporter: Reporter = SILENT) -> DryRun:
        """Build one rank with fake tensors, run one step, and compare it with the plan. Needs no devices.

        Raises:
            UserError: The layout does not run, has no such rank, or the model is not a decoder.
        """
        from meshwright.runs.dry_run import dry_run_job  # noqa: PLC0415

        return dry_run_job(self.loaded, rank, reporter)

    def tune(self, out: Path, *, top: int = 3, steps: int = 8, reporter: Reporter = SILENT) -> TuneResult:
        """Run the planner's best layouts for a few steps each, and fit the cluster's rates to them.

        Args:
            out: Where the recalibrated cluster file goes.
            top: Layouts to run.
            steps: Steps of each; the first three are warm-up.
            reporter: Receives the progress.
        """
        from meshwright.runs.tune import tune_job  # noqa: PLC0415

        return tune_job(self.loaded, out, top, steps, reporter)

    def bench_scaling(
        self,
        *,
        ranks: int | Sequence[int] | None = None,
        steps: int = 12,
        weak: bool = False,
        reporter: Reporter = SILENT,
    ) -> ScalingResult:
        """Measure speed-up, efficiency and overlap on 1 to N data-parallel ranks.

        Args:
            ranks: Numbers of ranks; powers of two up to all devices if left out.
            steps: Steps of each; the first three are warm-up.
            weak: Whether the global batch grows with the ranks.
            reporter: Receives the progress.
        """
        from meshwright.runs.scaling import bench_scaling  # noqa: PLC0415

        return bench_scaling(self.loaded, None if ranks is None else as_list(ranks), steps, weak, reporter)

    def simulate_failures(
        self,
        days: float = 54.0,
        *,
        runs: int = 10_000,
        seed: int = 0,
        settings: FailureSettings | None = None,
    ) -> FailureSimulation:
        """Simulate failures of long runs of this job on its whole cluster. Needs no torch.

        Args:
            days: Length of each run.
            runs: Number of simulated runs.
            seed: Seed of the failures.
            settings: Checkpoint interval, spares, times and rates; defaults if left out.

        Raises:
            UserError: A length, rate or time is out of range.
        """
        from meshwright.simulate.months import simulate_job  # noqa: PLC0415

        return simulate_job(self.spec, days, runs, seed, settings or FailureSettings())

    def simulate_step(self, *, reporter: Reporter = SILENT) -> StepTimeline:
        """Plan this job, and simulate one step of the chosen layout. Needs no torch and no devices.

        Raises:
            UserError: No layout fits; the error names changes that would.
        """
        return self.plan(top=1, explain=False, reporter=reporter).simulate_step()


@dataclass(frozen=True)
class Plan:
    """A chosen layout with its predictions, and the alternatives. Made by :meth:`Job.plan`."""

    contract: PlanContract
    """The plan as it is written to ``plan.toml`` and audited."""
    search: SearchResult
    """All predicted layouts, best first, and how many were searched."""

    @property
    def layout(self) -> Layout:
        """The chosen layout."""
        return self.contract.job.layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.contract.world_size

    @property
    def memory(self) -> dict[str, RankPrediction]:
        """Predicted memory by rank class; ranks with the same pp rank are identical."""
        return self.contract.classes()

    @property
    def collectives(self) -> tuple[CollectiveTraffic, ...]:
        """Predicted calls and bytes per rank of each collective, by axis and phase."""
        return self.contract.collectives

    @property
    def placement(self) -> list[tuple[int, int]]:
        """Node and device of each rank."""
        return self.contract.rank_placement.as_pairs()

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.contract.step_s

    @property
    def step_range_s(self) -> tuple[float, float]:
        """Low and high bound of the predicted time of a step."""
        from meshwright.report.plan_facts import find_step_range  # noqa: PLC0415

        found = find_step_range(self.contract)
        return found.low_s, found.high_s

    @property
    def mfu(self) -> float:
        """Predicted model FLOP utilisation."""
        return self.contract.mfu

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this layout was chosen."""
        return self.contract.reasons

    @property
    def unused_settings(self) -> list[UnusedSetting]:
        """Settings of the job that have no effect in this layout, with the reasons."""
        from meshwright.layout.no_effect import find_unused_settings  # noqa: PLC0415

        return find_unused_settings(self.contract.job)

    def write(self, path: str | Path) -> None:
        """Write the plan as a file that ``meshwright train`` and :func:`load_job` read."""
        from meshwright.plan.contract import write_plan  # noqa: PLC0415

        write_plan(self.contract, Path(path))

    def draw(self, path: str | Path) -> None:
        """Draw the plan into an SVG, PNG or PDF file. Needs the extra ``plots``."""
        from meshwright.report.figure import save_figure  # noqa: PLC0415
        from meshwright.report.plan_plot import draw_plan, gather_picture  # noqa: PLC0415

        save_figure(draw_plan(gather_picture(self.contract, self.search)), Path(path))

    def simulate_step(self) -> StepTimeline:
        """One step as a timeline per pp rank: compute, collectives by axis, bubbles. It takes ``step_s``."""
        from meshwright.simulate.step import StepTimeline  # noqa: PLC0415

        return StepTimeline.of(self.contract)

    def as_dict(self, top: int = 50) -> dict[str, Any]:
        """The object of ``meshwright plan --json``."""
        from meshwright.runs.planning import summarize_search  # noqa: PLC0415

        return summarize_search(self.contract, self.search, top)

    def __repr__(self) -> str:
        return (
            f"Plan({self.layout.named_degrees() or 'one rank'}, step_s={self.step_s:.4g}, mfu={self.mfu:.3f})"
        )


def prepare_corpus(
    corpus: str | Path,
    *,
    engine: str | None = None,
    parallelism: int | None = None,
    address: str | None = None,
    report: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> PrepareReport:
    """Tokenize the text that a CORPUS.toml describes into shards. Every engine writes the same bytes.

    Args:
        corpus: The file.
        engine: ``reference``, ``embedded``, ``spark``, ``ray`` or ``flink``; ``embedded`` if left out, or
            ``reference`` where its packages are not installed.
        parallelism: Tasks at once; the cores of this machine if left out.
        address: Address of a Spark, Ray or Flink cluster that runs; a local one if left out.
        report: HTML page to write: sizes, duplicates, lengths, frequent words; the reporter gets it as text.
        reporter: Receives messages.

    Raises:
        UserError: A mistake in the file, no text, or an engine that is not installed.
    """
    from meshwright.data.corpus_spec import load_corpus_spec  # noqa: PLC0415
    from meshwright.runs.preparation import (  # noqa: PLC0415
        EngineChoice,
        check_report,
        prepare_with_progress,
        report_corpus,
    )

    path = Path(corpus)
    choice = EngineChoice(engine, parallelism, address)
    if report is not None:
        check_report(Path(report))
    prepared = prepare_with_progress(load_corpus_spec(path), path.parent, reporter, choice)
    for sentence in prepared.warnings:
        reporter.warning(sentence)
    if report is not None:
        report_corpus(prepared, Path(report), reporter)
    return prepared


def count_words(
    files: str | Sequence[str],
    *,
    engine: str | None = None,
    parallelism: int | None = None,
    address: str | None = None,
    top: int = 20,
    reporter: Reporter = SILENT,
) -> WordCount:
    """Count the words of files: the smallest pipeline. A word is what ``str.split()`` gives.

    Args:
        files: Files, folders or globs.
        engine: As for :func:`prepare_corpus`.
        parallelism: Tasks at once; the cores of this machine if left out.
        address: Address of a cluster that runs.
        top: How many of the most frequent words to name.
        reporter: Receives messages.

    Raises:
        UserError: A file is missing or has no text, or the engine is not installed.
    """
    from meshwright.runs.preparation import EngineChoice, count_words_with_progress  # noqa: PLC0415

    require_argument(top >= 1, "top", top, "is not a number of words; use 1 or more")
    choice = EngineChoice(engine, parallelism, address)
    return count_words_with_progress(as_list(files), Path.cwd(), reporter, choice, top)


def join_run(
    address: str,
    token_file: str | Path,
    *,
    run_dir: str | Path | None = None,
    wait_s: float = 60.0,
    reporter: Reporter = SILENT,
) -> bool:
    """Run the ranks of this node in a run that another machine supervises; returns whether it succeeded.

    Args:
        address: ``HOST:PORT``, where ``train`` listens.
        token_file: A copy of the token file of the run, with mode 0600.
        run_dir: Folder for the files and logs of this node; by default ``node-runs/NAME-node-N``.
        wait_s: How long to wait until the run listens.
        reporter: Receives messages.

    Raises:
        UserError: The token file cannot be used, or the run does not take this node.
        RunFailedError: No run answered, or its supervisor is gone.
    """
    from meshwright.runs.agent import join_run  # noqa: PLC0415

    folder = None if run_dir is None else Path(run_dir)
    return join_run(address, Path(token_file), folder, wait_s, reporter)


def probe(out: str | Path = "probed.toml", *, cpu: bool = False, reporter: Reporter = SILENT) -> ProbeResult:
    """Measure GEMMs, attention, memory bandwidth and real steps on this machine.

    Args:
        out: Where the cluster file goes; use it with ``cluster.file``.
        cpu: Probe the CPU even if there is a GPU.
        reporter: Receives the progress.
    """
    from meshwright.runs.probe import probe_machine  # noqa: PLC0415

    return probe_machine(Path(out), cpu, reporter)


def run_faults(
    *names: str,
    seed: int = 0,
    budget_s: float = 180.0,
    schedule: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> FaultReport:
    """Kill, stop and disturb ranks of a tiny job, and check that each run recovers as it should.

    Args:
        names: Tests by name or number, with ``/LAYOUT`` for one layout; all by default.
        seed: Seed of the faults.
        budget_s: Time for all; tests that do not fit are skipped.
        schedule: File with one fault per line, such as ``fail(rank=2, step=7)``: runs these instead.
        reporter: Receives the faults and the progress.

    Raises:
        UserError: A name is unknown, the file is not a schedule, or no test fits into the budget.
    """
    from meshwright.runs.faults.suite import run_faults as run  # noqa: PLC0415

    return run(names, seed, budget_s, None if schedule is None else Path(schedule), reporter)


def validate(
    tables: str | Path | Sequence[str | Path] = (), *, leave_one_source_out: bool = False
) -> Validation:
    """Predict published runs and our own; the package's tables if none is given.

    Args:
        tables: CSV files of runs.
        leave_one_source_out: Predict each row with rates that were fitted without its source.
    """
    from meshwright.validation.evaluate import bundled_tables, evaluate, evaluate_left_out  # noqa: PLC0415
    from meshwright.validation.limits import judge_limits, read_failed  # noqa: PLC0415
    from meshwright.validation.metrics import Validation  # noqa: PLC0415
    from meshwright.validation.published import read_rows  # noqa: PLC0415

    tables = as_list(tables)
    rows = [row for table in tables for row in read_rows(Path(table))]
    own = [] if tables and not leave_one_source_out else [r for t in bundled_tables() for r in read_rows(t)]
    judged = rows if tables else own
    outcomes = evaluate_left_out(judged, own) if leave_one_source_out else evaluate(judged)
    failed = [row for table in tables for row in read_failed(Path(table))] if tables else read_failed()
    limits = judge_limits(failed, judged) if failed else None
    return Validation(outcomes, leave_one_source_out, limits, given=bool(tables))

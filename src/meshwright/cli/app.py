"""The command line: arguments, exit status, and errors without tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.completion import complete_cluster, complete_key, complete_model
from meshwright.cli.output import Output, Verbosity
from meshwright.core.errors import MeshwrightError, UserError
from meshwright.core.version import __version__

if TYPE_CHECKING:
    from meshwright.plan.search.alternatives import NearestLegal

app = typer.Typer(
    name="meshwright",
    help="Plan, run and audit distributed training.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

checkpoint_app = typer.Typer(help="List, verify, export and delete checkpoints.", rich_markup_mode=None)
app.add_typer(checkpoint_app, name="checkpoint")
bench = typer.Typer(help="Measure this machine.", rich_markup_mode=None)
app.add_typer(bench, name="bench")
schedule_app = typer.Typer(help="Generate, prove and draw schedules.", rich_markup_mode=None)
app.add_typer(schedule_app, name="schedule")

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output; messages go to standard error."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Override keys of the job file, such as train.lr=3e-4.",
        metavar="KEY=VALUE",
        autocompletion=complete_key,
    ),
]
PlanSource = Annotated[
    str,
    typer.Argument(
        help="Job file, plan file, or model preset.", metavar="JOB", autocompletion=complete_model
    ),
]
JobSource = Annotated[str, typer.Argument(help="Job file or plan file.", metavar="JOB")]


def main() -> None:
    """Run a command and exit with its status."""
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="meshwright", standalone_mode=False)
    except typer.Abort:
        status = 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        # Typer has a private copy of click: usage errors are recognised by this method.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        if context is not None:
            sys.stderr.write(f"{context.get_usage()}\n")
        from meshwright.cli.usage import describe_usage  # noqa: PLC0415  (only when something is wrong)

        wrong = UserError(describe_usage(error))
        Output(as_json="--json" in sys.argv).failure(wrong)
        status = wrong.exit_status
    sys.exit(status if isinstance(status, int) else 0)


def guarded(output: Output, command: Callable[[], int | None]) -> None:
    """Run a command; errors become messages and an exit status."""
    try:
        status = command() or 0
    except MeshwrightError as error:
        near = _find_near(error)
        facts = {"nearest": [one.as_dict() for one in near]} if near else None
        output.failure(error, [one.line for one in near], facts=facts)
        status = error.exit_status
    except KeyboardInterrupt:
        output.errors.print("interrupted")
        status = 130
    raise typer.Exit(status)


def _find_near(error: MeshwrightError) -> list[NearestLegal]:
    """The nearest legal layouts, if a rule forbids the job's layout."""
    from meshwright.spec.load import SpecError  # noqa: PLC0415  (only when something is wrong)

    if not isinstance(error, SpecError) or error.job is None:
        return []
    from meshwright.plan.search.alternatives import find_nearest_legal  # noqa: PLC0415

    return find_nearest_legal(error.job, error.problems)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, run and audit distributed training."""


class RankBy(StrEnum):
    """What the best layout minimises."""

    time = "time"
    cost = "cost"
    memory = "memory"


@app.command()
def init(
    model: Annotated[
        str | None, typer.Option(help="Model preset, or Hugging Face folder.", autocompletion=complete_model)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File, folder or glob of text. Default: built-in data.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Number of devices, or a cluster such as 8x8xh100-sxm. Default: this machine.",
            autocompletion=complete_cluster,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Job file to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented job file. Asks on a terminal for what is not given."""
    from meshwright.cli.init import InitRequest, init_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: init_job(output, InitRequest(model, data, gpus, out, force)))


@app.command()
def plan(  # noqa: PLR0913, PLR0917  (options of a command)
    job: PlanSource,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Cluster: nodes x devices x preset, such as 8x8xh100-sxm.", autocompletion=complete_cluster
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 50,
    by: Annotated[
        RankBy, typer.Option(help="What to minimise: step time, device time, or memory.")
    ] = RankBy.time,
    why: Annotated[
        list[str] | None,
        typer.Option(
            help="Explain one layout, legal or not: layout.tp=4 layout.pp=8 ...", metavar="KEY=VALUE"
        ),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Size the cluster for this many training tokens, such as 15e12.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Deadline for --tokens: 12h, 90d, 2w.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Budget for --tokens, in USD.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot the plan into a .svg, .png or .pdf file.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the best plan to this file.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all reasons and tables, not the answer only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict memory, communication and step time of all layouts, and rank them. Needs no torch."""
    from meshwright.cli.plan import PlanRequest, show_plan  # noqa: PLC0415

    output = Output(as_json)
    request = PlanRequest(
        source=job,
        overrides=tuple(overrides or ()),
        on=on,
        top=top,
        by=by.value,
        why=tuple(why or ()),
        tokens=tokens,
        deadline=deadline,
        max_cost=max_cost,
        picture=picture,
        out=out,
        verbose=verbose,
    )
    guarded(output, lambda: show_plan(output, request))


@app.command()
def validate(
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="CSV table of measured runs; can be repeated. Default: the bundled table."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot predicted against published into a .svg, .png or .pdf file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict published training runs and print the prediction errors."""
    from meshwright.cli.validate import show_validation  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_validation(output, runs or [], picture))


def _choose_verbosity(verbose: bool, quiet: bool) -> Verbosity:
    """How much to print; ``--quiet`` wins over ``-v``."""
    if quiet:
        return Verbosity.quiet
    return Verbosity.verbose if verbose else Verbosity.normal


@app.command()
def train(
    job: JobSource,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all tables of the plan and the audit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings, errors and the result only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a job: plan if needed, run, and audit the run against the plan."""
    from meshwright.cli.train import run_training  # noqa: PLC0415

    output = Output(as_json, _choose_verbosity(verbose, quiet))
    guarded(output, lambda: run_training(output, job, overrides or [], resume))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Plot the pipeline, simulated and measured, into a .svg, .png or .pdf file."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare memory and communication of a run with its plan."""
    from meshwright.cli.audit import audit_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: audit_folder(output, run, out))


@app.command()
def prove(job: JobSource, overrides: Overrides = None, as_json: Json = False) -> None:
    """Prove that the layout computes the same losses and gradients as one process."""
    from meshwright.cli.prove import prove_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prove_job(output, job, overrides or []))


@app.command("dry-run")
def dry_run(
    job: PlanSource,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(help="Rank to build.")] = 0,
    on: Annotated[
        str | None,
        typer.Option(
            help="Cluster: nodes x devices x preset, such as 8x8xh100-sxm.", autocompletion=complete_cluster
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build one rank with fake tensors, run one step, and compare it with the plan. Needs no devices."""
    from meshwright.cli.dry_run import dry_run_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: dry_run_job(output, job, overrides or [], rank, on))


@app.command()
def tune(
    job: JobSource,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option(help="Number of layouts to run, best predictions first.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps per layout; the first three are warm-up.")] = 8,
    out: Annotated[Path, typer.Option("--out", "-o", help="Cluster file to write.")] = Path("cluster.toml"),
    as_json: Json = False,
) -> None:
    """Run the planner's best layouts on this machine, and calibrate a cluster file to the measured times."""
    from meshwright.cli.tune import tune_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: tune_job(output, job, overrides or [], top, steps, out))


@app.command()
def probe(
    out: Annotated[Path, typer.Option("--out", "-o", help="Cluster file to write.")] = Path("probed.toml"),
    cpu: Annotated[bool, typer.Option("--cpu", help="Probe the CPU even if there is a GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Time GEMMs, attention, memory and real steps on this machine, and write a cluster file."""
    from meshwright.cli.probe import probe_machine  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: probe_machine(output, cpu, out))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of run folders.", metavar="DIR")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, newest first: status, steps, loss and audit."""
    from meshwright.cli.runs import show_runs  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_runs(output, folder))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write. Default: RUN/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a run's curves and audit, and write an HTML report."""
    from meshwright.cli.runs import show_report  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_report(output, run, out))


@app.command()
def hang(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")], as_json: Json = False
) -> None:
    """Say what a running run waits for: the rank, the collective, the source line and the cause."""
    from meshwright.cli.hang import show_hang  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_hang(output, run))


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint, folder of checkpoints, run folder, or Hugging Face folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user message, in the model's chat template.")
    ] = False,
    template: Annotated[str | None, typer.Option(help="The same, in this chat template.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many tokens; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    as_json: Json = False,
) -> None:
    """Generate text from a checkpoint."""
    from meshwright.cli.generate import write_text  # noqa: PLC0415

    output = Output(as_json)
    settings: dict[str, Any] = {
        "prompt": prompt,
        "chat": chat,
        "template": template,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "tp": tp,
    }
    guarded(output, lambda: write_text(output, checkpoint, settings))


@app.command("eval")
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            help="Run folder, checkpoint, folder of checkpoints, or Hugging Face folder.", metavar="MODEL"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Override keys of [data], such as data.seq_len=512.", metavar="KEY=VALUE"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Held-out set: PATH or NAME=PATH. Repeat it for several.", metavar="SET"),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per set. Default: all.")] = None,
    precision: Annotated[str, typer.Option(help="Precision of the GEMMs: fp32, bf16 or fp16.")] = "fp32",
    as_json: Json = False,
) -> None:
    """Evaluate a saved model on held-out sets: loss, perplexity and accuracy."""
    from meshwright.cli.evaluate import evaluate_sets  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: evaluate_sets(output, model, data or [], overrides or [], samples, precision))


@app.command()
def prepare(
    corpus: Annotated[Path, typer.Argument(help="Corpus file (TOML).", metavar="CORPUS.toml")],
    as_json: Json = False,
) -> None:
    """Tokenize a corpus into shards."""
    from meshwright.cli.prepare import prepare_file  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prepare_file(output, corpus))


Checkpoints = Annotated[Path, typer.Argument(help="Folder of checkpoints, or run folder.", metavar="DIR")]


@checkpoint_app.command("list")
def list_checkpoints(path: Checkpoints, as_json: Json = False) -> None:
    """List checkpoints with step, size and state."""
    from meshwright.cli.checkpoint import list_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: list_folder(output, path))


@checkpoint_app.command()
def verify(path: Checkpoints, as_json: Json = False) -> None:
    """Verify the checksums of all files of the checkpoints."""
    from meshwright.cli.checkpoint import verify_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: verify_folder(output, path))


@checkpoint_app.command("prune")
def prune_checkpoints(
    path: Checkpoints,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    as_json: Json = False,
) -> None:
    """Delete old checkpoints; the newest complete one and the best one stay."""
    from meshwright.cli.checkpoint import prune_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prune_folder(output, path, keep))


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@checkpoint_app.command()
def export(
    path: Annotated[
        Path, typer.Argument(help="Checkpoint, folder of checkpoints, or run folder.", metavar="DIR")
    ],
    out: Annotated[Path, typer.Argument(help="New or empty folder to write.", metavar="OUT")],
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the weights. Default: as in model.hf; float32 without it."),
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=1e-9, help="Largest weight file, in 10^9 bytes.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face folder."""
    from meshwright.cli.checkpoint import export_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: export_folder(output, path, out, dtype.value if dtype else None, shard_gb))


@bench.command()
def scaling(
    job: JobSource,
    overrides: Overrides = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, such as 1,2,4. Default: powers of two up to all devices."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps per number of ranks; the first three are warm-up.")] = 12,
    weak: Annotated[
        bool, typer.Option("--weak", help="Weak scaling: the global batch grows with the ranks.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Plot to write: .svg, .png or .pdf.")] = Path(
        "scaling.svg"
    ),
    as_json: Json = False,
) -> None:
    """Measure speed-up, efficiency and communication overlap on 1 to N data-parallel ranks."""
    from meshwright.cli.bench import bench_scaling  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: bench_scaling(output, job, overrides or [], ranks, steps, weak, out))


@schedule_app.command()
def pipeline(  # noqa: PLR0913, PLR0917  (options of a command)
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipe-v, as layout.schedule. Default: 1f1b."
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks, as layout.pp. Default: 4.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step. Default: 8.")] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages per rank. Default: what the schedule needs.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Custom schedule instead: CSV, one row per rank, cells such as 0F0.")
    ] = None,
    forward: Annotated[
        str, typer.Option(help="Forward time of a stage, or one per stage, as 1,1,1,2.")
    ] = "1",
    backward: Annotated[
        str, typer.Option(help="Backward time; input and weight gradient separately as 1.2+0.8.")
    ] = "2",
    transfer: Annotated[str, typer.Option(help="Transfer time between stages, or one per transfer.")] = "0",
    blocking: Annotated[
        bool, typer.Option("--blocking", help="Blocking sends: a rank waits until its data have arrived.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Plot to write: .svg, .png or .pdf.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the schedule as CSV, for --file and for torch.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate or load a pipeline schedule, prove it, simulate it and draw its timeline."""
    from meshwright.cli.schedule import ScheduleRequest, TimeOptions, show_pipeline  # noqa: PLC0415

    output = Output(as_json)
    request = ScheduleRequest(schedule, stages, micro_batches, virtual_stages, file)
    times = TimeOptions(forward, backward, transfer)
    guarded(output, lambda: show_pipeline(output, request, times, blocking, out, save))


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of the job file."""
    import json  # noqa: PLC0415

    from meshwright.spec.validation_errors import job_schema  # noqa: PLC0415

    typer.echo(json.dumps(job_schema(), indent=None if as_json else 2))

"""The command line: parsing, the exit status, and errors without tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.output import Output
from meshwright.core.errors import MeshwrightError, Problem, UserError
from meshwright.core.version import __version__

if TYPE_CHECKING:
    from meshwright.plan.search.alternatives import NearestLegal

app = typer.Typer(
    name="meshwright",
    help="Plans, runs, survives and explains distributed training.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

checkpoint_app = typer.Typer(help="What is kept of runs.", rich_markup_mode=None)
app.add_typer(checkpoint_app, name="checkpoint")
bench = typer.Typer(help="Measure this machine.", rich_markup_mode=None)
app.add_typer(bench, name="bench")
schedule_app = typer.Typer(help="Schedules: generate, prove and draw.", rich_markup_mode=None)
app.add_typer(schedule_app, name="schedule")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.path=value, laid over the job file.", metavar="KEY=VALUE")
]
PlanSource = Annotated[
    str, typer.Argument(help="Job file, plan file, or name of a model preset.", metavar="JOB")
]
JobSource = Annotated[str, typer.Argument(help="Job file or plan file.", metavar="JOB")]


def main() -> None:
    """Run a command and exit with its status."""
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Abort:
        status = 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        # Typer carries its own copy of click, under a private name: its usage errors are known by their form.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        if context is not None:
            sys.stderr.write(f"{context.get_usage()}\n")
        message = error.format_message()
        if context is not None and message.startswith("Missing command"):
            message = f"name a command: {', '.join(context.command.list_commands(context))}"
        wrong = UserError(Problem("cli-usage", message))
        Output(as_json="--json" in sys.argv).failure(wrong)
        status = wrong.exit_status
    sys.exit(status if isinstance(status, int) else 0)


def guarded(output: Output, command: Callable[[], int | None]) -> None:
    """Run a command's body; our errors become messages and an exit status."""
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
    """The nearest legal layouts, where a rule refuses a job's layout."""
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
    """Plans, runs, survives and explains distributed training."""


class RankBy(StrEnum):
    """What the best layout has most, or least, of."""

    time = "time"
    cost = "cost"
    memory = "memory"


@app.command()
def plan(  # noqa: PLR0913, PLR0917  (the options of a command are what it can be asked)
    job: PlanSource,
    overrides: Overrides = None,
    on: Annotated[
        str | None, typer.Option(help="Cluster: nodes x devices x preset, such as 8x8xh100-sxm.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 50,
    by: Annotated[
        RankBy, typer.Option(help="Best is: the shortest step, the least device time, the least memory.")
    ] = RankBy.time,
    why: Annotated[
        list[str] | None,
        typer.Option(
            help="Explain this layout, legal or not: layout.tp=4 layout.pp=8 ...", metavar="KEY=VALUE"
        ),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Size the cluster: tokens to train on, such as 15e12.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Time for them: 12h, 90d, 2w.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan: a .svg or .png file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the best plan to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Predict memory, bytes and time of the layouts, and rank them; explain one; size a cluster."""
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
        picture=picture,
        out=out,
    )
    guarded(output, lambda: show_plan(output, request))


@app.command()
def validate(
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Table of measured runs, CSV; may be given again. The package's own if left out."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw predicted over published into this SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict published runs and show how far off the predictions are."""
    from meshwright.cli.validate import show_validation  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_validation(output, runs or [], picture))


@app.command()
def train(
    job: JobSource,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Plan if needed, train, and audit the run against the plan."""
    from meshwright.cli.train import run_training  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: run_training(output, job, overrides or [], resume))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Draw a pipeline, simulated and measured: a .svg or .png file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the plan promised beside what the run did."""
    from meshwright.cli.audit import audit_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: audit_folder(output, run, out))


@app.command()
def prove(job: JobSource, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show that the layout computes what one process computes, or name the first module that differs."""
    from meshwright.cli.prove import prove_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prove_job(output, job, overrides or []))


@app.command("dry-run")
def dry_run(
    job: PlanSource,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(help="Which rank to build.")] = 0,
    on: Annotated[
        str | None, typer.Option(help="Cluster: nodes x devices x preset, such as 8x8xh100-sxm.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build one rank of any layout without devices or memory, take one step, compare with the plan."""
    from meshwright.cli.dry_run import dry_run_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: dry_run_job(output, job, overrides or [], rank, on))


@app.command()
def tune(
    job: JobSource,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option(help="Layouts to try, the best predictions first.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each; the first three are not counted.")] = 8,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the recalibrated cluster goes.")] = Path(
        "cluster.toml"
    ),
    as_json: Json = False,
) -> None:
    """Try the planner's best layouts on this machine, and write a cluster file that predicts closer."""
    from meshwright.cli.tune import tune_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: tune_job(output, job, overrides or [], top, steps, out))


@app.command()
def probe(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the cluster file goes.")] = Path(
        "probed.toml"
    ),
    cpu: Annotated[bool, typer.Option("--cpu", help="Probe a core, also where there is a GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Time products, attention, memory and real steps on this machine, and write a cluster file with them."""
    from meshwright.cli.probe import probe_machine  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: probe_machine(output, cpu, out))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.", metavar="DIR")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, newest first: how far they came and whether their plans held."""
    from meshwright.cli.runs import show_runs  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_runs(output, folder))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the page here; RUN/report.html if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run's curves, memory and audit, and write them as one HTML page."""
    from meshwright.cli.runs import show_report  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_report(output, run, out))


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a folder of them, a run, or a Hugging Face folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    template: Annotated[
        str | None, typer.Option(help="Chat template: the prompt is a user's message, the text its answer.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="0 always takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed, the same text.")] = 0,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share each matrix.")] = 1,
    as_json: Json = False,
) -> None:
    """Write text with a trained model."""
    from meshwright.cli.generate import write_text  # noqa: PLC0415

    output = Output(as_json)
    settings: dict[str, Any] = {
        "prompt": prompt,
        "template": template,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "tp": tp,
    }
    guarded(output, lambda: write_text(output, checkpoint, settings))


@app.command()
def prepare(
    corpus: Annotated[Path, typer.Argument(help="What to prepare, as TOML.", metavar="CORPUS.toml")],
    as_json: Json = False,
) -> None:
    """Turn text into token shards."""
    from meshwright.cli.prepare import prepare_file  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prepare_file(output, corpus))


Checkpoints = Annotated[Path, typer.Argument(help="A folder of checkpoints, or a run.", metavar="DIR")]


@checkpoint_app.command("list")
def list_checkpoints(path: Checkpoints, as_json: Json = False) -> None:
    """List checkpoints: step, size, and whether each is complete."""
    from meshwright.cli.checkpoint import list_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: list_folder(output, path))


@checkpoint_app.command()
def verify(path: Checkpoints, as_json: Json = False) -> None:
    """Compare every file of the checkpoints with its checksum."""
    from meshwright.cli.checkpoint import verify_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: verify_folder(output, path))


@checkpoint_app.command("prune")
def prune_checkpoints(
    path: Checkpoints,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest to keep.")],
    as_json: Json = False,
) -> None:
    """Remove old checkpoints; the newest whole one and the best one stay."""
    from meshwright.cli.checkpoint import prune_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prune_folder(output, path, keep))


class Dtype(StrEnum):
    """Types that weights are exported in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@checkpoint_app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a folder of them, or a run.", metavar="DIR")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.", metavar="OUT")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.float32,
    shard_gb: Annotated[
        float, typer.Option(min=1e-9, help="Largest file of weights, in 10^9 bytes; larger ones are cut.")
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    from meshwright.cli.checkpoint import export_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: export_folder(output, path, out, dtype.value, shard_gb))


@bench.command()
def scaling(
    job: JobSource,
    overrides: Overrides = None,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, such as 1,2,4; up to all devices if left out.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Rounds for each; the first three are not counted.")] = 12,
    weak: Annotated[bool, typer.Option("--weak", help="Let the global batch grow with the ranks.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the picture goes.")] = Path("scaling.svg"),
    as_json: Json = False,
) -> None:
    """Measure speed-up, efficiency and overlap of a job on 1 to N ranks."""
    from meshwright.cli.bench import bench_scaling  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: bench_scaling(output, job, overrides or [], ranks, steps, weak, out))


@schedule_app.command()
def pipeline(  # noqa: PLR0913, PLR0917  (the options of a command are what it can be asked)
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipe-v; as layout.schedule. 1f1b if left out."
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Ranks of the pipeline, as layout.pp; 4 if left out.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of one step; 8 if left out.")
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages of each rank; what the schedule needs if left out.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Your own schedule instead: CSV, a row a rank, cells such as 0F0.")
    ] = None,
    forward: Annotated[str, typer.Option(help="Time of a stage; or one for each, as 1,1,1,2.")] = "1",
    backward: Annotated[
        str, typer.Option(help="Of its backward pass; its parts for input and weights as 1.2+0.8.")
    ] = "2",
    transfer: Annotated[str, typer.Option(help="Time from one stage to the next, likewise.")] = "0",
    blocking: Annotated[
        bool, typer.Option("--blocking", help="A rank waits until what it sends has arrived.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the picture: a .svg or .png file.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the schedule as CSV, which --file and torch read.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate a pipeline schedule or load your own, prove it, and draw when each rank does what."""
    from meshwright.cli.schedule import ScheduleRequest, TimeOptions, show_pipeline  # noqa: PLC0415

    output = Output(as_json)
    wanted = ScheduleRequest(schedule, stages, micro_batches, virtual_stages, file)
    texts = TimeOptions(forward, backward, transfer)
    guarded(output, lambda: show_pipeline(output, wanted, texts, blocking, out, save))


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of the job file."""
    import json  # noqa: PLC0415

    from meshwright.spec.validation_errors import job_schema  # noqa: PLC0415

    typer.echo(json.dumps(job_schema(), indent=None if as_json else 2))

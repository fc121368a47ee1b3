"""The command line: arguments, exit status, and errors without tracebacks."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.completion import complete_cluster, complete_model
from meshwright.cli.groups import GROUPS
from meshwright.cli.options import JobSource, Json, Overrides, PlanSource, guarded
from meshwright.cli.output import Output, Verbosity
from meshwright.core.errors import UserError
from meshwright.core.version import __version__

app = typer.Typer(
    name="meshwright",
    help="Plan, run and audit distributed training.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for name, group in GROUPS.items():
    app.add_typer(group, name=name)


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
    """Objective of the planner."""

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
    text_field: Annotated[
        str | None, typer.Option(help="Field or column with the text. Default: the obvious one.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Job file to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented job file. Asks on a terminal for what is not given."""
    from meshwright.cli.init import InitRequest, init_job  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: init_job(output, InitRequest(model, data, gpus, text_field, out, force)))


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
        typer.Option(help="CSV table of measured runs; can be repeated. Default: the bundled tables."),
    ] = None,
    leave_one_source_out: Annotated[
        bool,
        typer.Option("--leave-one-source-out", help="Predict each run with rates fitted without its source."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Plot predicted against published into a .svg, .png or .pdf file.")
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Predict published NCCL all-reduce times instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict published training runs and print the prediction errors."""
    from meshwright.cli.validate import show_collectives, show_validation  # noqa: PLC0415

    output = Output(as_json)
    if collectives:
        guarded(output, lambda: show_collectives(output, runs or [], picture))
    else:
        guarded(output, lambda: show_validation(output, runs or [], picture, leave_one_source_out))


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
    listen: Annotated[
        str | None,
        typer.Option(help="Address for the agents of other nodes (cluster.nodes > 1).", metavar="HOST:PORT"),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Token that agents must have; written if it does not exist.")
    ] = None,
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
    guarded(output, lambda: run_training(output, job, overrides or [], resume, listen, token_file))


@app.command()
def agent(
    join: Annotated[
        str, typer.Option(help="Address of the run: --listen of meshwright train.", metavar="HOST:PORT")
    ],
    token_file: Annotated[Path, typer.Option(help="Copy of the token file of the run, with mode 0600.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs of this node. Default: node-runs/NAME-node-N.")
    ] = None,
    wait_s: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the run to listen.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Join a run on several nodes: start and watch the ranks of this node."""
    from meshwright.cli.agent import run_agent  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: run_agent(output, join, token_file, run_dir, wait_s))


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
def faults(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tests by name or number, with /LAYOUT for one layout, such as kill-rank/ddp. Default: all.",
            metavar="NAME",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    budget: Annotated[
        float, typer.Option(help="Seconds for all tests; those that do not fit are skipped.")
    ] = 180.0,
    schedule: Annotated[
        Path | None,
        typer.Option(help="File with one fault per line, such as fail(rank=2, step=7): runs these instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Kill, stop and disturb ranks of a tiny job, and check that each run recovers as it should."""
    from meshwright.cli.faults import check_faults  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: check_faults(output, names or [], seed, budget, schedule))


@app.command()
def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint, folder of checkpoints, run folder, or Hugging Face folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user message, in the model's chat template.")
    ] = False,
    template: Annotated[str | None, typer.Option(help="Chat template of the prompt; implies --chat.")] = None,
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
        str,
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


Engine = Annotated[
    str | None, typer.Option(help="reference, embedded (default), spark, ray or flink.", metavar="NAME")
]
Parallelism = Annotated[int | None, typer.Option(help="Tasks at once; by default the cores of this machine.")]
Address = Annotated[str | None, typer.Option(help="Address of a running Spark, Ray or Flink cluster.")]


@app.command()
def prepare(
    corpus: Annotated[Path, typer.Argument(help="Corpus file (TOML).", metavar="CORPUS.toml")],
    engine: Engine = None,
    parallelism: Parallelism = None,
    address: Address = None,
    report: Annotated[
        Path | None, typer.Option(help="HTML page to write: sizes, duplicates, lengths, frequent words.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenize a corpus into shards."""
    from meshwright.cli.prepare import prepare_file  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prepare_file(output, corpus, engine, parallelism, address, report))


@app.command()
def wordcount(
    files: Annotated[list[str], typer.Argument(help="Files, folders or globs.", metavar="FILES...")],
    engine: Engine = None,
    parallelism: Parallelism = None,
    address: Address = None,
    top: Annotated[int, typer.Option(help="How many of the most frequent words to name.")] = 20,
    as_json: Json = False,
) -> None:
    """Count words: map, combine, shuffle, reduce."""
    from meshwright.cli.wordcount import count_files  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: count_files(output, files, engine, parallelism, address, top))


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of the job file."""
    import json  # noqa: PLC0415

    from meshwright.job_files import job_schema  # noqa: PLC0415

    typer.echo(json.dumps(job_schema(), indent=None if as_json else 2))

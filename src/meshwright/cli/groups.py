"""Commands with a second word: ``checkpoint``, ``bench``, ``schedule`` and ``simulate``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.completion import complete_cluster
from meshwright.cli.options import JobSource, Json, Overrides, PlanSource, guarded
from meshwright.cli.output import Output

checkpoint_app = typer.Typer(help="List, verify, copy, export and delete checkpoints.", rich_markup_mode=None)
bench = typer.Typer(help="Measure this machine.", rich_markup_mode=None)
schedule_app = typer.Typer(help="Generate, prove and draw schedules.", rich_markup_mode=None)
simulate_app = typer.Typer(help="Simulate training without devices.", rich_markup_mode=None)

GROUPS = {"checkpoint": checkpoint_app, "bench": bench, "schedule": schedule_app, "simulate": simulate_app}

Checkpoints = Annotated[
    str, typer.Argument(help="Folder of checkpoints, run folder, or s3://BUCKET/PREFIX.", metavar="DIR")
]

Cluster = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Cluster: nodes x devices x preset, such as 8x8xh100-sxm.",
        autocompletion=complete_cluster,
    ),
]


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
    keep_every: Annotated[
        int, typer.Option(min=0, help="Also keep those whose step is a multiple of this. Default: 0, none.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints; the newest complete one and the best one stay."""
    from meshwright.cli.checkpoint import prune_folder  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: prune_folder(output, path, keep, keep_every))


@checkpoint_app.command("copy")
def copy_checkpoints(
    source: Annotated[
        str,
        typer.Argument(
            help="Checkpoint, folder of checkpoints, run folder, or s3://BUCKET/PREFIX.", metavar="DIR"
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="Folder of checkpoints to copy to, or s3://BUCKET/PREFIX.", metavar="TARGET")
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Copy all complete checkpoints, not only the newest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the newest checkpoint to another folder or object store."""
    from meshwright.cli.checkpoint import copy_to  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: copy_to(output, source, target, every))


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@checkpoint_app.command()
def export(
    path: Annotated[
        str,
        typer.Argument(
            help="Checkpoint, folder of checkpoints, run folder, or s3://BUCKET/PREFIX.", metavar="DIR"
        ),
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


@bench.command("collectives")
def bench_collectives(
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks. Default: the GPUs or CPU cores of this machine.")
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            help="Operations, such as all_reduce,broadcast. "
            "Default: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all."
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Our algorithms, besides that of the backend; `backend`: none. "
            "Default: ring, tree, halving_doubling."
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of the tensor, such as 64kB,1MB. Default: 1 KiB to 256 MiB.")
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget-s", help="Time for all, in seconds; what does not fit is skipped.")
    ] = 120.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure the CPU even if there are GPUs.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Picture to write: .svg, .png or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure collectives between local ranks: every algorithm, over every transport."""
    from meshwright.cli.bench import CollectivesRequest, show_collectives  # noqa: PLC0415

    output = Output(as_json)
    request = CollectivesRequest(ranks, ops, algorithms, sizes, budget_s, cpu)
    guarded(output, lambda: show_collectives(output, request, out))


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


@schedule_app.command()
def collective(  # noqa: PLR0913, PLR0917  (options of a command)
    op: Annotated[
        str,
        typer.Option(
            help="broadcast, scatter, gather, all_gather, reduce, reduce_scatter, all_reduce or all_to_all."
        ),
    ] = "all_reduce",
    algorithm: Annotated[
        str,
        typer.Option(
            help="naive, ring, tree, double_tree, recursive_doubling, halving_doubling, hierarchical or 2d."
        ),
    ] = "ring",
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    root: Annotated[int, typer.Option(help="Root of broadcast, scatter, gather and reduce.")] = 0,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks of a node, of hierarchical; row length of 2d. Default of 2d: square."),
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="Ranks in ring order, such as 0,2,1,3. Default: 0,1,2,3.")
    ] = None,
    segments: Annotated[int, typer.Option(help="Segments that are pipelined along a chain or tree.")] = 1,
    size: Annotated[str, typer.Option(help="Size of the tensor, such as 64MB or 1MiB.")] = "1MB",
    on: Cluster = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Picture to write: .svg, .png or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate the schedule of a collective, prove it, count steps and bytes, and draw it step by step."""
    from meshwright.cli.collective import CollectiveRequest, show_collective  # noqa: PLC0415

    output = Output(as_json)
    request = CollectiveRequest(op, algorithm, ranks, root, ranks_per_node, order, segments, size, on)
    guarded(output, lambda: show_collective(output, request, out))


@simulate_app.callback()
def _simulate() -> None:
    """Simulate training without devices."""


@simulate_app.command()
def step(
    job: PlanSource,
    overrides: Overrides = None,
    on: Cluster = None,
    pp_ranks: Annotated[
        str | None,
        typer.Option(help="Pipeline ranks in the picture and the trace, such as 0,3. Default: all."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Trace to write: Chrome JSON, for Perfetto or chrome://tracing.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Picture to write: .svg, .png or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step of a layout: compute, collectives by axis and bubbles as a timeline."""
    from meshwright.cli.simulate_step import StepRequest, simulate_step  # noqa: PLC0415

    output = Output(as_json)
    request = StepRequest(job, tuple(overrides or ()), on, pp_ranks, trace, out)
    guarded(output, lambda: simulate_step(output, request))


@simulate_app.command()
def failures(  # noqa: PLR0913, PLR0917  (options of a command)
    job: PlanSource,
    overrides: Overrides = None,
    days: Annotated[float, typer.Option(help="Length of each simulated run.")] = 54.0,
    on: Cluster = None,
    runs: Annotated[int, typer.Option(help="Number of simulated runs.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    every_minutes: Annotated[
        float | None, typer.Option(help="Minutes between checkpoints. Default: Daly's interval.")
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Spare nodes. Default: the best number per paid device hour.")
    ] = None,
    save_s: Annotated[float | None, typer.Option(help="Training that a save costs, in seconds.")] = None,
    detect_s: Annotated[
        float | None, typer.Option(help="Time to detect a failure. Default: elastic.heartbeat_timeout_s.")
    ] = None,
    restart_s: Annotated[
        float | None, typer.Option(help="Time from the detection to the start of the load, in seconds.")
    ] = None,
    load_s: Annotated[float | None, typer.Option(help="Time to read the checkpoint, in seconds.")] = None,
    repair_hours: Annotated[float, typer.Option(help="Time to repair a failed node.")] = 24.0,
    repair: Annotated[
        str, typer.Option(help="Distribution of the repair time: fixed or exponential.")
    ] = "fixed",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Failures per 1,000 node-days of device, node, switch, software or preemption, such as "
            "device=2.4.",
            metavar="KIND=RATE",
        ),
    ] = None,
    nodes_per_switch: Annotated[
        int, typer.Option(help="Nodes that a switch failure takes out of service.")
    ] = 1,
    snapshot_minutes: Annotated[
        float | None, typer.Option(help="Minutes between in-memory snapshots. Default: no snapshots.")
    ] = None,
    snapshot_cost_s: Annotated[
        float | None, typer.Option(help="Training that a snapshot costs, in seconds.")
    ] = None,
    replan: Annotated[
        bool | None,
        typer.Option(
            "--replan/--no-replan",
            help="Go on with fewer nodes instead of waiting for repairs. Default: by elastic.may_change.",
        ),
    ] = None,
    min_nodes: Annotated[
        int | None, typer.Option(help="Fewest nodes to go on with. Default: the fewest that hold the job.")
    ] = None,
    nodes_per_replica: Annotated[
        int | None, typer.Option(help="Fewer nodes are a multiple of this. Default: nodes of pp x cp x tp.")
    ] = None,
    price_factor: Annotated[
        float, typer.Option(help="Price of preemptible machines over cluster.cost_per_hour.")
    ] = 1.0,
    notice_s: Annotated[float, typer.Option(help="Notice of a preemption, in seconds.")] = 30.0,
    replace_hours: Annotated[
        float, typer.Option(help="Time from a preemption until another node is there.")
    ] = 1.0,
    observed_goodput: Annotated[
        float | None, typer.Option(help="Print the time lost per failure that this goodput implies.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Plot to write: .svg, .png or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate months of failures: goodput, cost, the best checkpoint interval and number of spare nodes."""
    from meshwright.api import FailureSettings  # noqa: PLC0415
    from meshwright.cli.simulate import SimulationRequest, simulate_failures  # noqa: PLC0415

    output = Output(as_json)
    request = SimulationRequest(job, overrides or [], on, days, runs, seed)
    settings = FailureSettings(
        every_minutes=every_minutes,
        spares=spares,
        save_s=save_s,
        detect_s=detect_s,
        restart_s=restart_s,
        load_s=load_s,
        repair_hours=repair_hours,
        repair=repair,
        nodes_per_switch=nodes_per_switch,
        snapshot_minutes=snapshot_minutes,
        snapshot_cost_s=snapshot_cost_s,
        replan=replan,
        min_nodes=min_nodes,
        nodes_per_replica=nodes_per_replica,
        price_factor=price_factor,
        notice_s=notice_s,
        replace_hours=replace_hours,
    )
    guarded(output, lambda: simulate_failures(output, request, settings, rate or [], observed_goodput, out))


@simulate_app.command("collective")
def simulate_collective(
    op: Annotated[str, typer.Option(help="The operation, such as all_reduce or all_gather.")] = "all_reduce",
    on: Annotated[
        str,
        typer.Option(
            help="Cluster: nodes x devices x preset, such as 2x8xh100-sxm.", autocompletion=complete_cluster
        ),
    ] = "2x8xh100-sxm",
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, such as 4,8,16. Default: powers of two up to 64.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of the tensor, such as 64kB,1MB. Default: 1 KiB to 1 GiB.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Picture to write: .svg, .png or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate every algorithm of a collective: which is fastest at which size and number of ranks."""
    from meshwright.cli.collective import show_comparison  # noqa: PLC0415

    output = Output(as_json)
    guarded(output, lambda: show_comparison(output, op, on, ranks, sizes, out))

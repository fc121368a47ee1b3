"""Loss curves of fp8 against bf16: the same job, weights and text, step by step.

    python benchmarks/fp8_loss.py --batch 2 --out losses.jsonl --svg losses.svg      # on a GPU
    python benchmarks/fp8_loss.py --only bf16 --out losses.jsonl            # one kind now, the others later
    python benchmarks/fp8_loss.py --judge losses.jsonl --svg losses.svg     # compare written losses
    python benchmarks/fp8_loss.py --kind two:train.precision=fp8            # weight gradients in 16 bits
    python benchmarks/fp8_loss.py --small --steps 60 --window 10 --last 20 --skip 2     # a small run on a CPU

The text is Python source found on this machine (``python_text.py``). The order of samples and the initial
weights depend on the job's seed only. Each kind trains in its own process, like those of ``one_device.py``:
all compile at the same time, then they use the device one after the other. Near ``--limit`` each gets an
equal share of the remaining time.

The control, kind ``again``, is bf16 with kernels that round differently. Training amplifies such
differences: with a high learning rate two bf16 runs diverge by more than 1%, and the comparison with fp8
means nothing. So the control must be within the limit, too, over the steps that it has. Without a control
the output says so.

Two values are compared: means over windows of steps, without the first windows, in which the loss falls
quickly; and the mean over the last steps. The exit status is 0 if every kind except the control has all
steps, and all are within ``--within`` percent of the first kind; else 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark_shapes import COMPARED
from one_device import Row, WorkerPool, find_device
from one_device_worker import WARM_UP, Task, build_shape
from python_text import describe_text, write_text

from meshwright.report.figure import save_figure
from meshwright.report.plot import Chart, Series, draw_chart

KINDS = {
    "bf16": ("train.precision=bf16",),
    "fp8": ("train.precision=fp8", "train.fp8_weight_grads=true"),
    "again": ("train.precision=bf16", "train.block_backend=compile"),
}
"""The first is the reference."""
CONTROL = "again"
RECIPE = ("train.lr=1e-5", "train.clip=1.0", "train.warmup=20", "train.gemm_autotune=false")
"""Linear warm-up, then cosine decay to 10%; ``--set`` overrides it. With ten times the learning rate two
bf16 runs diverge (docs/log.md)."""
SPARE_SAMPLES = 8
"""Spare samples for the ends of shards."""
WIDTH, HEIGHT = 720, 300
"""Size of each of the two charts, in pixels."""
LIMIT_STYLE = 2
"""A grey line."""


def compare(losses: dict[str, list[float]], args: argparse.Namespace) -> Row:
    """Every kind against the first, over the steps that both have.

    Args:
        losses: Loss of each step, by kind.
        args: ``steps``, ``window``, ``skip``, ``last`` and ``within``.
    """
    (base_name, base), *others = losses.items()
    found: Row = {"reference": base_name, "kinds": {}}
    for name, curve in others:
        steps = min(len(base), len(curve))
        windows = [
            _compare_means(base, curve, start, min(start + args.window, steps))
            for start in range(0, steps - args.window // 2, args.window)
        ]
        last = _compare_means(base, curve, max(0, steps - args.last), steps)
        judged = windows[args.skip :]  # a NaN is not within the limit
        within = bool(judged) and all(abs(w["percent"]) <= args.within for w in (*judged, last))
        found["kinds"][name] = {
            "steps": steps,
            "complete": steps >= args.steps,
            "first_step_percent": 100.0 * (curve[0] / base[0] - 1),
            "windows": windows,
            "largest_percent": max((w["percent"] for w in judged), key=abs, default=None),
            "last": last,
            "within": within,
        }
    control = found["kinds"].get(CONTROL)
    measured = control and control["largest_percent"] is not None
    found["control_within"] = control["within"] if measured else None
    judged = [kind for name, kind in found["kinds"].items() if name != CONTROL]
    passed = bool(judged) and all(kind["within"] and kind["complete"] for kind in judged)
    found["passed"] = passed and found["control_within"] is not False
    return found


def _compare_means(base: list[float], curve: list[float], start: int, end: int) -> Row:
    """Means over steps ``start + 1`` to ``end``, and the relative difference."""
    ours, theirs = statistics.fmean(curve[start:end]), statistics.fmean(base[start:end])
    return {
        "steps": [start + 1, end],
        "reference": theirs,
        "loss": ours,
        "percent": 100.0 * (ours / theirs - 1),
    }


def describe(found: Row, args: argparse.Namespace) -> list[str]:
    """The table and the verdict."""
    lines = []
    for name, kind in found["kinds"].items():
        lines.append(f"{'steps':>11} {found['reference']:>9} {name:>9} {'difference':>11}")
        for number, window in enumerate([*kind["windows"], kind["last"]]):
            first, last = window["steps"]
            note = "  skipped" if number < args.skip else ""
            lines.append(
                f"{first:>5}-{last:<5} {window['reference']:9.4f} {window['loss']:9.4f} "
                f"{window['percent']:+10.3f}%{note}"
            )
        largest = kind["largest_percent"]
        worst = "no window to compare" if largest is None else f"worst window {largest:+.3f}%"
        verdict = "within" if kind["within"] else "NOT within"
        complete = "" if kind["complete"] else f"; INCOMPLETE: {kind['steps']} of {args.steps} steps"
        last = f"last {args.last} steps {kind['last']['percent']:+.3f}%"
        first = f"first step {kind['first_step_percent']:+.4f}%"
        lines.append(f"{name}: {worst}, {last}, {first}: {verdict} {args.within:g}%{complete}")
    if found["control_within"] is False:
        lines.append(
            f"control failed: two {found['reference']} runs diverge by more than {args.within:g}%; "
            "the result for fp8 means nothing with this recipe"
        )
    elif lines and found["control_within"] is None:
        lines.append(f"no control: the divergence of two {found['reference']} runs is unknown")
    return lines or ["nothing to compare: fewer than two kinds have losses"]


def draw(losses: dict[str, list[float]], found: Row, within: float, path: Path) -> None:
    """The curves, and the differences of windows with their limits."""
    ends = (1.0, float(max(map(len, losses.values()))))
    curves = tuple(
        Series(name, (tuple(enumerate(curve, start=1)),), style=style)
        for style, (name, curve) in enumerate(losses.items())
    )
    limits = tuple(tuple((end, side * within) for end in ends) for side in (1, -1))
    differences = tuple(
        Series(name, (tuple((w["steps"][1], w["percent"]) for w in kind["windows"]),), style=style)
        for style, (name, kind) in enumerate(found["kinds"].items(), start=1)
    )
    differences += (Series(f"limits of {within:g}%", limits, style=LIMIT_STYLE, dashed=True),)
    above = f"% above {found['reference']}"
    charts = (
        Chart("Loss", "step", "loss", curves, whole_x=True, x_range=ends),
        Chart("Means of windows", "step", above, differences, whole_x=True, x_range=ends),
    )
    save_figure(draw_chart(*charts, width=WIDTH, height=HEIGHT), path)


def read_losses(files: Sequence[Path]) -> dict[str, list[float]]:
    """Losses written by earlier runs; of two runs of a kind, the later one."""
    losses: dict[str, list[float]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "step" in row and "loss" in row:
                curve = losses.setdefault(row["kind"], [])
                curve[row["step"] - 1 :] = [row["loss"]]
    return dict(sorted(losses.items(), key=lambda item: item[0] != next(iter(KINDS))))


def train(args: argparse.Namespace, screen: Any) -> tuple[dict[str, list[float]], Row]:
    """Train every kind; returns the losses, and a description of text, device and speed."""
    device, name = find_device()
    batch = args.batch
    sizes = (f"train.global_batch={batch}", f"layout.micro_batch={batch}") if batch else ()
    common = (*RECIPE, f"train.steps={args.steps}", *sizes, *args.set)
    kinds = {**KINDS, **dict(args.kind)}
    kinds = {kind: settings for kind, settings in kinds.items() if not args.only or kind in args.only}
    shared: Row = {"kind": "ours", "shape": args.shape, "steps": args.steps - WARM_UP}
    shared |= {"small": args.small, "device": device, "length": args.length, "precompile": True}
    shared["threads"] = max(1, (os.cpu_count() or 1) // max(1, len(kinds)))
    with tempfile.TemporaryDirectory() as place:
        logs, text = Path(place) / "logs", Path(place) / "text"
        logs.mkdir()
        text.mkdir()
        pool = WorkerPool(args.limit, logs, args.out, screen)
        tasks = [
            Task(name=kind, settings=(*common, *settings), text=str(text), **shared)
            for kind, settings in kinds.items()
        ]
        job = build_shape(tasks[0], text)
        samples = args.steps * job.train.global_batch + SPARE_SAMPLES
        about = write_text(text, job.model.vocab_size, samples * job.data.seq_len)
        print(f"[{pool.seconds:6.1f} s] {describe_text(about)}", file=screen, flush=True)
        pool.run(tasks, overlap=True, ready_limit_s=args.ready_limit, evenly=True)
    rows = [{key: value for key, value in row.items() if key != "times_s"} for row in pool.rows]
    return pool.losses, {"machine": f"{name}, torch {pool.torch}", "text": about, "rows": rows}


def parse_kind(text: str) -> tuple[str, tuple[str, ...]]:
    """A name, and the keys that it sets."""
    name, _, settings = text.partition(":")
    return name, tuple(settings.split(",")) if settings else ()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", default="b", choices=COMPARED, help="a shape of one_device.py")
    add("--small", action="store_true", help="a shape for a CPU")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=0, help="sequences per step; default: the shape's")
    add("--length", type=int, default=0, help="tokens per sequence; default: the shape's, 4096")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every kind's job")
    add(
        "--kind",
        action="append",
        type=parse_kind,
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="one more kind",
    )
    add("--only", action="append", metavar="NAME", help="train only these kinds")
    add(
        "--judge",
        action="append",
        type=Path,
        metavar="FILE",
        help="train nothing, compare the losses in these files",
    )
    add("--window", type=int, default=50, help="steps per window")
    add("--skip", type=int, default=1, help="first windows to skip")
    add("--last", type=int, default=100, help="steps of the mean at the end")
    add("--within", type=float, default=0.5, help="largest difference, in percent")
    add("--limit", type=float, default=1200.0, help="seconds for everything")
    add("--ready-limit", type=float, default=120.0, help="seconds until the first kind uses the device")
    add("--out", type=Path, help="append everything to this file as JSON lines, each step as it comes")
    add("--svg", type=Path, help="plot of the curves and of their difference")
    add("--json", action="store_true", help="print one object; progress goes to standard error")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    return args


def main() -> None:
    """Train or read, compare, print, draw."""
    args = parse_arguments()
    about: Row = {}
    if args.judge:
        losses = read_losses(args.judge)
    else:
        losses, about = train(args, sys.stderr if args.json else sys.stdout)
    nothing: Row = {"reference": None, "kinds": {}, "control_within": None, "passed": False}
    found = compare(losses, args) if losses else nothing
    if args.svg and losses:
        draw(losses, found, args.within, args.svg)
    if args.json:
        date = str(datetime.datetime.now(tz=datetime.UTC).date())
        print(json.dumps({"date": date, **about, **found, "losses": losses}))
    else:
        print("\n".join(describe(found, args)))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()

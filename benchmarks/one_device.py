"""Training steps on one device: ours, plain torch and the floor, with ratios and parts.

``ours`` is the training loop of ``meshwright train``. ``bare`` is plain torch, a Llama after torchtitan's
(``torch_llama.py``). ``floor`` is the sum of each part of the step timed alone (``step_floor.py``). FLOPs of
all: 6 per token and parameter without the input embedding, plus causal attention (half). Two
shapes, both bf16, untied, vocabulary 128256: (a) 16 layers, 2048 wide, 8 x 4096 tokens; (b) 28 layers, 3072
wide, 4 x 4096 tokens.

    python benchmarks/one_device.py --overlap --profile --out rows.jsonl    # on a GPU
    python benchmarks/one_device.py --shape b --only ours --set train.residual_dtype=fp32
    python benchmarks/one_device.py --shape b --also train.precision=fp8    # a second kind of ours
    python benchmarks/one_device.py --only ours --set cluster.file=probed.toml    # predicted from the probe
    python benchmarks/one_device.py --shape a --only ours --overlap --steps 2 --limit 400 --length 8192 \
        --length 32768 --length 131072:layout.recompute=full                # long context
    python benchmarks/one_device.py --only ours --shape experts --shape gpt2-xl --profile    # outside the fit
    python benchmarks/one_device.py --small                                 # small shapes for a CPU

``--length`` splits the tokens of a step into longer sequences, at least one: 8 x 4096 becomes 1 x 32768, then
1 x 131072. A row says so if the plan rejects it or the device runs out of memory.

Each kind runs in its own process; a failure does not stop the others. With ``--overlap`` all start at once
and compile at the same time, each on a model of one layer; then they use the device one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmark_shapes import COMPARED, SHAPES
from kernel_classes import describe
from one_device_worker import Task

from meshwright.spec.cluster import find_gpus

SUSTAINED = "sustained floor"
KINDS = ("ours", "bare", "floor", "transformers")
DEFAULT_KINDS = ("ours", "bare", "floor")
STDERR_LINES = 15
MOST_TIMES = 40
"""Steps whose times are printed one by one."""
LOSS_EVERY = 50
"""Steps between printed losses."""
EXIT_S = 15.0
"""Seconds that a process may take to exit."""
GIB = 2**30
Row = dict[str, Any]


class Worker:
    """A process that measures one kind; its messages come through a queue."""

    def __init__(self, task: Task, logs: Path, messages: queue.Queue[tuple[Worker, Row | None]]) -> None:
        self.task = task
        self.ready = self.ended = False
        self.row: Row | None = None
        self.disturbed_by: list[str] = []
        """Workers that were still compiling when this one got the device."""
        self.planned: Row = {}
        """Planned time and memory."""
        self.losses: list[float] = []
        """Loss of every step so far, if reported."""
        self._log = logs / f"{len(list(logs.iterdir()))}.txt"
        script = Path(__file__).with_name("one_device_worker.py")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(asdict(task))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        threading.Thread(target=self._read, args=(messages,), daemon=True).start()

    @property
    def name(self) -> str:
        """Kind, shape and length."""
        return f"{self.task.name} ({label(self.about)})"

    @property
    def about(self) -> Row:
        """Fields common to all its rows."""
        length = {"length": self.task.length} if self.task.length else {}
        return {"kind": self.task.name, "shape": self.task.shape, **length}

    def _read(self, messages: queue.Queue[tuple[Worker, Row | None]]) -> None:
        assert self.process.stdout is not None, "a pipe was asked for"
        for line in self.process.stdout:
            try:
                messages.put((self, json.loads(line)))
            except ValueError:
                continue  # not a message
        self.process.wait()
        messages.put((self, None))

    def start_measuring(self) -> None:
        """Let it use the device."""
        assert self.process.stdin is not None, "a pipe was asked for"
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended; the queue has a message about that

    def finish(self) -> None:
        """Wait until it has released the device."""
        try:
            self.process.wait(timeout=EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.ended = True

    def kill(self) -> None:
        """Kill it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stderr_tail(self) -> str:
        """The end of its standard error."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-STDERR_LINES:])


class WorkerPool:
    """All workers of a benchmark run, and their results."""

    def __init__(self, limit_s: float, logs: Path, out: Path | None, screen: TextIO) -> None:
        self.rows: list[Row] = []
        self.torch = "unknown"
        """Torch version, as the workers report it."""
        self._messages: queue.Queue[tuple[Worker, Row | None]] = queue.Queue()
        self._workers: list[Worker] = []
        self._started = time.monotonic()
        self._limit_s, self._logs, self._out, self._screen = limit_s, logs, out, screen

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def losses(self) -> dict[str, list[float]]:
        """Losses by kind, if reported."""
        return {worker.task.name: worker.losses for worker in self._workers if worker.losses}

    def run(self, tasks: list[Task], overlap: bool, ready_limit_s: float, evenly: bool = False) -> None:
        """Measure all tasks: one after the other, or with overlapping compilation.

        Args:
            tasks: The tasks, in this order.
            overlap: Whether all start at once.
            ready_limit_s: How long the device waits for the slowest to be ready.
            evenly: Whether the remaining time is shared equally.
        """
        try:
            workers = [self._start(task) for task in tasks] if overlap else []
            limit_s = min(ready_limit_s, self._limit_s)
            while self.seconds < limit_s and not all(w.ready or w.ended for w in workers):
                self._process_message(limit_s)
            for number, task in enumerate(tasks):
                left = len(tasks) - number if evenly else 1
                until_s = self.seconds + (self._limit_s - self.seconds) / left
                self._measure(workers[number] if overlap else self._start(task), until_s)
        finally:
            for worker in self._workers:
                worker.kill()

    def _start(self, task: Task) -> Worker:
        worker = Worker(task, self._logs, self._messages)
        self._workers.append(worker)
        return worker

    def _measure(self, worker: Worker, until_s: float) -> None:
        """Give the device to a worker until it ends or its time is up."""
        worker.disturbed_by = [w.name for w in self._workers if not (w is worker or w.ready or w.ended)]
        worker.start_measuring()
        while not worker.ended and self.seconds < until_s:
            self._process_message(until_s)
        if not worker.ended:
            worker.kill()
            worker.finish()
            reason = f"not done after {until_s:.0f} s"
            self._keep(worker, {"failed": f"{reason}\n{worker.stderr_tail()}", "reason": reason})

    def _process_message(self, until_s: float) -> None:
        """Process one message, or return at the time limit."""
        try:
            worker, message = self._messages.get(timeout=max(0.01, until_s - self.seconds))
        except queue.Empty:
            return
        if message is None:
            if worker.row is None and not worker.ended:
                reason = f"ended with status {worker.process.returncode}"
                self._keep(worker, {"failed": f"{reason}\n{worker.stderr_tail()}", "reason": reason})
            worker.ended = True
        elif "result" in message:
            self._keep(worker, {**message["result"], "disturbed_by": worker.disturbed_by})
            worker.finish()
        elif "failed" in message and "phase" not in message:
            self._keep(worker, {key: message.get(key) for key in ("failed", "reason", "peak_bytes")})
            worker.finish()
        elif "loss" in message and "step" in message:
            worker.losses.append(message["loss"])
            self._write({**worker.about, "step": message["step"], "loss": message["loss"]})
            if message["step"] % LOSS_EVERY == 0:
                self._print(f"{worker.name}: step {message['step']}, loss {message['loss']:.4f}")
        else:
            worker.planned |= {key: value for key, value in message.items() if key.startswith("planned_")}
            worker.ready = worker.ready or bool(message.get("ready"))
            self.torch = message.get("torch", self.torch)
            self._write({**worker.about, **message})
            self._print(f"{worker.name}: {describe_phase(message)}")

    def _keep(self, worker: Worker, found: Row) -> None:
        worker.row = {**worker.about, **worker.planned, **found}
        self.rows.append(worker.row)
        self._write(worker.row)
        for line in describe_row(worker.row):
            self._print(line)

    def _write(self, content: Row) -> None:
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps({"at_s": round(self.seconds, 2), **content}) + "\n")

    def _print(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", file=self._screen, flush=True)


def describe_phase(message: Row) -> str:
    """The phase that a worker has completed, its time, and its memory."""
    if "failed" in message:
        return f"{message['phase']} failed: {message['failed']}"
    text = f"{message['phase']}, {message['seconds']:.1f} s"
    if message.get("held_bytes") is not None:
        peak = message.get("peak_bytes") or 0
        text += f", {message['held_bytes'] / GIB:.1f} GiB allocated, peak {peak / GIB:.1f} GiB"
    if message.get("step_s"):
        text += f", {message['step_s'] * 1e3:.1f} ms/step"
    if message.get("planned_step_s"):
        text += f", {message['planned_step_s'] * 1e3:.1f} ms/step"
        text += f", {message['planned_peak_bytes'] / GIB:.1f} GiB"
    for name, seconds in {**message.get("parts", {}), **message.get("shown", {})}.items():
        text += f"\n             {name}: {seconds * 1e3:.2f} ms"
    return text


def describe_row(row: Row) -> list[str]:
    """A result as text, with its profile."""
    name = f"{row['kind']} ({label(row)})"
    if "failed" in row:
        lines = [f"    {line}" for line in row["failed"].splitlines()]
        return [f"{name} FAILED: {describe_failure(row)}", *lines]
    if not row["step_s"]:
        return [f"{name}: incomplete, failed: {row['failed_parts']}"]
    text = f"{name}: {row['step_s'] * 1e3:.1f} ms, {row['flops_per_s'] / 1e12:.4g} TFLOP/s"
    if row.get("peak_bytes"):
        text += f", peak {row['peak_bytes'] / GIB:.1f} GiB (reserved {row['reserved_bytes'] / GIB:.1f})"
    if row.get("held_before_bytes"):
        text += f", {row['held_before_bytes'] / GIB:.2f} GiB of it from precompiling"
    if row.get("event_step_s"):
        text += f"; {row['event_step_s'] * 1e3:.1f} ms in its step events"
    text += describe_planned(row)
    if row.get("loss") is not None:
        text += f"; loss {row['loss']:.3f}"
    lines = [text]
    if 0 < len(row.get("times_s") or ()) <= MOST_TIMES:
        lines.append("    steps: " + ", ".join(f"{seconds * 1e3:.1f}" for seconds in row["times_s"]) + " ms")
    return lines + (describe(row["profile"]) if row.get("profile") else [])


def label(row: Row) -> str:
    """Shape and, if not the default, length."""
    return f"{row['shape']}, {row['length']} tokens" if row.get("length") else str(row["shape"])


def describe_planned(row: Row) -> str:
    """The plan's prediction and its error; empty without a plan."""
    if not row.get("planned_step_s"):
        return ""
    step_s, peak = row["planned_step_s"], row["planned_peak_bytes"]
    text = f"; planned {step_s * 1e3:.1f} ms ({step_s / row['step_s'] - 1:+.1%}), {peak / GIB:.1f} GiB"
    return text + (f" ({peak / row['peak_bytes'] - 1:+.1%})" if row.get("peak_bytes") else "")


def describe_failure(row: Row) -> str:
    """Why there is no result, with reached and planned memory."""
    text = str(row.get("reason") or "failed")
    if row.get("peak_bytes"):
        text += f", {row['peak_bytes'] / GIB:.1f} GiB reached"
    if row.get("planned_peak_bytes"):
        text += f", {row['planned_peak_bytes'] / GIB:.1f} GiB planned"
    return text


def compare(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """For each shape, the speed of every kind of ours against plain torch, transformers and the floor."""
    ratios: dict[str, dict[str, Any]] = {}
    for shape in dict.fromkeys(label(row) for row in in_order(rows)):
        of_shape = [row for row in rows if label(row) == shape]
        times = {row["kind"]: row["step_s"] for row in of_shape if row.get("step_s")}
        for row in of_shape:
            if row.get("sustained_step_s"):
                times[SUSTAINED] = row["sustained_step_s"]
        others = [kind for kind in ("bare", "transformers", "floor", SUSTAINED) if kind in times]
        found = {
            f"{kind} / {other}": times[other] / times[kind]
            for kind in times
            if kind.startswith("ours")
            for other in others
        }
        if "floor" in times and "bare" in times:
            found["bare / floor"] = times["floor"] / times["bare"]
        ratios[shape] = found
    return ratios


def in_order(rows: list[Row]) -> list[Row]:
    """Sorted by shape and length (stable)."""
    return sorted(rows, key=lambda row: (row["shape"], row.get("length", 0)))


def describe_all(result: Row) -> list[str]:
    """The table at the end."""
    lines = [f"one device, {result['date']}, {result['machine']}"]
    for row in in_order(result["rows"]):
        name = f"  ({label(row)}) {row['kind']:24}"
        if row.get("step_s"):
            rate = f"{row['flops_per_s'] / 1e12:7.4g} TFLOP/s"
            peak = f", peak {row['peak_bytes'] / GIB:.1f} GiB" if row.get("peak_bytes") else ""
            noisy = ", others were still compiling" if row.get("disturbed_by") else ""
            planned = describe_planned(row)
            lines.append(f"{name} {row['step_s'] * 1e3:9.1f} ms, {rate}{peak}{planned}{noisy}")
        else:
            lines.append(f"{name} {describe_failure(row)}")
        if row["kind"] == "floor" and row.get("parts_s"):
            lines += _describe_parts(row)
    for shape, ratios in result["ratios"].items():
        lines += [f"  ({shape}) speed of {pair}: {ratio:.3f}" for pair, ratio in ratios.items()]
    return lines


def _describe_parts(row: Row) -> list[str]:
    """The floor by kind of part."""
    groups: dict[str, float] = {}
    for name, seconds in row["parts_s"].items():
        group = name.split(",")[0].split()[0]
        groups[group] = groups.get(group, 0.0) + seconds
    parts = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in groups.items())
    rates = {
        "GEMMs": (row["gemm_flops_per_s"], "TFLOP/s"),
        "attention": (row["attention_flops_per_s"], "TFLOP/s"),
        "copies": (row["copy_bytes_per_s"], "TB/s"),
    }
    reached = [f"{name} {rate / 1e12:.4g} {unit}" for name, (rate, unit) in rates.items() if rate]
    lines = [f"      {parts}", f"      {', '.join(reached)}"]
    if row.get("sustained_step_s"):
        gemms = row["sustained_gemm_flops_per_s"] / 1e12
        lines.append(
            f"      sustained load: {row['sustained_step_s'] * 1e3:.1f} ms, "
            f"{row['flops'] / row['sustained_step_s'] / 1e12:.4g} TFLOP/s, GEMMs {gemms:.4g} TFLOP/s"
        )
    return lines


def list_tasks(arguments: argparse.Namespace, device: str) -> list[Task]:
    """The tasks, most important first."""
    kinds = arguments.only or DEFAULT_KINDS
    shared = {"steps": arguments.steps, "small": arguments.small, "device": device}
    names: list[tuple[str, str, tuple[str, ...]]] = []
    for kind in (kind for kind in KINDS if kind in kinds):
        settings = tuple(arguments.set) if kind == "ours" else ()
        names.append((kind, kind, settings))
        if kind == "ours":
            names += [(kind, f"ours {more}", (*settings, *more.split(","))) for more in arguments.also]
    shapes, lengths = arguments.shape or list(COMPARED), arguments.length or [(0, ())]
    compiling = sum(kind != "floor" for kind, *_ in names) * len(shapes) * len(lengths)
    threads = max(1, (os.cpu_count() or 1) // max(1, compiling if arguments.overlap else 1))
    return [
        Task(
            kind=kind,
            name=name,
            shape=shape,
            settings=(*settings, *more) if kind == "ours" else (),
            length=length,
            precompile=arguments.overlap,
            profile=arguments.profile and kind == "ours",
            threads=threads,
            **shared,
        )
        for shape in shapes
        for length, more in lengths
        for kind, name, settings in names
    ]


def find_device() -> tuple[str, str]:
    """Kind and name of the device, without importing torch here."""
    gpus = find_gpus()
    return ("cuda", gpus[0][0]) if gpus else ("cpu", "CPU")


def parse_length(text: str) -> tuple[int, tuple[str, ...]]:
    """A length, and the keys of our job for it."""
    tokens, _, settings = text.partition(":")
    return int(tokens), tuple(settings.split(",")) if settings else ()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="default: a and b")
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="default: ours, bare (plain torch) and floor"
    )
    parser.add_argument(
        "--length",
        action="append",
        type=parse_length,
        default=[],
        metavar="TOKENS[:KEY=VALUE,...]",
        help="tokens per sequence, with these keys of our job; repeatable; default: the shape's",
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our job")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="one more kind of ours with these keys",
    )
    parser.add_argument("--overlap", action="store_true", help="compile at the same time")
    parser.add_argument("--profile", action="store_true", help="profile our steps by kind of kernel")
    parser.add_argument("--limit", type=float, default=210.0, help="seconds for everything")
    parser.add_argument(
        "--ready-limit", type=float, default=100.0, help="seconds until the first measurement"
    )
    parser.add_argument("--out", type=Path, help="append everything to this file as JSON lines")
    parser.add_argument(
        "--json", action="store_true", help="print one object; progress goes to standard error"
    )
    given = parser.parse_args()
    others = [shape for shape in given.shape or () if shape not in COMPARED]
    if others and (given.small or given.only != ["ours"]):
        parser.error(f"--shape {others[0]}: only with --only ours, and without --small")
    return given


def main() -> None:
    """Measure, print, compare."""
    arguments = parse_arguments()
    device, name = find_device()
    screen = sys.stderr if arguments.json else sys.stdout
    with tempfile.TemporaryDirectory() as logs:
        pool = WorkerPool(arguments.limit, Path(logs), arguments.out, screen)
        pool.run(list_tasks(arguments, device), arguments.overlap, arguments.ready_limit)
    result: Row = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "machine": f"{name}, torch {pool.torch}",
        "seconds": pool.seconds,
        "rows": pool.rows,
        "ratios": compare(pool.rows),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print("\n".join(describe_all(result)))
    print(f"  total {pool.seconds:.0f} s")


if __name__ == "__main__":
    main()
